"""A mixed stress: threads compile, trace, export and train, and compare all that they get with a single thread's.

`stress_program.py library|stock SECONDS SEED` prints a summary as JSON. What a thread does next is drawn from the seed.
With `stock` it is torch alone, and Dynamo is not reset, which would be a crash.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor

import safecompile
from tests.helpers.threads import gather_threads, switch_interval
from tests.helpers.torch_state import changes, snapshot
from tests.helpers.tracing import TRACES, example, is_exporting, is_symbolic_tracing, rows

THREADS = 8
# Past the end, until each thread has ended what it was doing.
GRACE = 60.0
# What torch has to clean up, which is less whenever something is freed.
COUNTER = "torch._dynamo.utils.CleanupManager.count"
# So many faults are enough.
FAULTS = 20


class Wrong(Exception):  # noqa: N818  a result, and not an error
    """A result is another than the single thread's."""


class Injected(Exception):  # noqa: N818
    """What a failing backend raises; the text names the call that is to get it."""


# --- what is called, in all threads and before by the only one

CONSTANTS = range(4)
SIZES = range(2, 5)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.scale = torch.nn.Parameter(torch.full((4,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x)) * self.scale * math.sqrt(4.0)


class Model(torch.nn.Module):
    """Its calls, attributes and functions from `math` all pass through what a trace patches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Layer()
        self.rest = torch.nn.Sequential(Layer(), torch.nn.Tanh())
        self.bias = torch.nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.rest(self.first(x)) + self.bias
        return y


MODEL = Model()
WEIGHT = example(4, 4).t().contiguous().requires_grad_()


def plain(x: Tensor) -> Tensor:
    return torch.tanh(x @ WEIGHT).sin() * torch.sigmoid(x)


def through_the_model(x: Tensor) -> Tensor:
    return MODEL(x) * MODEL.bias.cos() + x


def _helper_with_a_break(x: Tensor) -> Tensor:
    y = x.cos() @ WEIGHT
    torch._dynamo.graph_break()
    return y + x


def with_breaks(x: Tensor) -> Tensor:
    y = (x * 2).sin()
    torch._dynamo.graph_break()
    y = _helper_with_a_break(y if y.sum() > 0 else -y)  # depends on data: a break
    return y.relu() * 3


def with_a_break_in_a_block(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = torch.tanh(x @ WEIGHT)
        torch._dynamo.graph_break()
        scale = scale.exp()
    return (x @ WEIGHT) * scale


SHARED: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": plain,
    "through the model": through_the_model,
    "breaks": with_breaks,
    "a break in a block": with_a_break_in_a_block,
}


def fresh(number: int, constant: int, *, breaks: bool = False) -> Callable[[Tensor], Tensor]:
    """Make a function with code of its own, for the limit of recompiles is one for each code."""
    stop = "torch._dynamo.graph_break()" if breaks else "pass"
    namespace: dict[str, Any] = {"torch": torch}
    source = f"def fresh_{number}(x):\n    y = (x * {constant}).sin() + x.exp()\n    {stop}\n    return y.cos() * {constant}\n"
    exec(compile(source, __file__, "exec"), namespace)  # torch 2.8 wraps what is from no file in one code for all
    return cast("Callable[[Tensor], Tensor]", namespace[f"fresh_{number}"])


def forward_and_backward(function: Callable[[Tensor], Tensor], size: int) -> list[Any]:
    """Return the result, and the gradients of the input, and of the weight where it is used."""
    x = example(size).requires_grad_()
    y = function(x)
    gradients = torch.autograd.grad(y.square().sum(), (x, WEIGHT), allow_unused=True)
    return [y.detach(), *gradients]


OPTIMIZERS: dict[str, Any] = {
    name: getattr(torch.optim, name) for name in ("AdamW", "Adam", "NAdam", "RAdam", "SGD", "Adagrad")
}


def optimized(name: str, foreach: bool) -> list[Any]:
    """Return a trajectory's end, and the optimizer's state."""
    parameters = [torch.nn.Parameter(example(n)) for n in (1, 3)]
    optimizer = OPTIMIZERS[name](parameters, lr=0.01, foreach=foreach)
    for step in range(6):
        for parameter in parameters:
            parameter.grad = (parameter.detach() * (step + 1)).cos()
        optimizer.step()
    state = optimizer.state_dict()["state"]
    return [*(parameter.detach() for parameter in parameters), *(state[key] for key in sorted(state))]


def traced(name: str) -> list[Any]:
    graph = TRACES[name](MODEL)
    return [str(graph), rows(graph)]


def exported(*, strict: bool) -> list[Any]:
    program = torch.export.export(MODEL, (example(),), strict=strict)
    return [str(program.graph), rows(program.graph), program.module()(example()).detach()]


def same(got: Any, want: Any) -> bool:
    if type(got) is not type(want):
        return False
    if isinstance(want, Tensor):
        return (got.dtype, got.shape) == (want.dtype, want.shape) and torch.equal(got, want)
    if isinstance(want, dict):
        return got.keys() == want.keys() and all(same(got[key], value) for key, value in want.items())
    if isinstance(want, list):
        return len(got) == len(want) and all(map(same, got, want))
    return bool(got == want)


SYMBOLIC = ("symbolic_trace", "Tracer subclass", "Tracer with autowrap_functions")
MAKE_FX = ("make_fx", "make_fx pre_dispatch", "make_fx fake")


def references() -> dict[Any, Any]:
    """Let torch alone do everything in the only thread."""
    want: dict[Any, Any] = {}
    for name, function in SHARED.items():
        compiled = torch.compile(function, backend="aot_eager", dynamic=False)
        for size in SIZES:
            want[name, size] = forward_and_backward(compiled, size)
    for size in SIZES:
        want["eager", size] = forward_and_backward(MODEL, size)
    for constant in CONSTANTS:
        compiled = torch.compile(fresh(0, constant), backend="aot_eager", dynamic=False)
        for size in SIZES:
            want["fresh", constant, size] = forward_and_backward(compiled, size)
    for name, foreach in itertools.product(OPTIMIZERS, (False, True)):
        want["optimizer", name, foreach] = optimized(name, foreach)
    for name in SYMBOLIC + MAKE_FX:
        want["trace", name] = traced(name)
    for strict in (False, True):
        want["export", strict] = exported(strict=strict)
    torch.compiler.reset()
    return want


# --- what a thread does


class FailingBackend:
    """Runs graphs through AOTAutograd, and fails where it is told to.

    `fails` is asked for each graph, on the thread that compiles, with the graph's stage and number; it returns what the
    error is to say, or None.
    """

    def __init__(self, fails: Callable[[str, int], str | None]) -> None:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch._aot_autograd.utils import make_boxed_func

        numbers = {stage: itertools.count() for stage in ("forward", "backward")}

        def compiler(stage: str) -> Callable[..., Any]:
            def compile_graph(graph: torch.fx.GraphModule, inputs: Any) -> Any:
                text = fails(stage, next(numbers[stage]))
                if text is not None:
                    raise Injected(text)
                return make_boxed_func(graph.forward)

            return compile_graph

        self._compile = aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"))

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return self._compile(graph, inputs)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Go through an error and what it was raised from."""
    seen: set[int] = set()
    todo = [error]
    while todo:
        error = todo.pop()
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            yield error
            todo += [error.__cause__, error.__context__, getattr(error, "inner_exception", None)]


class Stress:
    """The threads' common state."""

    def __init__(
        self,
        compilers: list[Callable[..., Any]],
        reset: Callable[[], None] | None,
        seed: int,
        want: dict[Any, Any],
    ) -> None:
        self.compilers = compilers
        self.reset = reset
        self.seed = seed
        self.end = 0.0
        self.enough = threading.Event()
        self.numbers = itertools.count(1)
        self.lock = threading.Lock()
        # Guarded by lock.
        self.operations: Counter[str] = Counter()
        self.slowest: Counter[str] = Counter()
        self.injected = 0
        self.wrong: list[str] = []
        self.errors: list[str] = []
        # Who may fail in a compile of a shared function: asked on the compiling thread.
        self.asks = threading.local()
        self.want = want
        self.shared = {
            (name, which): compiler(function, backend="aot_eager", dynamic=False)
            for name, function in SHARED.items()
            for which, compiler in enumerate(compilers)
        }
        self.shaky = self.make_shaky()

    def make_shaky(self) -> tuple[int, Callable[[Tensor], Tensor]]:
        """Make a function that all threads call, and that some of them are to fail to compile."""
        number = next(self.numbers)
        constant = number % len(CONSTANTS)
        backend = FailingBackend(lambda stage, _: getattr(self.asks, "text", None) if stage == "forward" else None)
        return constant, self.compilers[0](fresh(number, constant), backend=backend, dynamic=False)

    def work(self, index: int) -> None:
        worker = Worker(self, index)
        while time.monotonic() < self.end and not self.enough.is_set():
            worker.step()

    def note(self, kind: str, seconds: float, wrong: str | None = None, error: str | None = None) -> None:
        with self.lock:
            self.operations[kind] += 1
            self.slowest[kind] = max(self.slowest[kind], round(seconds, 2))  # type: ignore[assignment]
            self.wrong += [wrong] if wrong else []
            self.errors += [error] if error else []
            if len(self.wrong) + len(self.errors) >= FAULTS:
                self.enough.set()


class Worker:
    """One thread: draws what to do, does it, and compares."""

    def __init__(self, stress: Stress, index: int) -> None:
        self.stress, self.index = stress, index
        self.random = random.Random(f"{stress.seed} {index}")
        self.steps = 0
        self.kinds: dict[str, tuple[int, Callable[[], None]]] = {
            "compiled": (20, self.compiled),
            "graph breaks": (12, self.graph_breaks),
            "eager": (40, self.eager),
            "optimizer": (20, self.optimizer),
            "symbolic trace": (20, self.symbolic_trace),
            "make_fx": (4, self.make_fx),
            "export": (2, self.export),
            "new shapes": (4, self.new_shapes),
            "failing backend": (3, self.failing_backend),
            "shared failing backend": (6, self.shared_failing_backend),
        }
        if stress.reset is not None and index == 0:
            self.kinds["reset"] = (6, stress.reset)
        # Each of them once, that none is left out, and then at random.
        self.first = self.random.sample(list(self.kinds), len(self.kinds))

    def step(self) -> None:
        if self.first:
            kind = self.first.pop()
        else:
            (kind,) = self.random.choices(list(self.kinds), [weight for weight, _ in self.kinds.values()])
        self.steps += 1
        begin = time.monotonic()
        outcome: dict[str, str] = {}
        where = f"thread {self.index}, step {self.steps}, {kind}"
        try:
            self.kinds[kind][1]()
        except Wrong as wrong:
            outcome["wrong"] = f"{where}: {wrong}"
        except BaseException:
            outcome["error"] = f"{where}:\n{traceback.format_exc()}"
        self.stress.note(kind, time.monotonic() - begin, **outcome)

    def check(self, got: Any, *key: Any) -> None:
        want = self.stress.want[key if len(key) > 1 else key[0]]
        if not same(got, want):
            raise Wrong(f"{key} is\n{got}\ninstead of\n{want}")

    def compiled(self) -> None:
        self.call_shared("plain", "through the model")

    def graph_breaks(self) -> None:
        self.call_shared("breaks", "a break in a block")

    def call_shared(self, *names: str) -> None:
        name, size = self.random.choice(names), self.random.choice(SIZES)
        which = self.random.randrange(len(self.stress.compilers))
        self.check(forward_and_backward(self.stress.shared[name, which], size), name, size)

    def eager(self) -> None:
        for size in SIZES:
            self.check(forward_and_backward(MODEL, size), "eager", size)
        flags = (
            torch.compiler.is_compiling(),
            is_exporting(),
            is_symbolic_tracing(),
        )
        if any(flags):
            raise Wrong(f"an eager thread is told that it compiles, exports, traces: {flags}")

    def optimizer(self) -> None:
        name, foreach = self.random.choice(list(OPTIMIZERS)), self.random.random() < 0.5
        self.check(optimized(name, foreach), "optimizer", name, foreach)

    def symbolic_trace(self) -> None:
        name = self.random.choice(SYMBOLIC)
        self.check(traced(name), "trace", name)

    def make_fx(self) -> None:
        name = self.random.choice(MAKE_FX)
        self.check(traced(name), "trace", name)

    def export(self) -> None:
        strict = self.random.random() < 0.25
        self.check(exported(strict=strict), "export", strict)

    def new_shapes(self) -> None:
        constant = self.random.choice(CONSTANTS)
        compiler = self.random.choice(self.stress.compilers)
        call = compiler(fresh(next(self.stress.numbers), constant), backend="aot_eager")
        for size in self.random.sample(SIZES, len(SIZES)):
            self.check(forward_and_backward(call, size), "fresh", constant, size)

    def failing_backend(self) -> None:
        """A function of the thread's own fails: at first, in its second graph, or in backward; then it is right."""
        number, constant = next(self.stress.numbers), self.random.choice(CONSTANTS)
        stage, graph = self.random.choice([("forward", 0), ("forward", 1), ("backward", 0)])
        text = f"thread {self.index}, function {number}"
        backend = FailingBackend(lambda at, count: text if (at, count) == (stage, graph) else None)
        call = self.random.choice(self.stress.compilers)(fresh(number, constant, breaks=graph == 1), backend=backend)
        try:
            forward_and_backward(call, 2)
        except Exception as error:
            self.expect(error, text)
        else:
            raise Wrong(f"the backend's error in {stage} {graph} has not reached its thread")
        self.check(forward_and_backward(call, 2), "fresh", constant, 2)

    def shared_failing_backend(self) -> None:
        """A function of all threads fails to compile in those that want it to, and in no other."""
        fails = self.random.random() < 0.5
        if self.random.random() < 0.1:
            self.stress.shaky = self.stress.make_shaky()
        constant, call = self.stress.shaky
        text = self.stress.asks.text = f"thread {self.index}, step {self.steps}" if fails else None
        size = self.random.choice(SIZES)
        try:
            got = forward_and_backward(call, size)
        except Exception as error:
            if text is None:
                raise
            self.expect(error, text)
        else:  # compiled by another thread, or by this one in a step before
            self.check(got, "fresh", constant, size)
        finally:
            self.stress.asks.text = None

    def expect(self, error: Exception, text: str) -> None:
        if text not in [str(cause) for cause in causes(error) if isinstance(cause, Injected)]:
            raise error
        with self.stress.lock:
            self.stress.injected += 1


# --- the run


CODE = (FunctionType, BuiltinFunctionType, MethodType, CodeType, type)
State = dict[tuple[str, str], Any]


def torch_state() -> State:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reading an attribute that torch deprecates warns
        return snapshot()


def still_patched(before: State, installed: State, after: State) -> list[str]:
    """Return what the installation changed and is not as before, and functions and classes that are others.

    The rest is torch's own: counters, and what it fills at need.
    """
    patched = set(changes(before, installed)) - {COUNTER}
    code = {".".join(name) for name, value in before.items() if isinstance(value, CODE)}
    return [name for name in changes(before, after) if name in patched | code]


def resident_mib() -> int | None:
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * 4096 >> 20 if statm.exists() else None


def watch_memory(seconds: float, done: threading.Event) -> list[int | None]:
    """Return the resident memory at the beginning and at each tenth of the run."""
    memory = [resident_mib()]
    while not done.wait(seconds / 10):
        memory.append(resident_mib())
    return memory


def main(how: str, seconds: float, seed: int) -> None:
    def plain_compile(function: Any, **options: Any) -> Any:
        return torch.compile(function, **options)

    want = references()
    before = torch_state()
    if how == "stock":
        stress = Stress([plain_compile], None, seed, want)
    else:
        safecompile.install(strict=True)
        stress = Stress([safecompile.thread_safe_compile, plain_compile], safecompile.reset, seed, want)
    installed = torch_state()

    done = threading.Event()
    memory: list[int | None] = []
    watch = threading.Thread(target=lambda: memory.extend(watch_memory(seconds, done)), daemon=True)
    watch.start()
    stress.end = time.monotonic() + seconds
    with switch_interval(1e-6):
        outcomes = gather_threads(stress.work, THREADS, timeout=seconds + GRACE)
    done.set()
    watch.join()
    stress.errors += [repr(outcome) for outcome in outcomes if outcome is not None]

    safecompile.uninstall()  # nothing is installed with `stock`
    summary = {
        "seed": seed,
        "operations": stress.operations,
        "injected": stress.injected,
        "wrong": stress.wrong,
        "errors": stress.errors,
        "left patched": still_patched(before, installed, torch_state()),
        "slowest": stress.slowest,
        "memory in MiB": memory,
    }
    print(json.dumps(summary))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
