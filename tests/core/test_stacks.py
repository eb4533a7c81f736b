"""Looking at the frames of threads that go on running."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from safecompile._core.stacks import outwards, stacks_of_others
from tests.helpers.threads import gather_threads


def test_each_other_thread_is_there_with_its_frames_the_innermost_first() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def outer() -> int:
        return inner()

    def inner() -> int:
        inside.set()
        assert go_on.wait(30)
        return threading.get_ident()

    def look() -> dict[int, list[str]]:
        assert inside.wait(30)
        stacks = stacks_of_others()
        go_on.set()
        assert threading.get_ident() not in stacks
        return {ident: [frame.f_code.co_name for frame in frames] for ident, frames in stacks.items()}

    ident, stacks = gather_threads([outer, look])
    assert isinstance(stacks, dict)
    names = stacks[ident]
    assert names.index("inner") == names.index("outer") - 1


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_does_not_run_meanwhile_and_is_left_as_it_was(
    enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = sys._current_frames
    seen: list[bool] = []

    def current_frames() -> Any:
        seen.append(gc.isenabled())
        return frames()

    monkeypatch.setattr(sys, "_current_frames", current_frames)
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        stacks_of_others()
        assert (seen, gc.isenabled()) == ([False], enabled)
    finally:
        (gc.enable if before else gc.disable)()


def test_ones_own_frames_go_outwards() -> None:
    def inner() -> list[str]:
        return [frame.f_code.co_name for frame in outwards(sys._getframe())]

    assert inner()[:2] == ["inner", "test_ones_own_frames_go_outwards"]


def test_a_stack_is_whole_also_when_a_generator_stops_while_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go_on, stopped, done = (threading.Event() for _ in range(4))
    current_frames = sys._current_frames

    def generator() -> Iterator[None]:
        inside.set()
        while not go_on.is_set():  # no frame of another function: the generator's own is the innermost
            pass
        yield

    def caller() -> None:
        for _ in generator():
            stopped.set()
            assert done.wait(30)

    def frames_of_a_moment_ago() -> dict[int, Any]:
        frames = current_frames()
        go_on.set()
        assert stopped.wait(30)
        return frames

    def look() -> bool:
        assert inside.wait(30)
        monkeypatch.setattr(sys, "_current_frames", frames_of_a_moment_ago)
        try:
            stacks = stacks_of_others().values()
            return any(caller.__code__ in [frame.f_code for frame in frames] for frames in stacks)
        finally:
            done.set()

    seen, _ = gather_threads([look, caller], timeout=60)
    assert seen is True
