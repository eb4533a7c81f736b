"""The default generators' states around a checkpointed region."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree  # the public torch.utils.pytree is newer than torch 2.6
from torch.utils._python_dispatch import _disable_current_modes


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def moved(tree: Any, device: torch.device) -> Any:
    """Return nested containers with detached copies, on ``device``, of the tensors in them."""
    copies: dict[torch.Tensor, torch.Tensor] = {}  # one for each: compiled code is made for arguments that are the same

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in copies:
            copies[tensor] = tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)
        return copies[tensor]

    return pytree.tree_map_only(torch.Tensor, copy, tree)


def default_generator(device: torch.device) -> torch.Generator:
    """Return the default generator of a CUDA device, or the CPU's."""
    if device.type == "cuda":
        index = cast("int | None", device.index)
        return torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]
    return torch.default_generator


def default_generators(tree: Any) -> list[torch.Generator]:
    """Return the default generators of the CPU and of the CUDA devices of the tensors in ``tree``."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        devices = {tensor.get_device() for tensor in tensors_in(tree) if tensor.is_cuda}
        generators += [torch.cuda.default_generators[device] for device in devices]
    return generators


class States(dict[torch.Generator, torch.Tensor]):
    """The states that generators were in."""

    @classmethod
    def of(cls, generators: Iterable[torch.Generator]) -> States:
        """Read the states that these generators are in now."""
        with _without_modes():
            return cls({generator: generator.get_state() for generator in generators})

    def differing(self, other: States) -> States:
        """Return those of these states that are others there."""
        with _without_modes(), torch._C.DisableTorchFunction():
            return States({key: state for key, state in self.items() if not torch.equal(state, other[key])})

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Have the generators in these states, and afterwards in those that they are in now."""
        now = States.of(self)
        self._set()
        try:
            yield
        finally:
            now._set()

    def _set(self) -> None:
        with _without_modes():
            for generator, state in self.items():
                generator.set_state(state)

    def private(self) -> dict[torch.device, torch.Generator]:
        """Return generators in these states that nobody else has, by their device."""
        with _without_modes():
            return {key.device: torch.Generator(key.device).set_state(state) for key, state in self.items()}


def _without_modes() -> AbstractContextManager[Any]:
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()
