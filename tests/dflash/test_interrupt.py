"""The first signal raises, with the exit code that shells expect; test_demo.py has the second one, in processes of their own."""

from __future__ import annotations

import os
import signal

import pytest

from interrupt import SIGNALS, Interrupted, interruptible


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
