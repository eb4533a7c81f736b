"""Whole programs, each in a process of its own: torch alone shows the fault, with the library it is gone.

A program calls `compile_it` where it would call `torch.compile`, notes faults with `fault(...)`, and exits with 1 if it
has noted any.
"""

from __future__ import annotations

import json
import textwrap

import pytest

from tests.helpers.subprocess_run import IsolatedResult, run_forked
from tests.helpers.torch_version import lacks, repaired

PRELUDE = """
import collections, contextlib, math, sys, threading
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from tests.helpers.backends import CountingBackend
from tests.helpers.device_guard import ask_for_the_device_guard
from tests.helpers.threads import gather_threads
from tests.helpers.tracing import is_exporting

if sys.argv[1] == "library":
    import safecompile
    safecompile.install()
    compile_it = safecompile.thread_safe_compile
    capture_context = safecompile.capture_context
else:
    ask_for_the_device_guard()
    compile_it = torch.compile
    class capture_context:
        def run(self, function, *args):
            return function(*args)
        def apply(self):
            pass

faults = collections.Counter()

def fault(*what):
    faults[" ".join(map(str, what))[:200]] += 1

def attempt(what, function, want=None):
    try:
        got = function()
    except Exception as error:
        fault(what, type(error).__name__, error)
        return None
    if want is not None and (type(got) is not torch.Tensor or not torch.equal(got, want)):
        fault(what, "returned", type(got).__name__)
    return got

def together(*functions):
    for outcome in gather_threads(list(functions), timeout=45):
        if isinstance(outcome, BaseException):
            fault(type(outcome).__name__, outcome)

class Stops(torch.nn.Module):
    '''Stops in its first call by the thread that is to stop, in the middle of what it does.'''
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.thread, self.inside, self.go_on = None, threading.Event(), threading.Event()
    def forward(self, x):
        y = self.a(x)
        if threading.current_thread() is self.thread:
            self.thread = None
            self.inside.set()
            assert self.go_on.wait(30)
        return self.b(y)

def in_the_middle_of(trace, model, do):
    def run():
        model.thread = threading.current_thread()
        try:
            result.append(trace(model))
        except Exception as error:
            fault("trace", type(error).__name__, error)
        finally:
            model.inside.set()
    result = []
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert model.inside.wait(30)
    try:
        do()
    finally:
        model.go_on.set()
        thread.join(30)
    assert not thread.is_alive()
    return result[0] if result else None

@contextlib.contextmanager
def another_thread_inside(enter, *args):
    '''Keep another thread inside a context.'''
    def run():
        with enter(*args):
            entered.set()
            assert leave.wait(30)
    entered, leave = threading.Event(), threading.Event()
    thread = threading.Thread(target=run)
    thread.start()
    assert entered.wait(30)
    try:
        yield
    finally:
        leave.set()
        thread.join(30)

x = torch.linspace(-1, 1, 8).reshape(2, 4)
"""

END = """
for what, n in faults.items():
    print(n, "x", what)
sys.exit(1 if faults else 0)
"""

PROGRAMS = {
    "E1: warm calls of an unrelated function beside make_fx": """
        call = compile_it(lambda v: torch.sin(v) + 1, backend="eager", fullgraph=True)
        want = call(x)
        def calls():
            for _ in range(20):
                attempt("warm", lambda: call(x), want)
        in_the_middle_of(lambda m: make_fx(m)(x), Stops(), calls)
    """,
    "E1: cold calls beside symbolic_trace": """
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        want = model(x)
        call = compile_it(lambda v: model(v), backend="aot_eager", fullgraph=True)
        in_the_middle_of(torch.fx.symbolic_trace, Stops(), lambda: attempt("cold", lambda: call(x), want))
    """,
    "E2 and S4: eager calls beside symbolic_trace, of another model and of the same": """
        other, same = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), Stops()
        wants = other(x), same(x)
        alone = str(torch.fx.symbolic_trace(Stops()).graph)
        def calls():
            attempt("other", lambda: other(x), wants[0])
            attempt("same", lambda: same(x), wants[1])
        traced = in_the_middle_of(torch.fx.symbolic_trace, same, calls)
        if traced is None or str(traced.graph) != alone:
            fault("the graph is not the one that a single thread gets")
    """,
    "E4: a herd of first calls": """
        n, backend = 12, CountingBackend()
        call, barrier = compile_it(lambda v: (v * 2).relu(), backend=backend, fullgraph=True), threading.Barrier(n)
        def first():
            barrier.wait(30)
            attempt("first", lambda: call(x), (x * 2).relu())
        together(*[first] * n)
        if backend.count != 1:
            fault("compiles:", backend.count)
    """,
    "S10: configuration set on the main thread (03)": """
        import asyncio
        from concurrent.futures import ThreadPoolExecutor
        from tests.helpers.torch_version import RECOMPILE_LIMIT
        def look():
            return getattr(torch._dynamo.config, RECOMPILE_LIMIT), torch._inductor.config.freezing
        def drive():
            call = compile_it(lambda v: v + 1, backend="eager", fullgraph=True, dynamic=False)
            for n in range(2, 20):
                call(torch.ones(n))
        with torch._dynamo.config.patch({RECOMPILE_LIMIT: 77}), torch._inductor.config.patch(freezing=True):
            context, mine, seen = capture_context(), look(), {}
            drive()
            def in_thread():
                seen["thread"] = context.run(look)
                attempt("18 shapes", lambda: context.run(drive))
            together(in_thread)
            with ThreadPoolExecutor(1, initializer=context.apply) as pool:
                seen["pool"] = pool.submit(look).result()
            async def to_thread():
                seen["asyncio"] = await asyncio.to_thread(context.run, look)
            asyncio.run(to_thread())
        for where, there in seen.items():
            if there != mine:
                fault(where, "sees", there)
    """,
    "S11: a number of intra-op threads that a worker does not have (11)": """
        backend, before = CountingBackend(), torch.get_num_threads()
        call = compile_it(lambda v: torch.sin(v) + 1, backend=backend)
        used, called = threading.Event(), threading.Event()
        def worker():
            torch.get_num_threads()  # from here on it has its own
            used.set()
            assert called.wait(30)
            contexts[0].run(call, x)
        def main():
            assert used.wait(30)
            torch.set_num_threads(before + 1)
            call(x)
            contexts.append(capture_context())
            called.set()
        contexts = []
        together(worker, main)
        torch.set_num_threads(before)
        if backend.count != 1:
            fault("compiles:", backend.count)
    """,
    "S11: grad mode, inference mode and autocast of the main thread (12)": """
        for enter in (torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)):
            backend, linear = CountingBackend(), torch.nn.Linear(4, 4)
            call = compile_it(lambda v: linear(v), backend=backend)
            def kind():
                got = call(x)
                return got.dtype, got.requires_grad, got.is_inference()
            with enter():
                mine, context, there = kind(), capture_context(), []
                together(lambda: there.append(context.run(kind)))
            if there != [mine] or backend.count != 1:
                fault(there, "and not", mine, "compiles:", backend.count)
    """,
    "S5: a compile beside a symbolic trace": """
        alone = str(torch.fx.symbolic_trace(Stops()).graph)
        inner = Stops()
        def compile_meanwhile():
            w = torch.nn.Linear(4, 4)
            attempt("compile", lambda: compile_it(lambda v: w(v), backend="aot_eager")(x), None)
        traced = in_the_middle_of(torch.fx.symbolic_trace, inner, compile_meanwhile)
        if traced is None or str(traced.graph) != alone:
            fault("the graph is not the one that a single thread gets")
    """,
    "S6: is_compiling and is_exporting in other threads": """
        backend = CountingBackend(gated=True)
        compiling = threading.Thread(target=compile_it(lambda v: v + 1, backend=backend), args=(x,), daemon=True)
        compiling.start()
        assert backend.entered.wait(30)
        if torch.compiler.is_compiling():
            fault("is_compiling beside a compile")
        backend.release.set()
        compiling.join()
        def look():
            if torch.compiler.is_compiling() or is_exporting():
                fault("is_compiling or is_exporting beside an export")
        in_the_middle_of(lambda m: torch.export.export(Unlocked(m), (x,), strict=False), Stops(), look)
    """,
    "S7: a stance in another thread": """
        def beside(stance):
            backend = CountingBackend()
            call = compile_it(eval("lambda v: v.sin()"), backend=backend)
            with another_thread_inside(torch.compiler.set_stance, stance):
                attempt(stance, lambda: call(x), x.sin())
            if backend.count != 1:
                fault(stance, "compiles:", backend.count)
        beside("force_eager")
        beside("fail_on_recompile")
    """,
    "S7 and P2: stances that are left out of order": """
        first, second = threading.Event(), threading.Event()
        def leaves_first():
            with torch.compiler.set_stance("force_eager"):
                first.set()
                assert second.wait(30)
        def leaves_last():
            assert first.wait(30)
            with torch.compiler.set_stance("default"):
                second.set()
                threads[0].join(30)
        threads = [threading.Thread(target=run) for run in (leaves_first, leaves_last)]
        for thread in threads:
            thread.start()
        threads[1].join(30)
        backend = CountingBackend()
        compile_it(lambda v: v.sin(), backend=backend)(x)
        if backend.count != 1:
            fault("compiles afterwards:", backend.count)
    """,
    "S7: guards that another thread skips": """
        call = compile_it(lambda v: v.sin(), backend="eager", dynamic=False)
        for n in (2, 3):
            call(torch.ones(n))
        with another_thread_inside(lambda: torch.compiler.set_stance(skip_guard_eval_unsafe=True)):
            attempt("a new shape", lambda: call(torch.ones(4)), torch.ones(4).sin())
    """,
    "S7: an error on graph breaks that another thread has asked for": """
        def breaks(v):
            v = v + 1
            torch._dynamo.graph_break()
            return v * 2
        with another_thread_inside(torch._dynamo.error_on_graph_break, True):
            attempt("graph break", lambda: compile_it(breaks, backend="eager")(x), (x + 1) * 2)
    """,
    "E3: exported programs loaded at the same time": """
        import io
        saved = io.BytesIO()
        torch.export.save(torch.export.export(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), (x,)), saved)
        def load():
            for _ in range(10):
                attempt("load", lambda: torch.export.load(io.BytesIO(saved.getvalue())))
        sys.setswitchinterval(1e-6)
        together(*[load] * 4)
    """,
    "D2: a fork while a thread compiles": """
        import faulthandler, os
        backend = CountingBackend(gated=True)
        thread = threading.Thread(target=lambda: compile_it(lambda v: v.sin(), backend=backend)(x))
        thread.start()
        assert backend.entered.wait(30)
        child = os.fork()
        if not child:
            faulthandler.dump_traceback_later(20 if sys.argv[1] == "library" else 6, exit=True)
            os._exit(0 if torch.equal(compile_it(lambda v: v.cos(), backend="eager")(x), x.cos()) else 3)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        backend.release.set()
        thread.join(30)
        if code:
            fault("the child ended with", code)
    """,
    "E4: the first calls of a graph whose Python code is still to be made": """
        from torch.fx._lazy_graph_module import _LazyGraphModule
        def long(v):
            for _ in range(100):
                v = (v + 1).sin()
            return v
        sys.setswitchinterval(1e-6)
        for _ in range(10):
            traced = torch.fx.symbolic_trace(long)
            lazy, want, barrier = _LazyGraphModule(traced, traced.graph), long(x), threading.Barrier(4)
            lazy.recompile()
            def first():
                barrier.wait(30)
                attempt("first", lambda: lazy(x), want)
            together(*[first] * 4)
    """,
    "P1: overlapping traces": """
        model, original = torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.nn.Module.__call__
        want = model(x)
        first, second = Stops(), Stops()
        def first_inside():
            in_the_middle_of(torch.fx.symbolic_trace, second, end_first)
        def end_first():
            first.go_on.set()
            tracer_of_first[0].join(30)
        tracer_of_first = [None]
        def trace_first(m):
            tracer_of_first[0] = threading.current_thread()
            return torch.fx.symbolic_trace(m)
        in_the_middle_of(trace_first, first, first_inside)  # the first ends while the second is inside
        attempt("eager afterwards", lambda: model(x), want)
        attempt("compiled afterwards", lambda: compile_it(lambda v: model(v), backend="eager")(x), want)
        if torch.nn.Module.__call__ is not original:
            fault("nn.Module.__call__ is not the original")
    """,
}

EXTRA = """
_stops = {}
class Unlocked(torch.nn.Module):
    '''A model that can be copied around one that cannot, as an export beside threads copies it.'''
    def __init__(self, stops):
        super().__init__()
        self.linear, self.key = torch.nn.Linear(4, 4), id(stops)
        _stops[self.key] = stops
    def forward(self, v):
        stops = _stops[self.key]
        if threading.current_thread() is stops.thread:
            stops.thread = None
            stops.inside.set()
            assert stops.go_on.wait(30)
        return self.linear(v)
"""

HEALTHY_ALONE = {
    "mixed training of models of one's own": """
        def train(seed):
            def run():
                torch.manual_seed(0)
                model = torch.nn.Sequential(torch.nn.Linear(4 + seed, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
                call = compile_it(lambda v: model(v), backend="aot_eager")
                for rows in (2, 3, 2, 5):
                    v = torch.ones(rows, 4 + seed)
                    got = torch.autograd.grad(call(v).square().sum(), list(model.parameters()))
                    want = torch.autograd.grad(model(v).square().sum(), list(model.parameters()))
                    for one, other in zip(got, want):
                        torch.testing.assert_close(one, other)
            return run
        together(*[train(seed) for seed in range(3)])
    """,
    "checkpoint and compile in three layouts": """
        from torch.utils.checkpoint import checkpoint
        class Block(torch.nn.Module):
            def __init__(self, d):
                super().__init__()
                self.linear = torch.nn.Linear(d, d)
            def forward(self, v):
                return v + torch.tanh(self.linear(v))
        def train(layout, d):
            def run():
                block = Block(d)
                whole = lambda v: checkpoint(block, v, use_reentrant=False).square().mean()
                if layout == 0:
                    call = compile_it(whole, backend="aot_eager")
                elif layout == 1:
                    inner = compile_it(lambda v: block(v), backend="aot_eager")
                    call = lambda v: checkpoint(inner, v, use_reentrant=False).square().mean()
                else:
                    call = compile_it(whole, backend="aot_eager", dynamic=True)
                for rows in (3, 5, 3):
                    v = torch.ones(rows, d, requires_grad=True)
                    torch.testing.assert_close(*(torch.autograd.grad(f(v), v)[0] for f in (call, whole)))
            return run
        together(*[train(layout, 4 + layout) for layout in (0, 1, 2)])
    """,
}


def run(body: str, how: str) -> IsolatedResult:
    return run_forked(f"{PRELUDE}{EXTRA}{textwrap.dedent(body)}{END}", [how], timeout=100)


ALL = """
import json, types
for name, body in json.loads(sys.argv[2]).items():
    program = types.ModuleType(f"program {name}")  # where Dynamo finds the program's variables
    sys.modules[program.__name__] = program
    vars(program).update({**globals(), "__name__": program.__name__})
    faults.clear()
    sys.setswitchinterval(0.005)
    torch._dynamo.reset()
    try:
        exec(body, vars(program))
    except Exception as error:
        fault("the program", type(error).__name__, error)
    print(json.dumps([name, dict(faults)]), flush=True)
"""


@pytest.fixture(scope="module")
def with_the_library() -> tuple[dict[str, dict[str, int]], IsolatedResult]:
    """Run all programs in one process, one after the other: a fault that stays would show in those that follow."""
    bodies = {name: textwrap.dedent(body) for name, body in {**PROGRAMS, **HEALTHY_ALONE}.items()}
    result = run_forked(f"{PRELUDE}{EXTRA}{ALL}", ["library", json.dumps(bodies)], timeout=200)
    lines = [line for line in result.stdout.splitlines() if line.startswith('["')]
    return dict(json.loads(line) for line in lines), result


LACKING = {
    "S7: an error on graph breaks that another thread has asked for": lacks((2, 9), "error_on_graph_break"),
}


ABSENT = {
    "E1: warm calls of an unrelated function beside make_fx": repaired((2, 14), "one flag of FX for the process (E1)"),
    "S10: configuration set on the main thread (03)": lacks((2, 12), "configuration of a thread (S10)"),
}


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [LACKING[name]] if name in LACKING else []


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in [*PROGRAMS, *HEALTHY_ALONE]])
def test_program_is_healthy_with_the_library(
    name: str, with_the_library: tuple[dict[str, dict[str, int]], IsolatedResult]
) -> None:
    faults, result = with_the_library
    assert name in faults, result
    assert faults[name] == {}


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(body, id=name, marks=[*marks(name), *([ABSENT[name]] if name in ABSENT else [])])
        for name, body in PROGRAMS.items()
    ],
)
def test_control_program_shows_the_fault_with_torch_alone(body: str) -> None:
    results = []
    for _ in range(15):  # a herd may happen to compile once, and a race not to happen
        results.append(run(body, "alone"))
        if results[-1].rc == 1 and " x " in results[-1].stdout:
            return
    raise AssertionError(f"no fault: {results}")
