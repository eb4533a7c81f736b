"""``safecompile.observe``: who subscribes is told what happens, in the thread that it happens in, and harms no call."""

from __future__ import annotations

import logging
import pickle
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import safecompile
from safecompile import fx_trace_lock, observe, thread_safe_compile
from safecompile._core import events
from safecompile.observe import Call, Compile, EagerRun, RecompileLimit, Wait
from tests.helpers.backends import AotCountingBackend, CountingBackend
from tests.helpers.subprocess_run import ROOT, run_forked, run_isolated
from tests.helpers.threads import run_threads, wait_until

pytestmark = pytest.mark.usefixtures("nothing_compiled")

THREADS = 4
KINDS = (Call, Compile, EagerRun, RecompileLimit, Wait)


@pytest.fixture(autouse=True)
def _nobody_stays_subscribed() -> Iterator[None]:
    yield
    assert events._subscribers == ()
    assert not events.calls.wanted


def polynomial(x: torch.Tensor) -> torch.Tensor:
    return x * x + 2


def helper() -> torch.Tensor:
    return torch.ones(3) + 1


def guarded(function: Callable[..., Any] = polynomial, **options: Any) -> Any:
    return thread_safe_compile(function, **{"backend": "eager", "dynamic": False, **options})


def herd(backend: CountingBackend, threads: int = THREADS) -> None:
    """Let one thread compile until all others wait for it."""
    f = guarded(backend=backend)

    def wait_for_it(index: int) -> None:
        if index:
            assert backend.entered.wait(30)
        f(torch.ones(3))

    def release() -> None:
        wait_until(lambda: len(fx_trace_lock.statistics().waiters) == threads - 1)
        backend.release.set()

    run_threads([*[lambda index=index: wait_for_it(index) for index in range(threads)], release])


def eager_run() -> None:
    """Let a thread run as it is what another has compiled meanwhile, in a part of its call that cannot be called again."""
    events.publish(EagerRun("f", "f.py", 1, "main", threading.get_ident(), events.clock(), "a test"))


def test_each_kind_is_told_to_those_who_want_it_only() -> None:
    told: dict[type, list[Any]] = {kind: [] for kind in KINDS}
    subscriptions = [observe.subscribe(told[kind].append, kind) for kind in KINDS]
    herd(CountingBackend(gated=True))
    eager_run()
    for one in subscriptions:
        one.close()
    assert {kind: {type(event) for event in told[kind]} for kind in KINDS} == {
        kind: {kind} if told[kind] else set() for kind in KINDS
    }
    counts = {kind: len(told[kind]) for kind in KINDS}
    assert counts == {Call: THREADS, Compile: 1, Wait: THREADS - 1, EagerRun: 1, RecompileLimit: 0}
    (compile_,) = told[Compile]
    assert (compile_.function, compile_.thread, compile_.reasons) == ("polynomial", "worker-0", ("first call",))
    assert {one.thread for one in told[Wait]} == {f"worker-{index}" for index in range(1, THREADS)}
    assert {one.holder for one in told[Wait]} == {"worker-0"}
    assert all(one.doing.startswith("compiling polynomial (") for one in told[Wait])
    assert {one.function for one in told[Call]} == {"polynomial"}
    for kind in KINDS:
        pickle.dumps(told[kind])


def test_all_kinds_but_calls_are_the_default() -> None:
    told: list[Any] = []
    with observe.subscribe(told.append):
        herd(CountingBackend(gated=True))
        eager_run()
        assert not events.calls.wanted
    assert Counter(type(one) for one in told) == {Compile: 1, Wait: THREADS - 1, EagerRun: 1}


def test_nothing_is_told_after_the_end_and_closing_twice_is_nothing() -> None:
    told: list[Any] = []
    f = guarded()
    with observe.subscribe(told.append, Call, Compile) as subscription:
        f(torch.ones(3))
    subscription.close()
    f(torch.ones(4))
    assert [type(one) for one in told] == [Compile, Call]


def test_a_compile_in_flight_at_the_end_is_not_told() -> None:
    told: list[Any] = []
    backend = CountingBackend(gated=True)
    f = guarded(backend=backend)
    thread = threading.Thread(target=f, args=(torch.ones(3),))
    with observe.subscribe(told.append, *KINDS):
        thread.start()
        assert backend.entered.wait(30)
    backend.release.set()
    thread.join(30)
    assert told == []


def test_one_callback_subscribed_twice_is_told_twice_and_closed_once_each() -> None:
    told: list[Any] = []
    f = guarded()
    with observe.subscribe(told.append, Call):
        with observe.subscribe(told.append, Call):
            f(torch.ones(3))
        f(torch.ones(3))
    assert len(told) == 3


def test_it_happens_in_the_thread_and_a_compile_is_told_with_the_lock_held() -> None:
    seen: list[tuple[type, bool, bool]] = []

    def note(event: Any) -> None:
        seen.append((type(event), event.ident == threading.get_ident(), fx_trace_lock.owned()))

    f = guarded()
    with observe.subscribe(note, *KINDS):
        run_threads(lambda _: f(torch.ones(3)), 1)
    assert seen == [(Compile, True, True), (Call, True, False)]


def test_a_call_that_raises_is_told() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        raise KeyError("mine")

    told: list[Any] = []
    f = guarded(fails)
    with observe.subscribe(told.append, Call), pytest.raises(KeyError, match="mine"):
        f(torch.ones(3))
    assert [one.function for one in told] == ["fails"]


def test_what_a_callback_raises_is_logged_and_reaches_no_call(caplog: pytest.LogCaptureFixture) -> None:
    def fails(event: object) -> None:
        raise RuntimeError("watching failed")

    told: list[Any] = []
    f = guarded()
    with observe.subscribe(fails, *KINDS), observe.subscribe(told.append, *KINDS):
        assert torch.equal(f(torch.ones(3)), torch.full((3,), 3.0))
    assert [type(one) for one in told] == [Compile, Call]
    failures = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert [(one.name, "subscriber" in one.message) for one in failures] == [("safecompile", True)] * 2
    assert "watching failed" in caplog.text


@pytest.mark.parametrize("callback", [None, 3, "print", Call("f", "t", 0, 0.0, 0.0, None)], ids=repr)  # type: ignore[arg-type]
def test_what_cannot_be_called_is_refused_before_anything_changes(callback: Any) -> None:
    safecompile.uninstall()
    with pytest.raises(TypeError, match="plain function of one event"):
        observe.subscribe(callback)
    assert not safecompile.statistics().installed


def test_a_coroutine_function_is_refused() -> None:
    async def later(event: object) -> None: ...

    with pytest.raises(TypeError, match="plain function of one event"):
        observe.subscribe(later)


@pytest.mark.parametrize("kind", [int, "Call", observe, None, torch.ones(2)], ids=lambda kind: str(type(kind)))
def test_what_is_no_kind_of_event_is_refused_before_anything_changes(kind: Any) -> None:
    safecompile.uninstall()
    with pytest.raises(TypeError, match=r"observe\.Call, .*observe\.Wait as kinds of events"):
        observe.subscribe(print, Compile, kind)
    assert not safecompile.statistics().installed


def test_subscribing_installs_so_that_plain_compiles_are_told() -> None:
    safecompile.uninstall()
    told: list[Any] = []
    with observe.subscribe(told.append):
        torch.compile(polynomial, backend="eager")(torch.ones(3))
    assert [one.function for one in told] == ["polynomial"]


def test_it_cannot_begin_inside_a_compile_that_began_without_the_patches() -> None:
    safecompile.uninstall()
    errors: list[object] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: object) -> Any:
        with pytest.raises(safecompile.PatchesInUseError) as caught:
            observe.subscribe(print)
        errors.append(caught.value)
        return gm.forward

    torch.compile(polynomial, backend=backend)(torch.ones(3))
    assert len(errors) == 1


def calls_in_a_part_that_runs_as_it_is(subscribe: Callable[..., Any]) -> list[str]:
    """Return what is compiled when a callback runs tensor code, of a call from a frame that Dynamo leaves alone."""
    inner = guarded(torch.sin)

    def runs_as_it_is(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
            x = inner(x)
        return x

    compiled: list[str] = []
    ends: list[Callable[[], object]] = []
    with observe.subscribe(lambda one: compiled.append(one.function), Compile):
        ends.append(subscribe(lambda _: helper()))
        try:
            guarded(runs_as_it_is)(torch.ones(3))
        finally:
            ends[0]()
    return compiled


def test_dynamo_leaves_callbacks_alone() -> None:
    assert "helper" not in calls_in_a_part_that_runs_as_it_is(lambda note: observe.subscribe(note, Call).close)


def test_dynamo_compiles_callbacks_that_it_is_not_kept_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    from safecompile._patches import compiled_call

    def ended(self: object, context: Any, began: float) -> None:
        events.calls.ended(vars(context)["_safecompile_guarded"], began)

    def subscribe(callback: Callable[[Any], None]) -> Callable[[], object]:
        events.subscribe(callback, Call)
        return lambda: events.unsubscribe(callback)

    monkeypatch.setattr(compiled_call._Told, "ended", ended)
    assert "helper" in calls_in_a_part_that_runs_as_it_is(subscribe)


def test_threads_that_subscribe_and_close_lose_no_event_of_others() -> None:
    f, told = guarded(), list[Any]()
    f(torch.ones(3))

    def work(index: int) -> None:
        for _ in range(100):
            if index % 2:
                observe.subscribe(id, Call).close()
            else:
                f(torch.ones(3))

    with observe.subscribe(told.append, Call):
        run_threads(work, THREADS)
    assert len(told) == 100 * THREADS // 2


# The log.


def records(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [one.message for one in caplog.records if one.name == "safecompile" and one.levelno == level]


def test_the_log_tells_compiles_at_info_and_short_waits_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "safecompile"):
        herd(CountingBackend(gated=True))
        torch.compile(polynomial, backend="eager", dynamic=False)(torch.ones(4))
    first, second = records(caplog, logging.INFO)
    place = f"{polynomial.__code__.co_filename}:{polynomial.__code__.co_firstlineno}"
    assert first.startswith(f"forward of polynomial ({place}) compiled in ")
    assert first.endswith(" s in thread 'worker-0': first call")
    assert second.endswith("in thread 'MainThread': first call")  # another backend
    waits = records(caplog, logging.DEBUG)
    assert len(waits) == THREADS - 1
    assert all("for the FX-trace lock, which thread 'worker-0' had (compiling polynomial (" in one for one in waits)


def test_the_log_tells_a_failed_compile(caplog: pytest.LogCaptureFixture) -> None:
    def fails(gm: torch.fx.GraphModule, example_inputs: object) -> Any:
        raise ArithmeticError("no such graph")

    with caplog.at_level(logging.INFO, "safecompile"), pytest.raises(Exception, match="no such graph"):
        guarded(backend=fails)(torch.ones(3))
    (line,) = records(caplog, logging.INFO)
    assert "failed to compile (BackendCompilerFailed" in line


def test_the_log_tells_long_waits_first_eager_runs_and_limits_at_info(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe._log, "_ran_eagerly", set())
    ident, now = threading.get_ident(), events.clock()
    with caplog.at_level(logging.DEBUG, "safecompile"):
        for seconds in (0.5, 1.5):
            events.publish(Wait("one", ident, now, seconds, None, None))
        eager_run()
        eager_run()
        events.publish(
            RecompileLimit(
                "f", "f.py", 1, "one", ident, now, 2, 2, (("one", "first call"), ("two", "grad mode changed"))
            )
        )
    assert records(caplog, logging.INFO) == [
        "thread 'one' waited 1.500 s for the FX-trace lock",
        "f (f.py:1) runs eagerly in thread 'main': a test",
        "f (f.py:1) has 2 graphs, and its recompile limit is 2: thread 'one': first call; thread 'two': grad mode changed",
    ]
    assert records(caplog, logging.DEBUG) == [
        "thread 'one' waited 0.500 s for the FX-trace lock",
        "f (f.py:1) runs eagerly in thread 'main': a test",
    ]


def test_nothing_is_written_when_the_level_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[object] = []
    monkeypatch.setattr(events, "write_log", written.append)
    guarded()(torch.ones(3))
    assert written == []


# What is logged, and from which level on.
LEVELS = """
import logging, torch, safecompile

def double(x):
    return x * 2

def log_one_of_each():
    torch._dynamo.reset()
    safecompile.thread_safe_compile(double, backend="eager")(torch.ones(3))
    safecompile.observe.events.publish(safecompile.observe.Wait("one", 0, 0.0, 0.5, None, None))
    logging.getLogger("safecompile").error("an error")
"""


def test_torch_logs_sets_the_level_when_torch_is_imported() -> None:
    run = run_isolated(f"{LEVELS}\nlog_one_of_each()", env={"TORCH_LOGS": "+safecompile"}).check()
    assert [text for text in ("compiled", "waited", "an error") if text in run.stderr] == [
        "compiled",
        "waited",
        "an error",
    ], run.stderr


def test_the_signs_of_torch_logs_are_the_levels_of_the_log() -> None:
    run_forked(
        f"""{LEVELS}
import contextlib, io, os

for setting, expected in {{
    "+safecompile": ["compiled", "waited", "an error"],
    "safecompile": ["compiled", "an error"],
    "-safecompile": ["an error"],
    "dynamo": ["an error"],
}}.items():
    os.environ["TORCH_LOGS"] = setting
    with contextlib.redirect_stderr(io.StringIO()) as text:
        torch._logging._init_logs()
        log_one_of_each()
    found = [part for part in ("compiled", "waited", "an error") if f"{{part}}" in text.getvalue()]
    assert found == expected, (setting, text.getvalue())
"""
    ).check()


def test_a_backward_is_told_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    f = guarded(backend=AotCountingBackend())
    with caplog.at_level(logging.INFO, "safecompile"):
        loss = f(torch.ones(3, requires_grad=True)).sum()
        loss.backward()
    assert [line.split(" (")[0] for line in records(caplog, logging.INFO)] == [
        "forward of polynomial",
        "backward of polynomial",
    ]


def test_the_exporter_of_the_docs_exports() -> None:
    pytest.importorskip("prometheus_client")
    page = (ROOT / "docs" / "observe.md").read_text()
    (program,) = re.findall(r"<!-- tested: prometheus -->\n```python\n(.*?)```", page, re.DOTALL)
    assert "start_http_server(8000)" in program
    run_forked(
        program.replace("start_http_server(8000)", "server, _ = start_http_server(0)")
        + """
import urllib.request
import torch
from safecompile._core import events
from tests.test_observe import eager_run, guarded, herd, CountingBackend

herd(CountingBackend(gated=True))
eager_run()
events.publish(observe.RecompileLimit("f", "f.py", 1, "one", 1, 0.0, 2, 2, ()))
text = urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=30).read().decode()
for line in (
    'compile_seconds_count{function="polynomial",kind="forward"} 1.0',
    "compile_wait_seconds_count 3.0",
    'compile_eager_runs_total{function="f"} 1.0',
    'compile_recompile_limits_total{function="f"} 1.0',
):
    assert line in text.splitlines(), (line, text)
"""
    ).check()
