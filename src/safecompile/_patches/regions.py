"""Checkpointed regions: the recomputation sees its forward's random numbers, whatever other threads draw.

The generators belong to the process. As long as one thread is alone in it, they are put back for the recomputation,
as torch does. Among threads nothing of them is put back, since another thread may draw at any time: what random
operators give in the forward is kept, and put in again. Which regions draw is learned from their first call; the
others are left alone, after a look at whether the generators are as they were.
"""

from __future__ import annotations

import contextvars
import functools
import gc
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from safecompile._core.errors import CheckpointRandomnessError
from safecompile._patches.company import Others, alone
from safecompile._patches.generators import States, default_generators
from safecompile._patches.point import PatchPoint
from safecompile._patches.random_numbers import Draws, Recording, Replay, recompute_to_the_end
from safecompile._patches.rewriting import copy_of, redirecting
from safecompile._patches.running_as_it_is import regions

# Which kind of generator a region drew from when it was last looked at, by what it runs.
_known: dict[Any, Draws] = {}
_MOST_KNOWN, _MOST_PARTS, _MOST_SEEN = 10_000, 64, 10_000

_Again = Callable[[], AbstractContextManager[Any]]


class Region:
    """The function of one checkpoint: called in the forward, then in each recomputation."""

    def __init__(self, function: Callable[..., Any], *, random: bool = True) -> None:
        """``random``: the recomputation sees its forward's random numbers."""
        self._function = function
        self._random = random
        self._again: _Again | None = None
        self._context = contextvars.Context()
        self._intra_op_threads = 0

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        before, regions.inside = regions.inside, True
        try:
            return self._call(args, kwargs)
        finally:
            regions.inside = before

    def _call(self, args: Any, kwargs: Any) -> Any:
        if self._again is None:
            # From torch 2.12 on it holds the compiler's configuration, which threads of the engine would not have.
            self._context = contextvars.copy_context()
            self._intra_op_threads = torch.get_num_threads()
            if not self._random:
                result, self._again = self._function(*args, **kwargs), nullcontext
                return result
            with Others() as others:
                result, self._again = self._forward(others, args, kwargs)
            return result
        # A copy: threads may recompute at the same time, and one inside another's recomputation.
        return self._context.copy().run(self._recompute, self._again, args, kwargs)

    def _recompute(self, again: _Again, args: Any, kwargs: Any) -> Any:
        mine = torch.get_num_threads()
        if mine == self._intra_op_threads:
            with again():
                return self._function(*args, **kwargs)
        # Dynamo guards on it: a backward on another thread would run another variant than the forward.
        torch.set_num_threads(self._intra_op_threads)
        try:
            with again():
                return self._function(*args, **kwargs)
        finally:
            torch.set_num_threads(mine)

    def _forward(self, others: Others, args: Any, kwargs: Any) -> tuple[Any, _Again]:
        key = _what_runs(self._function, args, kwargs)
        known = _known.get(key)
        # Under another mode, such as an outer region's recomputation, the generators do not tell what is drawn.
        among_modes = torch._C._len_torch_dispatch_stack() > 0
        before = States.of(default_generators((args, kwargs)))
        left_alone = known is None and _better_left_alone([self._function, args, kwargs])
        without = known is Draws.NOTHING or (not others.seen and (known is Draws.DEFAULT or left_alone))
        if not among_modes and without:
            result = self._function(*args, **kwargs)
            if left_alone:
                recompute_to_the_end()
            drawn = before.differing(after := States.of(before))
            if not drawn:
                return result, nullcontext
            _learn(key, Draws.DEFAULT)
            if not others.look():
                return result, functools.partial(_draw_again, key, before, drawn, None, None)
            recompute_to_the_end()
            return result, functools.partial(_draw_again, key, before, drawn, after, None)

        with Recording(before) as recording:
            result = self._function(*args, **kwargs)
        came = others.look() and not others.from_the_start
        _learn(key, Draws.OWN if recording.to_the_end or came else recording.saw)
        if recording.to_the_end:
            recompute_to_the_end()
        if others.seen or among_modes:
            return result, functools.partial(Replay, before, recording.tape)
        recording.forget_defaults()
        return result, functools.partial(
            _draw_again, key, before, before.differing(States.of(before)), None, recording.tape
        )


def _better_left_alone(things: list[Any]) -> bool:
    """Tell whether a region of unknown kind is left alone, as by torch, until there are other threads.

    Before torch 2.9 the guards of a compiled callable see the mode that looks for random numbers: it would be compiled
    once more, in the first backward. So a region that reaches one, by what it holds and the globals that it names, is
    left alone if it reaches no generator of the user's own.
    """
    if hasattr(TorchDispatchMode, "ignore_compile_internals"):
        return False
    seen, compiled = set[int](), False
    while things and len(seen) < _MOST_SEEN:
        thing = things.pop()
        if isinstance(thing, torch.Generator) and thing is not torch.default_generator:
            return False
        module = isinstance(thing, torch.nn.Module)
        if (
            id(thing) in seen
            or isinstance(thing, (type, ModuleType))
            or (_is_torchs(type(thing).__module__) and not module)
        ):
            continue
        seen.add(id(thing))
        own = getattr(thing, "__dict__", {})
        compiled |= "_torchdynamo_orig_callable" in own or own.get("_compiled_call_impl") is not None
        names = thing.__globals__ if isinstance(thing, FunctionType) else None
        things += [part for part in gc.get_referents(thing) if part is not names]
        if names and not _is_torchs(names.get("__name__", "")):
            things += [names[name] for name in thing.__code__.co_names if name in names]
        if module:
            things.append(type(thing).forward)
    return compiled and not things


def _is_torchs(module: str) -> bool:
    return module.partition(".")[0] in {"torch", "safecompile"}


@contextmanager
def _draw_again(
    key: Any, before: States, drawn: States, after: States | None, tape: list[Any] | None
) -> Iterator[None]:
    """Let the region draw again from the states of the default generators that its forward had ``drawn`` from.

    ``after`` is given if another thread may have drawn meanwhile: the states at the forward's end. ``tape`` is given if
    the forward ran under a mode: some operators do other things under one.
    """
    if after is None and alone():
        mode = nullcontext() if tape is None else Replay(before, tape, defaults=False)
        with Others() as others, drawn.put_back(), mode:
            try:
                yield
            finally:
                if others.look():
                    _learn(key, Draws.OWN)
                    raise CheckpointRandomnessError(_UNKNOWN.format("recomputation"))
        return
    private = drawn.private()
    with Replay(before, tape or [], defaults=False, private=private) as replay:
        yield
    if after is not None and replay.drew:
        _learn(key, Draws.OWN)
        if any(not torch.equal(state, private[key.device].get_state()) for key, state in after.items() if key in drawn):
            raise CheckpointRandomnessError(_UNKNOWN.format("forward"))


_UNKNOWN = (
    "another thread may have drawn random numbers during the {} of a checkpoint that drew for the first time since there "
    "is one, so its own are not known. From now on they are recorded: run forward and backward again."
)


def _learn(key: Any, draws: Draws) -> None:
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    _known[key] = max(draws, _known.get(key, draws))  # what has drawn once may draw again


def _what_runs(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what stands for the region from call to call: its code, the modules that it has, and small arguments."""
    if isinstance(function, torch.nn.Module) and len(args) == 1 and not kwargs:
        return _stands_for(function)
    while isinstance(function, functools.partial):
        args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
        function = function.func
    if isinstance(function, FunctionType):
        function = getattr(function, "__wrapped__", function)
    things = [function, *args, *kwargs.values()]
    for cell in (function.__closure__ or ()) if isinstance(function, FunctionType) else ():
        with suppress(ValueError):  # an empty one
            things.append(cell.cell_contents)
    return tuple(map(_stands_for, things))


# A number for each module: an id may be that of another one later.
_numbers: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
_count = itertools.count()


def _number(module: torch.nn.Module) -> int:
    number = _numbers.get(module)
    return _numbers.setdefault(module, next(_count)) if number is None else number


def _stands_for(thing: Any, depth: int = 3) -> Any:
    if isinstance(thing, torch.nn.Module):
        return _number(thing), thing.training
    if isinstance(thing, FunctionType):
        return id(thing.__code__)
    if isinstance(thing, MethodType):
        return _stands_for(thing.__func__), _stands_for(thing.__self__)
    if isinstance(thing, (list, tuple, dict)) and depth and len(thing) <= _MOST_PARTS:
        return tuple(_stands_for(part, depth - 1) for part in (thing.values() if isinstance(thing, dict) else thing))
    return thing if isinstance(thing, (bool, int, str)) else type(thing)


class TorchCheckpoint(PatchPoint):
    name = "torch-checkpoint"
    protects = (
        "checkpointed regions recompute with other random numbers than their forward, in silence (S1), and on other "
        "threads with other configuration (S10)"
    )
    upstream = "torch/utils/checkpoint.py, checkpoint"
    old_code_may_run = True

    def mismatch(self) -> str | None:
        missing = not inspect.isfunction(_function())
        return "torch.utils.checkpoint.checkpoint is not a function" if missing else None

    def apply(self) -> None:
        function = _function()
        original = copy_of(function)
        self.replace(function, "__signature__", inspect.signature(original))  # Dynamo divides keywords by it
        self.recode(function, redirecting(functools.partial(_checkpoint, original)))


def _function() -> Any:
    """Return what each region is made by: from torch 2.14 on, calls of what ``checkpoint`` has decorated pass it by."""
    module = torch.utils.checkpoint
    return getattr(module, "_checkpoint_impl", None) or inspect.unwrap(module.checkpoint)


def _checkpoint(original: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
    if not args and "function" not in options:
        return original(**options)  # refuses
    function, *args = args or (options.pop("function"),)  # type: ignore[assignment]
    if isinstance(function, Region) or not callable(function) or torch.compiler.is_compiling():
        return original(function, *args, **options)
    region = Region(function, random=options.get("preserve_rng_state", True))
    return original(region, *args, **{**options, "preserve_rng_state": False})
