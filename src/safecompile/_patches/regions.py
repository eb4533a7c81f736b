"""Checkpointed regions: the recomputation sees its forward's random numbers, whatever other threads draw.

The generators belong to the process. As long as one thread is alone in it, they are put back for the recomputation,
as torch does. Among threads nothing of them is put back, since another thread may draw at any time: what random
operators give in the forward is kept, and put in again. Which regions draw is learned from their first call; the
others are left alone, after a look at whether the generators are as they were.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.utils.checkpoint

from safecompile._core.errors import CheckpointRandomnessError
from safecompile._patches.company import Others, alone
from safecompile._patches.generators import States, default_generators
from safecompile._patches.point import PatchPoint
from safecompile._patches.random_numbers import Draws, Recording, Replay, recompute_to_the_end
from safecompile._patches.rewriting import copy_of, redirecting

__all__ = ["Region", "TorchCheckpoint"]

# Which kind of generator a region drew from when it was last looked at, by what it runs.
_known: dict[Any, Draws] = {}
_MOST_KNOWN = 10_000

_Again = Callable[[], AbstractContextManager[Any]]


class Region:
    """The function of one checkpoint: called in the forward, then in each recomputation."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._again: _Again | None = None
        self._intra_op_threads = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._again is None:
            self._intra_op_threads = torch.get_num_threads()
            with Others() as others:
                result, self._again = self._forward(others, args, kwargs)
            return result
        mine = torch.get_num_threads()
        if mine == self._intra_op_threads:
            with self._again():
                return self._function(*args, **kwargs)
        # Dynamo guards on it: a backward on another thread would run another variant than the forward.
        torch.set_num_threads(self._intra_op_threads)
        try:
            with self._again():
                return self._function(*args, **kwargs)
        finally:
            torch.set_num_threads(mine)

    def _forward(self, others: Others, args: Any, kwargs: Any) -> tuple[Any, _Again]:
        key = _what_runs(self._function, args)
        known = _known.get(key)
        # Under another mode, such as an outer region's recomputation, the generators do not tell what is drawn.
        among_modes = torch._C._len_torch_dispatch_stack() > 0
        before = States.of(default_generators((args, kwargs)))
        if not among_modes and (known is Draws.NOTHING or (known is Draws.DEFAULT and not others.seen)):
            result = self._function(*args, **kwargs)
            drawn = before.differing(after := States.of(before))
            if not drawn:
                return result, nullcontext
            if not others.seen:
                _learn(key, Draws.DEFAULT)
                return result, functools.partial(_draw_again, key, drawn, None, [])
            recompute_to_the_end()
            return result, functools.partial(_draw_again, key, drawn, after, [])

        with Recording() as recording:
            result = self._function(*args, **kwargs)
        came = others.seen and not others.from_the_start
        _learn(key, Draws.OWN if recording.to_the_end or came else recording.saw)
        if recording.to_the_end:
            recompute_to_the_end()
        if others.seen or among_modes:
            return result, functools.partial(Replay, recording.tape, defaults=True)
        recording.forget_defaults()
        return result, functools.partial(_draw_again, key, before.differing(States.of(before)), None, recording.tape)


@contextmanager
def _draw_again(key: Any, states: States, after: States | None, tape: list[Any]) -> Iterator[None]:
    """Let the region draw again from the states of the default generators that changed in its forward.

    ``after`` is given if another thread may have drawn meanwhile: the states at the forward's end.
    """
    if after is None and alone():
        with Others() as others, states.put_back(), Replay(tape, defaults=False) if tape else nullcontext():
            try:
                yield
            finally:
                if others.seen:
                    _learn(key, Draws.OWN)
                    raise CheckpointRandomnessError(_UNKNOWN.format("recomputation"))
        return
    private = states.private()
    with Replay(tape, defaults=False, private=private) as replay:
        yield
    if after is not None and replay.drew:
        _learn(key, Draws.OWN)
        if any(
            not torch.equal(state, private[key.device].get_state()) for key, state in after.items() if key in states
        ):
            raise CheckpointRandomnessError(_UNKNOWN.format("forward"))


_UNKNOWN = (
    "another thread may have drawn random numbers during the {} of a checkpoint that drew for the first time since there "
    "is one, so its own are not known. From now on they are recorded: run forward and backward again."
)


def _learn(key: Any, draws: Draws) -> None:
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    _known[key] = draws


def _what_runs(function: Any, args: Any) -> Any:
    """Return what stands for the region from call to call: its code, and the modules that it has."""
    if isinstance(function, torch.nn.Module):
        return id(function), function.training
    while isinstance(function, functools.partial):
        function, args = function.func, (*function.args, *args)
    function = getattr(function, "__wrapped__", function)
    things = [function, getattr(function, "__self__", None), *args]
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # an empty one
            things.append(cell.cell_contents)
    return tuple(
        (id(thing), thing.training)
        if isinstance(thing, torch.nn.Module)
        else id(getattr(thing, "__code__", type(thing)))
        for thing in things
    )


class TorchCheckpoint(PatchPoint):
    name = "torch-checkpoint"
    protects = "checkpointed regions recompute with other random numbers than their forward, in silence (S1)"
    upstream = "torch/utils/checkpoint.py, checkpoint"
    old_code_may_run = True

    def mismatch(self) -> str | None:
        missing = not inspect.isfunction(inspect.unwrap(torch.utils.checkpoint.checkpoint))
        return "torch.utils.checkpoint.checkpoint is not a function" if missing else None

    def apply(self) -> None:
        function: Any = inspect.unwrap(torch.utils.checkpoint.checkpoint)
        original = copy_of(function)
        self.replace(function, "__signature__", inspect.signature(original))  # Dynamo divides keywords by it
        self.recode(function, redirecting(functools.partial(_checkpoint, original)))


def _checkpoint(original: Callable[..., Any], function: Any, *args: Any, **options: Any) -> Any:
    plain = isinstance(function, Region) or not callable(function) or torch.compiler.is_compiling()
    if plain or not options.get("preserve_rng_state", True):
        return original(function, *args, **options)
    return original(Region(function), *args, **{**options, "preserve_rng_state": False})
