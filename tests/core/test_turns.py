"""Turns on a device: one thread at a time, reentrant, never without a limit."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from safecompile import LockTimeoutError
from safecompile._core.turns import Turn, Turns
from tests.helpers.threads import run_threads


def forever() -> float:
    return 60.0


def test_a_thread_has_its_turn_again_while_it_has_it_and_no_other_thread_has() -> None:
    turn = Turn(0, forever)
    with turn, turn:
        (taken,) = run_threads([lambda: turn.acquire(blocking=False)])
    assert taken is False

    def take() -> bool:
        with turn:
            return True

    assert run_threads([take]) == [True]


def test_two_threads_are_never_in_it_at_once() -> None:
    turn, inside, most = Turn(0, forever), [0], [0]

    def work() -> None:
        for _ in range(300):
            with turn:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    run_threads([work] * 4)
    assert most == [1]


def test_a_turn_that_does_not_come_is_an_error_that_names_the_thread_whose_turn_it_is() -> None:
    turn, has_it, over = Turn("cuda:1", lambda: 0.01), threading.Event(), threading.Event()

    def hold() -> None:
        with turn:
            has_it.set()
            over.wait(30)

    holder = threading.Thread(target=hold, name="recorder")
    holder.start()
    has_it.wait(30)
    with pytest.raises(LockTimeoutError, match=r"device cuda:1.*'recorder'"):
        turn.acquire()
    over.set()
    holder.join()
    with turn:
        pass


def test_each_device_has_a_turn_of_its_own() -> None:
    turns = Turns(forever)
    with turns[0]:
        assert run_threads([lambda: turns[1].acquire(blocking=False)]) == [True]
    assert turns[0] is turns[0]


def test_all_turns_are_taken_at_once_or_none() -> None:
    turns = Turns(forever)
    assert turns.take_all() == []
    first, second = turns[0], turns[1]

    def all_or_none() -> int:
        taken = turns.take_all()
        for turn in taken:
            turn.release()
        return len(taken)

    assert run_threads([all_or_none]) == [2]
    with first, second:
        assert all_or_none() == 2  # of one's own
    with second:
        assert run_threads([all_or_none]) == [0]  # and does not wait
        assert run_threads([lambda: first.acquire(blocking=False)]) == [True]  # not kept by who did not get the second


# --------------------------------------------------------------------------------------------------- the model checker


class Devices:
    """Two threads that record for a device each, and in a recording empty the caches of all devices, as torch does."""

    def __init__(self, *, wait: bool) -> None:
        self.turns, self.wait = Turns(forever), wait
        self.recording = set[int]()
        self.broken: list[int] = []
        self.done: list[int] = []
        _ = self.turns[0], self.turns[1]

    def record(self, device: int) -> None:
        with self.turns[device]:
            self.recording.add(device)
            self.empty_caches(device)
            self.recording.discard(device)
        self.done.append(device)

    def empty_caches(self, device: int) -> None:
        if self.wait:
            taken = list(self.turns.values())
            for turn in taken:
                turn.acquire()
        else:
            taken = self.turns.take_all()
        if taken and self.recording != {device}:
            self.broken.append(device)
        for turn in taken:
            turn.release()

    def first(self) -> None:
        self.record(0)

    def second(self) -> None:
        self.record(1)

    def right(self) -> bool:
        return len(self.done) == 2 and not self.broken and len(self.turns.take_all()) == 2


def test_checker_no_caches_are_emptied_beside_a_recording_and_nobody_waits_for_ever(explore: Any) -> None:
    workers = [Devices.first, Devices.second]
    explore(lambda: Devices(wait=False), workers, Devices.right, max_executions=300).assert_holds()


def test_control_checker_finds_that_waiting_for_all_turns_in_a_turn_deadlocks(explore: Any) -> None:
    with pytest.raises(LockTimeoutError, match="did not come"):  # which is how it ends
        explore(lambda: Devices(wait=True), [Devices.first, Devices.second], Devices.right)
