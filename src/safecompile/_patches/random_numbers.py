"""Random numbers of a checkpointed region: recorded in its forward, and put in again in its recomputation.

The generators are the process's own. Whatever is saved and restored of them, another thread may draw in
between; so what is kept is what the random operators gave.
"""

from __future__ import annotations

import inspect
import sys
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils import _pytree as pytree  # the public torch.utils.pytree is newer than torch 2.6
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from safecompile._core.errors import CheckpointRandomnessError

__all__ = ["Recording", "Replay", "recompute_to_the_end", "tensors_in"]

_OWN_NAMESPACES = frozenset({"aten", "prim", "prims", "inductor", "inductor_prims", "_c10d_functional"})


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator of a region. Compiled callables inside are compiled and run as without it."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            # Attention without dropout draws nothing, and its result is large.
            draws = _named(func, args, kwargs).get("dropout_p") != 0
            return self.random(func, args, kwargs) if draws else func(*args, **kwargs)
        if func.namespace not in _OWN_NAMESPACES:
            return self.unknown(func, args, kwargs)
        return func(*args, **kwargs)

    def random(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that draws."""
        raise NotImplementedError

    def unknown(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that may draw inside: a custom one, or one that calls functions."""
        raise NotImplementedError


_Tape = list[tuple[Any, Any]]
_NOTHING: tuple[Any, Any] = ("nothing", None)


class Recording(_Mode):  # type: ignore[no-untyped-call]
    """Records what the region's random operators give."""

    def __init__(self, tape: _Tape) -> None:
        super().__init__()
        self._tape = tape
        # An operator has filled one of its arguments, which autograd saves before (the noise of rrelu).
        self.to_the_end = False

    def random(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        self._record(func, args, kwargs, result)
        return result

    def unknown(self, func: Any, args: Any, kwargs: Any) -> Any:
        before = _generator_states((args, kwargs))
        result = func(*args, **kwargs)
        if before == _generator_states((args, kwargs)):
            self._tape.append((func, None))
        else:
            self._record(func, args, kwargs, result)
        return result

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        written = _written(func, args, kwargs)
        # A result that is one of the arguments written to is stood for by its place among them.
        places = {id(tensor): place for place, tensor in enumerate(written)}
        with _unseen():
            kept = pytree.tree_map(lambda leaf: _Place(places[id(leaf)]) if id(leaf) in places else _kept(leaf), result)
            self._tape.append((func, ([tensor.clone() for tensor in written], kept)))
        self.to_the_end |= len(written) > sum(isinstance(leaf, _Place) for leaf in pytree.tree_leaves(kept))


class Replay(_Mode):  # type: ignore[no-untyped-call]
    """Gives the recorded numbers in the place of new ones."""

    def __init__(self, tape: _Tape) -> None:
        super().__init__()
        self._tape = iter(tape)

    def random(self, func: Any, args: Any, kwargs: Any) -> Any:
        recorded, numbers = next(self._tape, _NOTHING)
        if recorded is not func:
            raise CheckpointRandomnessError(
                f"the recomputation of a checkpoint draws with {func}, where its forward drew with {recorded}: the "
                "region must do the same in both; let it not depend on what has changed in between."
            )
        if numbers is None:
            return func(*args, **kwargs)
        before, kept = numbers
        written = _written(func, args, kwargs)
        with _unseen():
            for tensor, value in zip(written, before, strict=True):
                if tensor.numel() == 0:  # as operators do with an empty `out`
                    tensor.resize_(value.shape)
                tensor.copy_(value)
            return pytree.tree_map(lambda leaf: written[leaf.index] if isinstance(leaf, _Place) else _kept(leaf), kept)

    unknown = random


class _Place:
    def __init__(self, index: int) -> None:
        self.index = index


def _kept(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _unseen() -> AbstractContextManager[Any]:
    """Hide the copies made here from the other modes: selective checkpointing would count them. A trace needs them."""
    tracing = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    return nullcontext() if tracing else _disable_current_modes()


def _arguments(func: Any) -> list[Any]:
    return func._schema.arguments if isinstance(func, torch._ops.OpOverload) else []


def _named(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    named: dict[str, Any] = {argument.name: argument.default_value for argument in _arguments(func)}
    named.update((argument.name, value) for argument, value in zip(_arguments(func), args, strict=False))
    named.update(kwargs)
    return named


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the arguments that the operator writes to."""
    named = _named(func, args, kwargs)
    return tensors_in([named[a.name] for a in _arguments(func) if a.alias_info and a.alias_info.is_write])


def _generator_states(tree: Any) -> bytes:
    """Return the states of the default generators of the CPU and of the CUDA devices of the tensors in ``tree``."""
    devices = sorted({tensor.get_device() for tensor in tensors_in(tree) if tensor.is_cuda})
    with _disable_current_modes():
        states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]
        return b"".join(bytes(state.tolist()) for state in states)


def recompute_to_the_end() -> None:
    """Switch early stopping off for the checkpoint whose forward runs now.

    It would end before an operator fills an argument that autograd has saved before.
    """
    code = inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    generator: Any = frame and frame.f_locals.get("gen")
    region = generator and generator.gi_frame and generator.gi_frame.f_locals.get("new_frame")
    if region is not None:
        region.early_stop = False
