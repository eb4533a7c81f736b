"""Dispatch modes that record a checkpointed region's random numbers, and put them in again."""

from __future__ import annotations

import enum
import functools
import inspect
import sys
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from safecompile._core.errors import CheckpointRandomnessError
from safecompile._patches.generators import States, default_generator, default_generators, tensors_in

_OWN_NAMESPACES = frozenset({"aten", "prim", "prims", "inductor", "inductor_prims", "_c10d_functional"})


# Others may draw in a dispatch of their own.
_OWN_TENSORS = (FakeTensor, FunctionalTensor, torch.nn.Parameter)


class Draws(enum.IntEnum):
    """What a region draws from."""

    NOTHING = enum.auto()
    DEFAULT = enum.auto()
    OWN = enum.auto()
    """Also from a generator that is passed to the operator, or in another way that must be looked at each time."""


class RegionMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator of a region. Compiled callables inside are compiled and run as without it."""

    supports_higher_order_operators = True

    def __init__(self, states: States) -> None:
        """``states`` has the default generators that are put back; all others count as the user's own."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._states = states

    def __enter__(self) -> Any:
        if not hasattr(
            TorchDispatchMode, "supports_higher_order_operators"
        ):  # torch 2.8 and older ask for a rule of each
            for operator in torch._ops._higher_order_ops.values():
                rule = functools.partial(_as_any_other, operator)
                operator.python_key_table.setdefault(type(self), rule)
        return super().__enter__()  # type: ignore[no-untyped-call]

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
            named = _named(func, args, kwargs)
            if named.get("dropout_p") != 0:
                generator = named.get("generator") or default_generator(_device(args, kwargs))
                return self.random(func, args, kwargs, own=generator not in self._states)
        elif func.namespace not in _OWN_NAMESPACES or any(
            kind is not torch.Tensor and not issubclass(kind, _OWN_TENSORS) for kind in types
        ):
            return self.unknown(func, args, kwargs)
        return func(*args, **kwargs)

    def random(self, func: Any, args: Any, kwargs: Any, *, own: bool) -> Any:
        """Run an operator that draws, with a default generator or with one of the user's ``own``."""
        raise NotImplementedError

    def unknown(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that may draw inside: a custom one, or one that calls functions."""
        raise NotImplementedError


def _as_any_other(operator: Any, mode: RegionMode, /, *args: Any, **kwargs: Any) -> Any:
    return mode.__torch_dispatch__(operator, (), args, kwargs)


_Tape = list[tuple[Any, Any, bool]]  # operator, its numbers if it drew, whether from a generator of the user's own
_NOTHING: tuple[Any, Any, bool] = ("nothing", None, False)


class Recording(RegionMode):  # type: ignore[no-untyped-call]
    """Records what the region's random operators give."""

    def __init__(self, states: States) -> None:
        super().__init__(states)
        self.tape: _Tape = []
        self.saw = Draws.NOTHING
        self.to_the_end = False

    def random(self, func: Any, args: Any, kwargs: Any, *, own: bool) -> Any:
        result = func(*args, **kwargs)
        self.saw = max(self.saw, Draws.OWN if own else Draws.DEFAULT)
        # An operator fills one of its arguments, which autograd saves before (the noise of rrelu).
        written = _written(func, args, kwargs)
        self.to_the_end |= len(written) > sum(
            leaf is tensor for leaf in pytree.tree_leaves(result) for tensor in written
        )
        self._record(func, args, kwargs, result, own=own)
        return result

    def unknown(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.saw = max(self.saw, Draws.DEFAULT)  # another time it may
        before = States.of(default_generators((args, kwargs)))
        result = func(*args, **kwargs)
        if before.differing(States.of(before)):
            self._record(func, args, kwargs, result, own=False)
        elif func.namespace not in _OWN_NAMESPACES:
            self.tape.append((func, None, False))
        return result

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any, *, own: bool) -> None:
        written = _written(func, args, kwargs)
        # A result that is one of the arguments written to is stood for by its place among them.
        places = {id(tensor): place for place, tensor in enumerate(written)}
        with _unseen():
            kept = pytree.tree_map(lambda leaf: _Place(places[id(leaf)]) if id(leaf) in places else _kept(leaf), result)
            self.tape.append((func, ([tensor.clone() for tensor in written], kept), own))

    def forget_defaults(self) -> None:
        """Keep what generators of the user's own gave, and no more."""
        self.tape[:] = [entry for entry in self.tape if entry[2]]


class Replay(RegionMode):  # type: ignore[no-untyped-call]
    """Gives the recorded numbers in the place of new ones."""

    def __init__(
        self,
        states: States,
        tape: _Tape,
        *,
        defaults: bool = True,
        private: dict[torch.device, torch.Generator] | None = None,
    ) -> None:
        """``private`` generators are drawn from where the default ones were not recorded."""
        super().__init__(states)
        self._tape, self._defaults, self._private = deque(tape), defaults, private
        self.drew = False

    def random(self, func: Any, args: Any, kwargs: Any, *, own: bool) -> Any:
        if own or self._defaults:
            return self._replay(func, args, kwargs)
        return func(*args, **kwargs) if self._private is None else self._draw(self._private, func, args, kwargs)

    def unknown(self, func: Any, args: Any, kwargs: Any) -> Any:
        recorded = self._tape[0][0] if self._tape else None
        if self._defaults and (func.namespace not in _OWN_NAMESPACES or recorded is func):
            return self._replay(func, args, kwargs)
        before = States.of(default_generators((args, kwargs)) if self._private is not None else ())
        result = func(*args, **kwargs)
        if before.differing(States.of(before)):
            raise _cannot_draw(func)
        return result

    def _draw(self, private: dict[torch.device, torch.Generator], func: Any, args: Any, kwargs: Any) -> Any:
        self.drew = True
        device, same = _device(args, kwargs), _with_generator(func)
        if device not in private or same is None:
            raise _cannot_draw(func)
        return same(*args, **{**kwargs, "generator": private[device]})

    def _replay(self, func: Any, args: Any, kwargs: Any) -> Any:
        recorded, numbers, _ = self._tape.popleft() if self._tape else _NOTHING
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


def _cannot_draw(func: Any) -> CheckpointRandomnessError:
    return CheckpointRandomnessError(
        f"the recomputation of a checkpoint cannot draw with {func} what its forward drew: threads that may draw as well "
        "have begun meanwhile. Start them before the forward."
    )


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


def _device(args: Any, kwargs: Any) -> torch.device:
    tensors = tensors_in((args, kwargs))
    return tensors[0].device if tensors else torch.device(kwargs.get("device") or "cpu")


def _with_generator(func: Any) -> Any:
    """Return the overload of an operator that takes a generator, or ``None``."""
    names = {argument.name for argument in _arguments(func)} | {"generator"}
    packet = getattr(func, "overloadpacket", None)
    overloads = [func, *(getattr(packet, name) for name in packet.overloads())] if packet else []
    return next((one for one in overloads if {argument.name for argument in _arguments(one)} == names), None)


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the arguments that the operator writes to."""
    named = _named(func, args, kwargs)
    return tensors_in([named[a.name] for a in _arguments(func) if a.alias_info and a.alias_info.is_write])


def recompute_to_the_end() -> None:
    """Switch early stopping off for the checkpoint whose forward runs now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) not in _MAKES_REGIONS:
        frame = frame.f_back
    generator: Any = frame and frame.f_locals.get("gen")
    region = generator and generator.gi_frame and generator.gi_frame.f_locals.get("new_frame")
    if region is not None:
        region.early_stop = False


_FILE = inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__.co_filename
# From torch 2.14 on, the first of these calls the second.
_MAKES_REGIONS = {(_FILE, "checkpoint"), (_FILE, "_checkpoint_impl")}
