"""Hand-over in order and within bounds; the first error ends everything and is the one reported."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from pipeline import Crew, Meeting, OrderedQueue, Stopped, Tickets, WorkerError


def test_items_leave_in_order_and_never_more_than_the_depth_are_in() -> None:
    queue: OrderedQueue[int] = OrderedQueue(3)
    tickets = Tickets(range(60))
    largest: list[int] = []

    def produce() -> None:
        for number in tickets:
            queue.put(number, number)

    taken: list[int] = []

    def consume() -> None:
        for _ in range(60):
            largest.append(len(queue))
            taken.append(queue.get())

    crew = Crew([queue.stop])
    for index in range(5):
        crew.start(f"producer-{index}", produce)
    crew.start("consumer", consume)
    crew.join()
    assert taken == list(range(60))
    assert max(largest) <= 3


def test_one_slot_for_each_of_three_consumers_in_step_is_enough() -> None:
    """The tightest bounds must not lock anybody out: consumers that wait for each other, fed by few and by many threads."""
    for producers in (1, 2, 5):
        queues: list[OrderedQueue[int]] = [OrderedQueue(1) for _ in range(3)]
        meeting = Meeting(3)
        tickets = Tickets(itertools.product(range(20), range(3)))

        def produce(tickets: Tickets[tuple[int, int]] = tickets, queues: list[OrderedQueue[int]] = queues) -> None:
            for number, consumer in tickets:
                queues[consumer].put(number, number)

        def consume(queue: OrderedQueue[int], meeting: Meeting = meeting) -> None:
            for number in range(20):
                assert queue.get() == number
                meeting.wait()

        crew = Crew([meeting.stop, *(q.stop for q in queues)])
        for index in range(producers):
            crew.start(f"producer-{index}", produce)
        for queue in queues:
            crew.start("consumer", partial(consume, queue))
        crew.join()


def test_items_start_at_the_number_that_leaves_first() -> None:
    queue: OrderedQueue[str] = OrderedQueue(2, first=7)
    queue.put(8, "early")
    queue.put(7, "first")
    assert [queue.get(), queue.get()] == ["first", "early"]


def test_a_meeting_that_all_have_come_to_lets_all_pass_even_if_it_is_stopped_before_they_wake_up() -> None:
    """Or one replica would make a step that another one does not."""
    meeting = Meeting(3)
    passed: list[int] = []

    def come(index: int) -> None:
        meeting.wait()
        passed.append(index)
        with pytest.raises(Stopped):
            meeting.wait()

    crew = Crew([])
    for index in range(2):
        crew.start(f"party-{index}", partial(come, index))
    while meeting._here < 2:
        time.sleep(1e-4)
    with meeting._changed:  # nobody wakes up in here
        meeting.wait()
        meeting.stop()
    crew.join()
    assert sorted(passed) == [0, 1]


def test_a_meeting_that_is_stopped_before_all_have_come_lets_nobody_pass() -> None:
    meeting = Meeting(3)
    ended: list[int] = []

    def come(index: int) -> None:
        with pytest.raises(Stopped):
            meeting.wait()
        ended.append(index)

    crew = Crew([])
    for index in range(2):
        crew.start(f"party-{index}", partial(come, index))
    while meeting._here < 2:
        time.sleep(1e-4)
    meeting.stop()
    crew.join()
    with pytest.raises(Stopped):
        meeting.wait()
    assert sorted(ended) == [0, 1]


def waits() -> dict[str, Callable[[Callable[[Callable[[], None]], None]], None]]:
    """Return every way to wait, each given a function that takes what ends it."""

    def full(ready: Callable[[Callable[[], None]], None]) -> None:
        queue: OrderedQueue[int] = OrderedQueue(1)
        ready(queue.stop)
        queue.put(0, 0)
        queue.put(1, 1)

    def empty(ready: Callable[[Callable[[], None]], None]) -> None:
        queue: OrderedQueue[int] = OrderedQueue(1)
        ready(queue.stop)
        queue.get()

    def meeting(ready: Callable[[Callable[[], None]], None]) -> None:
        place = Meeting(2)
        ready(place.stop)
        place.wait()

    return {"full queue": full, "empty queue": empty, "meeting": meeting}


@pytest.mark.parametrize("wait", waits())
def test_an_error_in_one_thread_ends_the_wait_of_another(wait: str) -> None:
    stops: list[Callable[[], None]] = []
    waiting = threading.Event()

    def stop_all() -> None:
        for stop in stops:
            stop()

    crew = Crew([stop_all])

    def ready(stop: Callable[[], None]) -> None:
        stops.append(stop)
        waiting.set()

    def fail() -> None:
        assert waiting.wait(10)
        raise LookupError("the broken part")

    crew.start("waiting", lambda: waits()[wait](ready))
    crew.start("failing", fail)
    with pytest.raises(WorkerError, match=r"'failing' failed: LookupError: the broken part") as caught:
        crew.join()
    assert caught.value.worker == "failing"
    assert isinstance(caught.value.__cause__, LookupError)
    assert not any(t.name in ("waiting", "failing") for t in threading.enumerate())


def test_waits_that_begin_after_the_stop_end_too() -> None:
    queue: OrderedQueue[int] = OrderedQueue(1)
    meeting = Meeting(2)
    queue.stop()
    meeting.stop()
    for wait in (queue.get, lambda: queue.put(0, 0), meeting.wait):
        with pytest.raises(Stopped):
            wait()


def test_a_thread_that_goes_on_after_a_failure_is_named() -> None:
    release = threading.Event()

    def fail() -> None:
        raise ValueError("first")

    crew = Crew([])

    def go_on() -> None:
        release.wait(30)

    crew = Crew([])
    crew.start("stubborn", go_on)
    crew.start("failing", fail)
    with pytest.raises(WorkerError, match="first") as caught:
        crew.join(grace=0.1)
    release.set()
    assert caught.value.still_running == ["stubborn"]
    assert "still running: stubborn" in str(caught.value)


def test_an_interrupt_of_the_waiting_thread_stops_the_others() -> None:
    queue: OrderedQueue[int] = OrderedQueue(1)

    def get() -> None:
        queue.get()

    def interrupted() -> None:
        raise KeyboardInterrupt

    crew = Crew([queue.stop])
    crew.start("waiting", get)
    with pytest.raises(KeyboardInterrupt):
        crew.join(tick=interrupted)
    assert crew.running() == []


def test_a_long_operation_can_ask_whether_the_run_is_over() -> None:
    queue: OrderedQueue[int] = OrderedQueue(1)
    queue.check()
    queue.stop()
    with pytest.raises(Stopped):
        queue.check()
