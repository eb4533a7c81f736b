"""The first signal raises, with the exit code that shells expect; test_demo.py has the second one, in processes of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from interrupt import SIGNALS, Interrupted, interruptible, keep, kept_back


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_raises_and_the_handlers_of_before_come_back(number: signal.Signals, code: int) -> None:
    started_with = signal.signal(
        number, signal.default_int_handler
    )  # ignored by all that a shell runs in the background
    try:
        before = [signal.getsignal(n) for n in SIGNALS]
        with pytest.raises(Interrupted, match=number.name) as caught, interruptible():
            os.kill(os.getpid(), number)
        assert caught.value.code == code
        assert isinstance(caught.value, KeyboardInterrupt)
        assert [signal.getsignal(n) for n in SIGNALS] == before
    finally:
        signal.signal(number, started_with)


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with interruptible():
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture
def heard() -> Iterator[None]:
    """Take SIGTERM as a process does that was not started in the background."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("heard")
def test_a_signal_that_comes_while_they_are_kept_back_is_told_at_once_and_raised_at_the_end() -> None:
    with interruptible(), pytest.raises(Interrupted, match="SIGTERM"), kept_back() as interrupted:  # noqa: PT012
        assert not interrupted()
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupted()
    with interruptible(), kept_back() as interrupted:
        assert not interrupted()


@pytest.mark.usefixtures("heard")
def test_what_is_missing_is_said_in_place_of_the_signal() -> None:
    with pytest.raises(ValueError, match="node 1"), interruptible(), kept_back():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGTERM)
        raise ValueError("without node 1")


@pytest.mark.usefixtures("heard")
def test_a_signal_that_comes_during_the_imports_is_raised_once_there_was_time_to_find_why() -> None:
    keep()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Interrupted, match="SIGTERM"), interruptible(), kept_back() as interrupted:
        assert interrupted()
