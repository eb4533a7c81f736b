"""``timeline``: a picture of what each thread did, in the trace event format of Chrome and Perfetto."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from safecompile._core.events import Call, Compile, EagerRun, RecompileLimit, Wait, clock
from safecompile._core.guarded import count_so_far
from safecompile.observe._subscription import KINDS, subscribe

__all__ = ["timeline"]

log = logging.getLogger("safecompile")


@contextmanager
def timeline(path: str | os.PathLike[str], *, max_events: int = 200_000) -> Iterator[None]:
    """Record what guarded calls and compiles do in the block, and write it to ``path`` as a trace to look at.

    Open the file in https://ui.perfetto.dev or in ``chrome://tracing``. There is a track for each thread, with

    - each compile, with its function, kind and reasons;
    - each wait for the FX-trace lock, with the thread that had it and what for;
    - each call of a guarded callable, as *eager* (it ran as it is, or a part of it did), *cold* (else, when it compiled
      or waited) or *warm*;
    - eager runs and reached recompile limits, as moments.

    What began before the block, or has not ended with it, is not in the file, except for waits, which are shown from
    the start of the block on. Threads may go on after it, and timelines overlap. The file is written at the end of the
    block, also when that raises, as a whole or not at all; what is in its place is replaced.

    Recording makes each warm call slower: by about half for the smallest function (one addition of three numbers, with
    the backend ``"eager"``).

    Args:
        path: of the file; its folder must be there.
        max_events: bounds the memory, at about 200 bytes each. When there are so many, further warm calls are left out,
            and when there are twice as many, all others, too; ``otherData`` in the file tells how many.

    Raises:
        FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError: before the block; the file could not
            be written there.
        OSError: after the block; the file could not be written. An exception of the block itself wins.
        TypeError: ``path`` is no path, or ``max_events`` no int.
        ValueError: ``max_events`` is below 1.
        PatchesInUseError: the block begins inside a trace or compile that began without the patches.

    Source: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    target = Path(os.path.abspath(path))  # noqa: PTH100  resolve() would follow a link, which is to be replaced
    _check(target, max_events)
    recorder = _Recorder(max_events)
    try:
        with subscribe(recorder.record, *KINDS):
            yield
    except BaseException:
        try:
            _write(target, recorder.lines())
        except OSError:
            log.exception("the timeline could not be written to %s", target)
        raise
    _write(target, recorder.lines())


def _check(path: Path, max_events: object) -> None:
    if not isinstance(max_events, int) or isinstance(max_events, bool):
        raise TypeError(f"max_events is how many events are kept, not {max_events!r}.")
    if max_events < 1:
        raise ValueError(f"max_events is how many events are kept, 1 or more, not {max_events}.")
    number = None
    if not path.parent.exists():
        number = errno.ENOENT
    elif not path.parent.is_dir():
        number = errno.ENOTDIR
    elif path.is_dir():
        number = errno.EISDIR
    elif not os.access(path.parent, os.W_OK | os.X_OK):
        number = errno.EACCES
    if number is not None:
        raise OSError(number, f"the timeline cannot be written: {os.strerror(number)}", str(path))


def _write(path: Path, lines: Iterable[str]) -> None:
    # In the same folder, for only there can it take the file's place in one step.
    new = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.new")
    try:
        with new.open("w", encoding="utf-8") as file:
            file.writelines(lines)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


# The thread, start and end (a moment has none), name, category, and what else there is to say.
_Span = tuple[tuple[int, str], float, float | None, str, str, dict[str, Any] | None]


class _Recorder:
    """Keeps the events of all threads, which call it while others do."""

    def __init__(self, max_events: int) -> None:
        self._most = max_events
        self._began, self._unix_time = clock(), time.time()
        self._spans: list[_Span] = []
        self._dropped = {"warm": itertools.count(), "other": itertools.count()}
        self._threads: dict[tuple[int, str], tuple[int, str]] = {}
        # Of each thread, by its ident: when its last compile or wait, and its last eager run, began. A thread that has
        # the ident of an earlier one makes its calls later than all that one did.
        self._cold: dict[int, float] = {}
        self._eager: dict[int, float] = {}

    def record(self, event: Any) -> None:
        thread = (event.ident, event.thread)
        thread = self._threads.setdefault(thread, thread)
        if type(event) is Call:
            category = "warm"
            if self._eager.get(event.ident, -1.0) >= event.start:
                category = "eager"
            elif self._cold.get(event.ident, -1.0) >= event.start:
                category = "cold"
            self._keep((thread, event.start, event.start + event.seconds, event.function, category, None))
            return
        category, name, details = _described(event)
        if isinstance(event, (Compile, Wait)):
            self._cold[event.ident] = event.start
            start = max(event.start, self._began)
            self._keep((thread, start, event.start + event.seconds, name, category, details))
        else:
            if isinstance(event, EagerRun):
                self._eager[event.ident] = event.start
            self._keep((thread, event.start, None, name, category, details))

    def _keep(self, span: _Span) -> None:
        warm = span[4] == "warm"
        if len(self._spans) < (self._most if warm else 2 * self._most):
            self._spans.append(span)
        else:
            next(self._dropped["warm" if warm else "other"])

    def lines(self) -> Iterator[str]:
        """Return the file's content, an event a line."""
        spans = sorted(self._spans, key=lambda one: (one[1], -(one[2] or one[1])))  # what is around others first
        # Numbers of our own: the viewers take 32 bits of an ident.
        tids = {thread: number for number, thread in enumerate(dict.fromkeys(one[0] for one in spans), 1)}
        pid = os.getpid()
        yield '{"traceEvents": [\n'
        yield _line({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": "safecompile"}}, "")
        for (ident, name), tid in tids.items():
            where = {"ph": "M", "pid": pid, "tid": tid}
            yield _line({"name": "thread_name", **where, "args": {"name": name, "ident": ident}})
            yield _line({"name": "thread_sort_index", **where, "args": {"sort_index": tid}})
        for thread, start, end, name, category, details in spans:
            ts = self._microseconds(start)
            when = {"ph": "i", "s": "t", "ts": ts}
            if end is not None:
                # Of rounded ends: a span that is inside another stays there.
                when = {"ph": "X", "ts": ts, "dur": round(self._microseconds(end) - ts, 3)}
            shown = f"{name} ({category})" if details is None else name
            yield _line(
                {"name": shown, "cat": category, **when, "pid": pid, "tid": tids[thread], "args": details or {}}
            )
        other = {
            "torch": str(torch.__version__),
            "began": self._unix_time,
            "dropped_warm_calls": count_so_far(self._dropped["warm"]),
            "dropped_other_events": count_so_far(self._dropped["other"]),
        }
        yield f'\n], "displayTimeUnit": "ms", "otherData": {json.dumps(other)}}}\n'

    def _microseconds(self, moment: float) -> float:
        return round((moment - self._began) * 1e6, 3)


def _described(event: Any) -> tuple[str, str, dict[str, Any]]:
    """Return category, name and details of what is no call."""
    if isinstance(event, Wait):
        name = f"wait for {event.holder}" if event.holder else "wait"
        return "wait", name, {"holder": event.holder, "doing": event.doing}
    place = {"function": event.function, "place": f"{event.filename}:{event.line}"}
    if isinstance(event, Compile):
        name = f"compile {event.function}" + ("" if event.kind == "forward" else f" ({event.kind})")
        details = {**place, "kind": event.kind, "reasons": list(event.reasons)}
        return "compile", name, {**details, "error": event.error} if event.error else details
    if isinstance(event, RecompileLimit):
        details = {**place, "limit": event.limit, "count": event.count, "reasons": [list(one) for one in event.reasons]}
        return "recompile limit", f"recompile limit of {event.function}", details
    return "eager run", f"{event.function} runs eagerly", {**place, "reason": event.reason}


def _line(event: dict[str, Any], before: str = ",\n") -> str:
    return before + json.dumps(event)
