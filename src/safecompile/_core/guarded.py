"""A guarded callable: how its calls behave while another thread compiles, and what they have come to so far."""

from __future__ import annotations

import itertools
import threading
import weakref
from dataclasses import dataclass
from typing import Literal

from safecompile._core.forks import lock_across_forks

WhenCompiling = Literal["wait", "eager", "error"]
WHEN_COMPILING = ("wait", "eager", "error")

# How many different reasons for compiling are kept of one callable.
MOST_REASONS = 100


@dataclass(frozen=True)
class CallableStatistics:
    """What the calls of one guarded callable came to."""

    name: str
    filename: str
    line: int
    calls: int
    compiles: int
    """Entries in Dynamo's cache, and backwards, that its calls have made. Those that failed do not count."""
    compile_seconds: float
    """Also of those that failed."""
    waits: int
    """How often a call waited for the FX-trace lock."""
    waited_seconds: float
    eager_runs: int
    """Calls, or parts of them after a graph break, that ran as they are: because another thread compiled, or at the
    recompile limit."""
    reasons: tuple[tuple[str, int], ...]
    """Why it was compiled, as ``safecompile.observe.Compile`` says it, and how often for that reason."""


def count_so_far(counter: itertools.count[int]) -> int:
    """Return what a counter gives next, without counting: nothing but its text tells it."""
    return int(repr(counter)[len("count(") : -1])


class _Warming(threading.local):
    up = False


warming = _Warming()
"""Whether the calling thread is inside a warm-up."""


class Guarded:
    """One callable that ``thread_safe_compile`` has returned."""

    def __init__(
        self,
        name: str,
        filename: str,
        line: int,
        *,
        when_compiling: WhenCompiling = "wait",
        recompile_limit: int | None = None,
    ) -> None:
        self.name: str = name
        self.filename: str = filename
        self.line: int = line
        self._when_compiling = when_compiling
        self.recompile_limit = recompile_limit
        # What each call takes the next of: the one thing that a warm call writes. It is C code, so that no count is lost.
        self.calls: itertools.count[int] = itertools.count()
        # The rest is guarded by _guard; no warm call writes it.
        self._compiles = self._waits = self._eager_runs = 0
        self._compile_seconds = self._waited_seconds = 0.0
        self._reasons: dict[str, int] = {}
        with _guard:
            _all.add(self)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()  # an event can be pickled; what is counted stays with its process

    @property
    def when_compiling(self) -> WhenCompiling:
        """What a call of the calling thread does. In a warm-up it waits: what ran eagerly would not be warm."""
        return "wait" if warming.up else self._when_compiling

    def compiled(self, seconds: float, reason: str | None) -> None:
        """Count a compile; ``reason`` is ``None`` if it failed."""
        with _guard:
            self._compile_seconds += seconds
            if reason is not None:
                self._compiles += 1
                if reason in self._reasons or len(self._reasons) < MOST_REASONS:
                    self._reasons[reason] = self._reasons.get(reason, 0) + 1

    def waited(self, seconds: float) -> None:
        """Count a call that waited."""
        with _guard:
            self._waits += 1
            self._waited_seconds += seconds

    def ran_eagerly(self) -> None:
        """Count a call that ran as it is."""
        with _guard:
            self._eager_runs += 1

    def statistics(self) -> CallableStatistics:
        """Return the counts so far."""
        with _guard:
            return CallableStatistics(
                name=self.name,
                filename=self.filename,
                line=self.line,
                calls=count_so_far(self.calls),
                compiles=self._compiles,
                compile_seconds=self._compile_seconds,
                waits=self._waits,
                waited_seconds=self._waited_seconds,
                eager_runs=self._eager_runs,
                reasons=tuple(self._reasons.items()),
            )


def statistics_of_all() -> tuple[CallableStatistics, ...]:
    """Return the counts of each callable that is still there, in the order of their source."""
    with _guard:
        guarded = list(_all)
    return tuple(sorted((one.statistics() for one in guarded), key=lambda one: (one.filename, one.line, one.name)))


_guard = lock_across_forks()
_all: weakref.WeakSet[Guarded] = weakref.WeakSet()
