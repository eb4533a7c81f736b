"""A torch that some patch point does not match: it is named once, and traces and compiles take turns."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import safecompile
from safecompile import PatchMismatchError, fx_trace_lock, thread_safe_compile
from safecompile._patches import patches
from tests.helpers import torch_state
from tests.helpers.backends import CountingBackend
from tests.helpers.threads import run_threads, wait_until
from tests.helpers.torch_version import TORCH
from tests.helpers.tracing import TRACES, Model, example, held_trace, rows

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SECONDS = 60.0

# Points whose loss lets traces and compiles disturb each other, and such as others rely on.
HIDDEN = [
    "fx-patches",
    "fx-trace-state",
    "compiling-flags",
    "single-flight",
    "compile-lock",
    "compiled-calls",
    "exports",
]
TRACED = ["symbolic_trace", "make_fx", "export"]


@pytest.fixture(autouse=True)
def not_warned_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "_warned", False)
    monkeypatch.setattr(patches, "_free_threads", False)


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def hide(name: str) -> None:
        (point,) = (point for point in patches.points if point.name == name)
        monkeypatch.setattr(point, "mismatch", lambda: "hidden")

    return hide


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Record the warnings, in all threads."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts.extend(f"{warning.category.__name__}: {warning.message}" for warning in caught)


def install_quietly() -> None:
    with recorded():
        safecompile.install()


def test_a_name_that_is_not_there_to_be_wrapped_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    safecompile.uninstall()  # another file's tests may have left it installed
    monkeypatch.delattr(torch._ops.OpOverload, "_get_dispatch")
    with recorded() as texts:
        safecompile.install()
    assert any("exports: AttributeError('OpOverload has no _get_dispatch')" in text for text in texts), texts
    assert not hasattr(torch._ops.OpOverload, "_get_dispatch")


@pytest.mark.parametrize("name", HIDDEN)
def test_a_hidden_point_is_named_in_one_warning_and_what_is_left_works(name: str, hide: Callable[[str], None]) -> None:
    hide(name)
    backend = CountingBackend()
    with recorded() as texts:
        safecompile.install()
        safecompile.install()
        safecompile.uninstall()
        safecompile.install()
        f = thread_safe_compile(lambda x: x.sin(), backend=backend)
        results = run_threads(lambda _: f(example()), 4)
    (text,) = texts
    assert text.startswith("RuntimeWarning: 1 patch points do not match this torch")
    assert f"{name}: hidden" in text
    assert all(torch.equal(result, example().sin()) for result in results)
    installed = {patch.name: patch.installed for patch in safecompile.statistics().patches}
    assert not installed[name] and installed["serial-traces"]


@pytest.mark.parametrize("name", ["fx-trace-state", "single-flight", "exports"])
def test_strict_is_an_error_that_leaves_everything_as_it_was(name: str, hide: Callable[[str], None]) -> None:
    safecompile.install(strict=True)  # what it imports is no change
    safecompile.uninstall()
    hide(name)
    with recorded() as texts:
        before = torch_state.snapshot()
        with pytest.raises(PatchMismatchError, match=f"{name}: hidden"):
            safecompile.install(strict=True)
        after = torch_state.snapshot()
    assert torch_state.changes(before, after) == []
    assert not any("patch points" in text for text in texts)
    assert not safecompile.statistics().installed
    assert not any(patch.installed for patch in safecompile.statistics().patches)
    assert not fx_trace_lock.statistics().locked


def test_nothing_takes_turns_on_a_torch_that_every_point_matches() -> None:
    with recorded() as texts:
        safecompile.install()
    assert texts == []
    assert not {patch.name: patch.installed for patch in safecompile.statistics().patches}["serial-traces"]


# --- turns


def waiters() -> set[str]:
    return {waiter.thread for waiter in fx_trace_lock.statistics().waiters}


reached = threading.Event()


class Watched(Model):
    """Tells when somebody runs it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        reached.set()
        return super().forward(x)


def sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


@contextmanager
def compile_in_flight() -> Iterator[None]:
    backend = CountingBackend(gated=True)
    thread = threading.Thread(target=torch.compile(sine, backend=backend), args=(example(),))
    thread.start()
    try:
        assert backend.entered.wait(SECONDS)
        yield
    finally:
        backend.release.set()
        thread.join(SECONDS)


@contextmanager
def trace_in_flight() -> Iterator[None]:
    with held_trace(TRACES["symbolic_trace"], Model(), name="first") as first:
        yield
        first.finish()


IN_FLIGHT = {"compile": compile_in_flight, "trace": trace_in_flight}


def traces_during(in_flight: str, turns: bool) -> None:
    """Begin traces while something is in flight; they wait for its end if they take turns, and run if they do not."""
    for name in TRACED:
        model, graphs, want = Watched(), list[Any](), rows(TRACES[name](Model()))

        def trace(name: str = name, model: Model = model, graphs: list[Any] = graphs) -> None:
            graphs.append(TRACES[name](model))

        reached.clear()
        thread = threading.Thread(target=trace, name="tracer")
        with IN_FLIGHT[in_flight]():
            thread.start()
            if turns:
                wait_until(lambda: "tracer" in waiters())
                assert not reached.is_set()
            else:
                assert reached.wait(SECONDS)
        thread.join(SECONDS)
        assert [rows(graph) for graph in graphs] == [want]
    assert not fx_trace_lock.statistics().locked


def compile_during_a_trace(turns: bool) -> None:
    backend, outcomes = CountingBackend(), list[Any]()
    f = torch.compile(sine, backend=backend)

    def call() -> None:
        try:
            outcomes.append(f(example()))
        except BaseException as error:
            outcomes.append(error)

    thread = threading.Thread(target=call, name="compiler")
    with trace_in_flight():
        thread.start()
        if turns:
            wait_until(lambda: "compiler" in waiters() or outcomes)
            assert backend.count == 0
        else:
            assert backend.entered.wait(SECONDS)
    thread.join(SECONDS)
    (outcome,) = outcomes
    assert isinstance(outcome, torch.Tensor), outcome
    assert torch.equal(outcome, example().sin())


@pytest.mark.parametrize("name", HIDDEN)
def test_traces_wait_for_a_compile_and_for_another_trace(name: str, hide: Callable[[str], None]) -> None:
    hide(name)
    install_quietly()
    for in_flight in IN_FLIGHT:
        traces_during(in_flight, turns=True)


@pytest.mark.parametrize(
    "name",
    [
        "fx-patches",
        pytest.param(
            "fx-trace-state",
            marks=pytest.mark.xfail(
                TORCH < (2, 14), strict=True, reason="torch refuses the call, before it would wait for the trace"
            ),
        ),
        "single-flight",
        "compiled-calls",
    ],
)
def test_a_compile_waits_for_a_trace(name: str, hide: Callable[[str], None]) -> None:
    hide(name)
    install_quietly()
    compile_during_a_trace(turns=True)


def test_control_they_overlap_when_every_point_matches() -> None:
    safecompile.install(strict=True)
    for in_flight in IN_FLIGHT:
        traces_during(in_flight, turns=False)
    compile_during_a_trace(turns=False)


def test_a_compile_waits_for_a_trace_by_torchs_own_lock_where_ours_has_no_place(hide: Callable[[str], None]) -> None:
    """A thread that waits there is not known to the library; whether it compiles is seen after the trace."""
    hide("compile-lock")
    install_quietly()
    backend = CountingBackend()
    f = torch.compile(sine, backend=backend)
    about_to = threading.Event()

    def call() -> None:
        about_to.set()
        f(example())

    thread = threading.Thread(target=call)
    with trace_in_flight():
        assert fx_trace_lock.statistics().owner == "first"
        thread.start()
        assert about_to.wait(SECONDS)
        assert backend.count == 0
    thread.join(SECONDS)
    assert backend.count == 1


def test_a_trace_inside_a_compile_and_in_a_trace_takes_its_turn_with_that(hide: Callable[[str], None]) -> None:
    hide("fx-patches")
    install_quietly()
    inner = Model()
    want = rows(TRACES["symbolic_trace"](Model()))

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        assert rows(TRACES["symbolic_trace"](inner)) == want
        return graph.forward

    assert torch.equal(torch.compile(sine, backend=backend)(example()), example().sin())


# --- an interpreter without its lock


def test_an_interpreter_without_its_lock_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    with recorded() as texts:
        safecompile.install()
        safecompile.install()
        safecompile.uninstall()
        safecompile.install()
    (text,) = texts
    assert text.startswith("RuntimeWarning: this interpreter runs without its global lock")
    assert "PYTHON_GIL=1" in text


def test_an_interpreter_with_its_lock_is_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True, raising=False)
    with recorded() as texts:
        safecompile.install()
    assert texts == []
