"""``observe.timeline``: a trace file with a track for each thread, in which the herd can be seen."""

# ruff: noqa: PT012  the end of the block is part of what raises

from __future__ import annotations

import json
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import safecompile
from safecompile import fx_trace_lock, thread_safe_compile
from safecompile._core import events
from safecompile._patches import gate
from safecompile.observe import Call, Compile, EagerRun, RecompileLimit, Wait, timeline
from tests.helpers.backends import AotCountingBackend, CountingBackend
from tests.helpers.threads import run_threads, wait_until
from tests.helpers.torch_version import lacks

pytestmark = pytest.mark.usefixtures("nothing_compiled")

THREADS = 6
Trace = dict[str, Any]


@pytest.fixture(autouse=True)
def _nobody_stays_subscribed() -> Iterator[None]:
    yield
    assert events._subscribers == ()


def polynomial(x: torch.Tensor) -> torch.Tensor:
    return x * x + 2


def guarded(**options: Any) -> Any:
    return thread_safe_compile(polynomial, **{"backend": "eager", "dynamic": False, **options})


def herd(threads: int = THREADS) -> None:
    """Let one thread compile until all others wait for it; then each makes a warm call."""
    backend = CountingBackend(gated=True)
    f = guarded(backend=backend)

    def call(index: int) -> None:
        if index:
            assert backend.entered.wait(30)
        f(torch.ones(3))
        f(torch.ones(3))

    def release() -> None:
        wait_until(lambda: len(fx_trace_lock.statistics().waiters) == threads - 1)
        backend.release.set()

    run_threads([*[lambda index=index: call(index) for index in range(threads)], release])


def loaded(path: Path) -> Trace:
    trace: Trace = json.loads(path.read_text())
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    check_nesting(trace)
    return trace


def spans(trace: Trace, *categories: str) -> list[Trace]:
    return [one for one in trace["traceEvents"] if one["ph"] == "X" and (one["cat"] in categories or not categories)]


def track_names(trace: Trace) -> dict[int, str]:
    return {one["tid"]: one["args"]["name"] for one in trace["traceEvents"] if one["name"] == "thread_name"}


def inside(inner: Trace, outer: Trace) -> bool:
    end, outer_end = inner["ts"] + inner["dur"], outer["ts"] + outer["dur"]
    return outer["ts"] <= inner["ts"] and end <= outer_end + 0.01


def check_nesting(trace: Trace) -> None:
    """On each track, of two spans one is inside the other or they do not touch; what is around others comes first."""
    tracks: dict[int, list[Trace]] = defaultdict(list)
    for span in spans(trace):
        assert span["ts"] >= 0 and span["dur"] >= 0
        assert span["tid"] in track_names(trace)
        open_spans = tracks[span["tid"]]
        while open_spans and open_spans[-1]["ts"] + open_spans[-1]["dur"] <= span["ts"] + 0.01:
            open_spans.pop()
        assert not open_spans or inside(span, open_spans[-1]), (span, open_spans[-1])
        open_spans.append(span)


def test_the_herd_is_one_compile_and_a_wait_of_each_other_thread(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with timeline(path):
        herd()
    trace = loaded(path)
    names = track_names(trace)
    assert sorted(names.values()) == [f"worker-{index}" for index in range(THREADS)]
    (compile_,) = spans(trace, "compile")
    assert (names[compile_["tid"]], compile_["name"]) == ("worker-0", "compile polynomial")
    place = f"{polynomial.__code__.co_filename}:{polynomial.__code__.co_firstlineno}"
    assert compile_["args"] == {
        "function": "polynomial",
        "place": place,
        "kind": "forward",
        "reasons": ["first call"],
    }
    waits = spans(trace, "wait")
    assert {names[one["tid"]] for one in waits} == {f"worker-{index}" for index in range(1, THREADS)}
    assert len(waits) == THREADS - 1
    cold = {one["tid"]: one for one in spans(trace, "cold")}
    assert len(cold) == THREADS and len(spans(trace, "warm")) == THREADS
    assert {one["name"] for one in cold.values()} == {"polynomial (cold)"}
    for one in waits:
        assert one["name"] == "wait for worker-0"
        assert one["args"]["doing"].startswith("compiling polynomial (")
        assert compile_["ts"] < one["ts"] < compile_["ts"] + compile_["dur"]
        assert inside(one, cold[one["tid"]])
    assert inside(compile_, cold[compile_["tid"]])
    assert all(one["ts"] >= cold[one["tid"]]["ts"] + cold[one["tid"]]["dur"] for one in spans(trace, "warm"))
    assert trace["otherData"]["dropped_warm_calls"] == trace["otherData"]["dropped_other_events"] == 0


def test_without_single_flight_the_herd_compiles_several_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the picture shows what is the case, and not what should be."""
    monkeypatch.setattr(gate, "admit", lambda code, seen: True)
    path = tmp_path / "trace.json"
    with timeline(path):
        herd()
    assert len(spans(loaded(path), "compile")) > 1


@lacks((2, 7), "running a frame as it is, once")
def test_a_call_of_which_a_part_runs_as_it_is_is_eager(tmp_path: Path) -> None:
    path, backend = tmp_path / "trace.json", CountingBackend(gated=True)

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x.cos()

    def outer(x: torch.Tensor) -> torch.Tensor:
        for _ in range(1):  # a frame that breaks in a loop is not compiled, but what it calls is
            torch._dynamo.graph_break()
            x = inner(x)
        return x

    f = thread_safe_compile(outer, backend=backend)

    def second() -> None:
        assert backend.entered.wait(30)
        f(torch.ones(3))

    def release() -> None:
        wait_until(lambda: fx_trace_lock.statistics().waiters)
        backend.release.set()

    with timeline(path):
        run_threads([lambda: f(torch.ones(3)), second, release])
    trace = loaded(path)
    names = track_names(trace)
    assert {names[one["tid"]]: one["cat"] for one in spans(trace, "cold", "eager", "warm")} == {
        "worker-0": "cold",
        "worker-1": "eager",
    }
    (moment,) = [one for one in trace["traceEvents"] if one["ph"] == "i"]
    assert names[moment["tid"]] == "worker-1"
    assert (moment["s"], moment["cat"], moment["args"]["reason"]) == ("t", "eager run", "compiled by another thread")
    (call,) = spans(trace, "eager")
    assert call["ts"] <= moment["ts"] <= call["ts"] + call["dur"]


def test_a_reached_recompile_limit_is_a_moment(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with timeline(path):
        reasons = (("one", "first call"), ("two", "grad mode changed"))
        events.publish(RecompileLimit("f", "f.py", 1, "one", 1, events.clock(), 2, 2, reasons))
    (moment,) = [one for one in loaded(path)["traceEvents"] if one["ph"] == "i"]
    assert moment["args"] == {
        "function": "f",
        "place": "f.py:1",
        "limit": 2,
        "count": 2,
        "reasons": [["one", "first call"], ["two", "grad mode changed"]],
    }


def test_nested_calls_backwards_and_failures_have_their_spans(tmp_path: Path) -> None:
    inner = guarded(backend=AotCountingBackend())

    def outer(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
            x = inner(x)
        return x

    def fails(gm: torch.fx.GraphModule, example_inputs: object) -> Any:
        raise ArithmeticError("no such graph")

    path = tmp_path / "trace.json"
    with timeline(path):
        thread_safe_compile(outer, backend="eager")(torch.ones(3, requires_grad=True)).sum().backward()
        with pytest.raises(Exception, match="no such graph"):
            guarded(backend=fails)(torch.ones(3))
    trace = loaded(path)
    around, first, second, failed = spans(trace, "cold", "warm")
    assert [one["name"].split(".")[-1] for one in (around, first, second, failed)] == [
        "outer (cold)",
        "polynomial (cold)",
        *([second["name"]]),
        "polynomial (cold)",
    ]
    assert inside(first, around) and inside(second, around) and not inside(failed, around)
    compiles = {one["name"]: one["args"] for one in spans(trace, "compile")}
    assert compiles["compile polynomial (backward)"]["reasons"] == ["first backward through its forward"]
    assert "no such graph" in compiles["compile polynomial"]["error"]


def tell(thread: str, ident: int, *calls: tuple[float, float], **others: tuple[float, float]) -> None:
    """Publish events that never happened."""
    guarded_one: Any = None
    place = ("f", "f.py", 1)
    for start, seconds in others.values():
        kind = next(name for name, value in others.items() if value == (start, seconds))
        if kind == "compile_":
            compile_ = Compile("forward", *place, thread, ("first call",), seconds, None, ident, start)
            events.publish(compile_)
        elif kind == "wait":
            events.publish(Wait(thread, ident, start, seconds, None, None))
        else:
            events.publish(EagerRun(*place, thread, ident, start, "a test"))
    for start, seconds in calls:
        events.publish(Call("f", thread, ident, start, seconds, guarded_one))


def test_threads_with_the_same_ident_one_after_the_other_have_a_track_each(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with timeline(path):
        now = events.clock()
        tell("first", 7, (now, 0.4), compile_=(now + 0.1, 0.2))
        tell("second", 7, (now + 0.5, 0.1))
        tell("third", 7, (now + 0.7, 0.1), wait=(now + 0.71, 0.01))
    trace = loaded(path)
    names = track_names(trace)
    assert sorted(names.values()) == ["first", "second", "third"]
    assert {names[one["tid"]]: one["cat"] for one in spans(trace, "cold", "warm")} == {
        "first": "cold",
        "second": "warm",
        "third": "cold",
    }


def test_tracks_of_real_threads_that_come_and_go_do_not_mix(tmp_path: Path) -> None:
    f, path, idents = guarded(), tmp_path / "trace.json", set[int | None]()
    f(torch.ones(3))
    with timeline(path):
        for index in range(20):
            thread = threading.Thread(target=f, args=(torch.ones(3),), name=f"short-{index}")
            thread.start()
            thread.join()
            idents.add(thread.ident)
    trace = loaded(path)
    assert len(idents) < 20  # else this shows nothing
    assert Counter(track_names(trace)[one["tid"]] for one in spans(trace, "warm")) == {
        f"short-{index}": 1 for index in range(20)
    }


def test_names_of_any_kind_survive(tmp_path: Path) -> None:
    path, names = tmp_path / "tracé \n.json", ['"quoted" \\ name', "λ-thread", "", "\ud800"]
    with timeline(path):
        for ident, name in enumerate(names):
            tell(name, ident, (events.clock(), 0.0))
    assert set(track_names(loaded(path)).values()) == set(names)


def test_a_wait_that_began_before_the_block_is_shown_from_its_start_on(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with timeline(path):
        tell("one", 1, wait=(events.clock() - 5, 5.0))
    (wait,) = spans(loaded(path), "wait")
    assert wait["ts"] == 0
    assert wait["dur"] < 4e6


def test_two_timelines_at_once_have_each_their_own_part(tmp_path: Path) -> None:
    f, one, two = guarded(), tmp_path / "one.json", tmp_path / "two.json"
    first = timeline(one)
    first.__enter__()
    f(torch.ones(3))
    with timeline(two):
        f(torch.ones(3))
        first.__exit__(None, None, None)
        f(torch.ones(3))
    assert [span["cat"] for span in spans(loaded(one), "cold", "warm")] == ["cold", "warm"]
    assert [span["cat"] for span in spans(loaded(two), "cold", "warm")] == ["warm", "warm"]


def test_the_file_is_written_when_the_block_raises(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with pytest.raises(KeyError, match="mine"), timeline(path):
        guarded()(torch.ones(3))
        raise KeyError("mine")
    assert len(spans(loaded(path), "compile")) == 1
    assert os.listdir(tmp_path) == ["trace.json"]  # noqa: PTH208


def test_an_exception_of_the_block_wins_over_one_of_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(KeyError, match="mine"), timeline(folder / "trace.json"):
        folder.rmdir()
        raise KeyError("mine")
    assert "the timeline could not be written" in caplog.text
    folder.mkdir()
    with pytest.raises(FileNotFoundError), timeline(folder / "trace.json"):
        folder.rmdir()


def test_a_file_that_was_there_is_replaced_at_the_end_and_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")
    with timeline(path):
        assert path.read_text() == "old"

    def broken(self: object) -> Iterator[str]:
        yield "half"
        raise RuntimeError("in the middle")

    whole = path.read_text()
    monkeypatch.setattr(safecompile.observe._timeline._Recorder, "lines", broken)
    with pytest.raises(RuntimeError, match="in the middle"), timeline(path):
        pass
    assert path.read_text() == whole
    assert os.listdir(tmp_path) == ["trace.json"]  # noqa: PTH208


def test_a_relative_path_is_one_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with timeline("trace.json"):
        monkeypatch.chdir(tmp_path / "elsewhere")
    loaded(tmp_path / "trace.json")


def test_threads_may_still_run_at_its_end(tmp_path: Path) -> None:
    f, path, backend = guarded(), tmp_path / "trace.json", CountingBackend(gated=True)
    cold = guarded(backend=backend)
    f(torch.ones(3))
    stop = threading.Event()

    def go_on() -> None:
        while not stop.is_set():
            f(torch.ones(3))

    def end() -> None:
        assert backend.entered.wait(30)
        with timeline(path):
            wait_until(lambda: f(torch.ones(3)) is not None)
        stop.set()
        backend.release.set()

    run_threads([go_on, lambda: cold(torch.ones(3)), end])
    assert spans(loaded(path), "compile") == []  # it began before and ended after


def test_memory_is_bounded_and_what_is_left_out_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with timeline(path, max_events=10):
        now = events.clock()
        for step in range(15):
            tell("one", 1, (now + step, 0.5))
        for step in range(15):
            tell("one", 1, wait=(now + 100 + step, 0.5))
    trace = loaded(path)
    assert (len(spans(trace, "warm")), len(spans(trace, "wait"))) == (10, 10)
    assert trace["otherData"]["dropped_warm_calls"] == trace["otherData"]["dropped_other_events"] == 5


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("missing/trace.json", FileNotFoundError),
        ("file/trace.json", NotADirectoryError),
        (".", IsADirectoryError),
    ],
)
def test_a_path_that_cannot_be_written_is_refused_before_the_block(
    tmp_path: Path, path: str, error: type[OSError]
) -> None:
    (tmp_path / "file").touch()
    safecompile.uninstall()
    with pytest.raises(error, match="the timeline cannot be written") as caught, timeline(tmp_path / path):
        pytest.fail("the block ran")
    assert caught.value.filename == os.path.abspath(tmp_path / path)  # noqa: PTH100
    assert not safecompile.statistics().installed


def test_a_folder_that_may_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # all may be written by who runs as root
    with pytest.raises(PermissionError), timeline(tmp_path / "trace.json"):
        pytest.fail("the block ran")


@pytest.mark.parametrize(("most", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_a_bound_that_is_none_is_refused(tmp_path: Path, most: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="max_events"), timeline(tmp_path / "trace.json", max_events=most):
        pytest.fail("the block ran")


def test_what_is_no_path_is_refused() -> None:
    with pytest.raises(TypeError), timeline(3):  # type: ignore[arg-type]
        pytest.fail("the block ran")
