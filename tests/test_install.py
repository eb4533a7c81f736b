"""Installing and uninstalling: nothing is changed before, everything is put back, and never under somebody's feet."""

from __future__ import annotations

import contextlib
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.fx

import safecompile
from safecompile import PatchesInUseError, PatchMismatchError, thread_safe_compile
from tests.helpers import torch_state
from tests.helpers.backends import AotCountingBackend, CountingBackend
from tests.helpers.subprocess_run import run_forked
from tests.helpers.threads import gather_threads, run_threads, switch_interval
from tests.helpers.tracing import TRACES, Model, example, held_trace

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def snapshot() -> dict[tuple[str, str], Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reading an attribute that torch deprecates warns
        return torch_state.snapshot()


def changes(before: dict[tuple[str, str], Any], after: dict[tuple[str, str], Any]) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch_state.changes(before, after)


def installed() -> bool:
    return safecompile.statistics().installed


def broken(x: torch.Tensor) -> torch.Tensor:
    x = x + 1
    torch._dynamo.graph_break()
    return x * 2


def test_importing_and_decorating_change_nothing_and_the_first_call_installs() -> None:
    run_forked("""
        import sys
        import torch
        import torch._dynamo.convert_frame  # loaded by torch.compile itself
        from tests.helpers.torch_state import changes, snapshot

        torch.compile(lambda x: x, backend="eager")
        before = snapshot()
        import safecompile

        @safecompile.thread_safe_compile(backend="eager")
        def function(x):
            return x + 1

        model = safecompile.thread_safe_compile(torch.nn.Linear(2, 2), backend="eager")
        assert changes(before, snapshot()) == []
        assert not safecompile.statistics().installed
        function(torch.ones(2))
        assert safecompile.statistics().installed
        assert changes(before, snapshot())
    """).check()


def test_uninstall_restores_every_attribute_and_all_code() -> None:
    run_forked(
        """
        import math, re, threading
        import torch
        import safecompile
        from tests.helpers.tracing import TRACES, Model, example
        from tests.helpers.torch_state import changes, snapshot

        def work(compile_it):
            def broken(x):
                x = x + 1
                torch._dynamo.graph_break()
                return x * 2
            compile_it(broken, backend="aot_eager")(example().requires_grad_()).sum().backward()
            for trace in TRACES.values():
                trace(Model())

        work(torch.compile)  # what the first use of torch itself changes
        before = snapshot()
        for _ in range(2):
            safecompile.install()
            assert changes(before, snapshot())
            safecompile.uninstall()
            assert changes(before, snapshot()) == [], "no work"
        work(safecompile.thread_safe_compile)
        safecompile.uninstall()
        left = [name for name in changes(before, snapshot()) if not re.search("cache|counter", name, re.IGNORECASE)]
        print(left)
        private = [name for name in left if name.startswith(("torch.fx", "torch.compiler", "torch.nn.modules.module",
                   "torch._dynamo.convert_frame", "torch._dynamo.output_graph", "torch.export", "torch.utils._python"))]
        assert private == [], private
        assert type(torch.compiler).__name__ == type(math).__name__ == "module"
    """,
        timeout=100,
    ).check()


def test_install_is_idempotent() -> None:
    safecompile.install()
    before = snapshot()
    safecompile.install()
    safecompile.install(strict=True)
    assert changes(before, snapshot()) == []
    safecompile.uninstall()
    safecompile.uninstall()
    assert not installed()


def test_many_threads_install_and_call_first_at_the_same_time() -> None:
    backend = CountingBackend()
    call = thread_safe_compile(lambda x: x + 1, backend=backend, fullgraph=True)
    before = snapshot()
    with switch_interval():
        run_threads([safecompile.install, lambda: call(example())] * 4)
    assert backend.count == 1
    safecompile.uninstall()
    left = [name for name in changes(before, snapshot()) if name.startswith(("torch.fx.", "torch.compiler."))]
    left = [name for name in left if name != "torch.fx.traceback.current_meta"]  # torch makes a new one at times
    assert left == []


def test_threads_that_install_uninstall_and_call_get_right_results() -> None:
    backend = CountingBackend()
    call = thread_safe_compile(broken, backend=backend)
    want = broken(example())

    def calls() -> None:
        for _ in range(30):
            assert torch.equal(call(example()), want)

    def cycles() -> None:
        for _ in range(8):
            safecompile.install()
            with contextlib.suppress(PatchesInUseError):
                safecompile.uninstall()

    with switch_interval():
        run_threads([calls, calls, cycles])
    assert backend.count == 2


def test_guarded_calls_go_on_working_over_cycles_and_compile_nothing_again() -> None:
    backend, aot = CountingBackend(), AotCountingBackend()
    call, model = thread_safe_compile(broken, backend=backend), torch.nn.Linear(4, 4)
    train = thread_safe_compile(lambda x: model(x).sum(), backend=aot)
    want = broken(example())
    for _ in range(3):
        assert torch.equal(call(example()), want)
        train(example()).backward()
        assert installed()
        safecompile.uninstall()
        assert not installed()
    assert (backend.count, aot.forward.count, aot.backward.count) == (2, 1, 1)


def test_uninstall_is_refused_while_a_guarded_call_runs_and_names_its_thread() -> None:
    inside, go_on = threading.Event(), threading.Event()

    @torch.compiler.disable
    def wait() -> None:
        inside.set()
        assert go_on.wait(60)

    def function(x: torch.Tensor) -> torch.Tensor:
        wait()
        return x + 1

    thread = threading.Thread(
        target=thread_safe_compile(function, backend="eager"), args=(example(),), name="the-caller"
    )
    thread.start()
    try:
        assert inside.wait(60)
        with pytest.raises(PatchesInUseError, match="the-caller"):
            safecompile.uninstall()
        assert installed()
    finally:
        go_on.set()
        thread.join()
    safecompile.uninstall()
    assert not installed()


@pytest.mark.parametrize("name", ["symbolic_trace", "make_fx", "export"])
def test_uninstall_is_refused_in_the_middle_of_a_trace_and_names_its_thread(name: str) -> None:
    safecompile.install()
    with held_trace(TRACES[name], Model(), name="the-tracer"), pytest.raises(PatchesInUseError, match="the-tracer"):
        safecompile.uninstall()
    assert installed()
    safecompile.uninstall()


def test_uninstall_in_a_backend_is_refused() -> None:
    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        with pytest.raises(PatchesInUseError):
            safecompile.uninstall()
        return graph.forward

    thread_safe_compile(lambda x: x + 1, backend=backend, fullgraph=True)(example())


def beside_a_compile(action: Any) -> Any:
    backend = CountingBackend(gated=True)
    call = thread_safe_compile(lambda x: x + 1, backend=backend)
    compiling = threading.Thread(target=call, args=(example(),), name="the-compiler", daemon=True)
    compiling.start()
    try:
        assert backend.entered.wait(60)
        return gather_threads([action], timeout=5)[0]
    finally:
        backend.release.set()
        compiling.join(60)


def test_uninstall_beside_a_compile_is_refused_at_once() -> None:
    outcome = beside_a_compile(safecompile.uninstall)
    assert isinstance(outcome, PatchesInUseError)
    assert "the-compiler" in str(outcome)


def test_install_beside_a_compile_does_not_wait_when_nothing_is_to_be_done() -> None:
    assert beside_a_compile(safecompile.install) is None


def test_install_inside_a_trace_is_refused_and_changes_nothing() -> None:
    class Installs(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with pytest.raises(PatchesInUseError, match="before it begins"):
                safecompile.install()
            return x + 1

    before = snapshot()
    torch.fx.symbolic_trace(Installs())
    assert not installed()
    assert [name for name in changes(before, snapshot()) if name.startswith("torch.fx.")] == []
    safecompile.install()
    assert installed()


def test_a_guarded_call_inside_a_trace_that_began_before_behaves_as_torch_alone() -> None:
    call = thread_safe_compile(lambda x: x + 1, backend="eager")
    with pytest.raises(RuntimeError, match="FX to symbolically trace"):
        torch.fx.symbolic_trace(lambda x: call(x))  # noqa: PLW0108
    assert torch.equal(call(example()), example() + 1)


def test_what_somebody_else_has_patched_since_is_left_alone() -> None:
    from torch.fx import _symbolic_trace

    original, method = _symbolic_trace._autowrap_check, _symbolic_trace.Tracer.trace
    safecompile.install()
    ours, our_method = _symbolic_trace._autowrap_check, vars(_symbolic_trace.Tracer)["trace"]

    def foreign(patcher: Any, frame_dict: dict[str, Any], function_ids: set[int]) -> None:
        ours(patcher, frame_dict, function_ids)

    def foreign_trace(self: Any, *args: Any, **kwargs: Any) -> Any:
        return our_method.__get__(self, type(self))(*args, **kwargs)

    _symbolic_trace._autowrap_check = foreign
    _symbolic_trace.Tracer.trace = foreign_trace  # type: ignore[method-assign]
    try:
        safecompile.uninstall()
        assert _symbolic_trace._autowrap_check is foreign
        assert _symbolic_trace.Tracer.trace is foreign_trace
        assert len(TRACES["symbolic_trace"](Model()).nodes) > 1
        safecompile.install()
        assert len(TRACES["symbolic_trace"](Model()).nodes) > 1
        safecompile.uninstall()
        assert _symbolic_trace._autowrap_check is foreign
    finally:
        _symbolic_trace._autowrap_check = original
        _symbolic_trace.Tracer.trace = method  # type: ignore[method-assign]


def test_a_point_that_somebody_else_has_wrapped_is_not_patched_twice_by_the_next_installation() -> None:
    from torch._dynamo.output_graph import OutputGraph

    original = OutputGraph.install_global_unsafe
    safecompile.install()
    ours = vars(OutputGraph)["install_global_unsafe"]

    def foreign(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ours.__get__(self, type(self))(*args, **kwargs)

    OutputGraph.install_global_unsafe = foreign  # type: ignore[method-assign]
    try:
        safecompile.uninstall()
        call, want = thread_safe_compile(broken, backend="eager"), broken(example())
        got = call(example())
        safecompile.uninstall()
    finally:
        OutputGraph.install_global_unsafe = original  # type: ignore[method-assign]
    assert type(got) is torch.Tensor
    assert torch.equal(got, want)


MISMATCH = """
import warnings
import torch
import safecompile
from torch._dynamo.output_graph import OutputGraph
from tests.helpers.torch_state import changes, snapshot

del OutputGraph.install_global_unsafe
before = snapshot()
"""


def test_a_patch_point_that_does_not_match_is_an_error_under_strict_and_one_warning_otherwise() -> None:
    run_forked(f"""{MISMATCH}
try:
    safecompile.install(strict=True)
except safecompile.PatchMismatchError as error:
    assert "resume-functions" in str(error)
else:
    raise AssertionError("installed")
assert not safecompile.statistics().installed
left = [name for name in changes(before, snapshot()) if "CacheInfo" not in name]  # filled by an import
assert left == [], left
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    safecompile.install()
    safecompile.uninstall()
    safecompile.install()
found = [str(warning.message) for warning in caught if "patch point" in str(warning.message)]
assert len(found) == 1 and "resume-functions" in found[0], found
by_name = {{patch.name: patch.installed for patch in safecompile.statistics().patches}}
assert not by_name.pop("resume-functions") and any(by_name.values())
""").check()


def test_strict_is_an_error_also_after_a_lax_installation() -> None:
    result = run_forked(f"""{MISMATCH}
warnings.simplefilter("ignore")
safecompile.install()
try:
    safecompile.install(strict=True)
except safecompile.PatchMismatchError:
    pass
else:
    raise SystemExit(3)
""")
    assert result.rc == 0


def test_everything_matches_the_torch_of_development() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        safecompile.install(strict=True)
    assert PatchMismatchError is not None


def test_statistics_tell_what_is_installed_and_compiled() -> None:
    before = safecompile.statistics()
    assert not before.installed
    assert not any(patch.installed for patch in before.patches)
    call = thread_safe_compile(broken, backend="eager")
    call(example())
    now = safecompile.statistics()
    assert now.installed
    assert now.compiled - before.compiled == 2
    assert all(patch.name and patch.protects and patch.upstream for patch in now.patches)
    assert len({patch.name for patch in now.patches}) == len(now.patches)
    assert any(patch.installed for patch in now.patches)
    assert not now.lock.locked and now.lock.waiters == ()
    call(example())
    assert safecompile.statistics().compiled == now.compiled


def test_an_installation_inside_a_dispatch_mode_leaves_no_flag_behind() -> None:
    run_forked("""
        import torch
        import safecompile
        from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode

        call = safecompile.thread_safe_compile(lambda x: x + 1, backend="eager")
        with TorchDispatchMode():
            assert is_in_torch_dispatch_mode()
            safecompile.install()
            assert is_in_torch_dispatch_mode(), "inside"
        assert not is_in_torch_dispatch_mode()
        safecompile.uninstall()
        assert not is_in_torch_dispatch_mode(), "after"
    """).check()


def test_torch_compile_can_be_replaced_by_thread_safe_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", thread_safe_compile)
    call = torch.compile(lambda x: x + 1, backend="eager")
    assert torch.equal(call(example()), example() + 1)
