"""CUDA graphs: which calls replay them, what belongs to a thread, and on a GPU that no result is another thread's."""

from __future__ import annotations

import _thread
import functools
import gc
import importlib.util
import inspect
import pickle
import re
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import torch

import safecompile
from safecompile import thread_safe_compile, warmup
from safecompile._core.turns import Turns
from safecompile._patches import cuda_graphs, patches
from safecompile.testing import max_compiles, no_compiles
from tests.helpers.subprocess_run import ROOT, run_isolated
from tests.helpers.threads import run_threads
from tests.helpers.torch_version import TORCH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of Inductor on a GPU, and of graphs that are recorded anew
]


def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cuda_graphs_benchmark", ROOT / "benchmarks/cuda_graphs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it
    spec.loader.exec_module(module)
    return module


# -------------------------------------------------------------------------------------- what belongs to a thread (CPU)


@pytest.mark.parametrize(
    ("how", "left"), [("cuda_graphs.import_trees()", False), ("from torch._inductor import cudagraph_trees", True)]
)
def test_nothing_is_left_with_the_thread_that_is_the_first_to_import_the_trees(how: str, left: bool) -> None:
    """Control: torch 2.11 frees once too often what its import leaves; with newer torch, too, the end of the process may abort."""
    program = f"""
    import threading
    import torch
    from safecompile._patches import cuda_graphs

    def first():
        {how}
        print(torch._C._is_key_in_tls("tree_manager_containers"))

    thread = threading.Thread(target=first)
    thread.start()
    thread.join()
    """
    result = run_isolated(program)
    assert result.stdout == f"{left}\n"
    if not left:
        result.check()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /proc")
def test_the_end_of_the_process_waits_for_the_last_of_threads_that_python_has_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited, numbers = threading.Event(), SimpleQueue[int]()

    def last() -> None:  # Python knows nothing of it
        numbers.put(threading.get_native_id())
        waited.wait()

    _thread.start_new_thread(last, ())
    monkeypatch.setattr(cuda_graphs, "_stashed", {numbers.get(), threading.get_native_id()})
    monkeypatch.setattr(cuda_graphs, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: waited.set()))
    cuda_graphs._wait_for_the_end_of_threads()
    assert waited.is_set()


@pytest.fixture
def nobody_has_left() -> Iterator[None]:
    gc.collect()
    cuda_graphs._left.clear()
    yield
    gc.collect()
    cuda_graphs._left.clear()


def in_a_thread(work: Callable[[], T]) -> T:
    """Run in a thread, and return when it has left what it had: that is after it can be joined."""
    before = 0

    def counted() -> T:
        nonlocal before
        result = work()
        before = len(cuda_graphs._left)  # without what it may have taken over
        return result

    (result,) = run_threads([counted])
    deadline = time.monotonic() + 30
    while len(cuda_graphs._left) == before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(cuda_graphs._left) > before
    return result


class Node:
    """The end of a path through a tree of graphs."""

    def __init__(self, dead: bool) -> None:
        self.dead = dead

    def all_outputs_are_dead(self) -> bool:
        return self.dead


class Manager:
    def __init__(self, node: Node | None = None) -> None:
        self.current_node = node
        self.backwards = 0

    def set_to_running_backward(self) -> None:
        self.backwards += 1


class Container:
    def __init__(self, manager: Manager | None) -> None:
        self.tree_manager = manager


@pytest.mark.usefixtures("nobody_has_left")
def test_each_thread_has_its_own_and_one_that_has_ended_leaves_it_to_the_next() -> None:
    mine = cuda_graphs.calling_thread()
    first = in_a_thread(cuda_graphs.calling_thread)
    assert first is not mine and cuda_graphs.calling_thread() is mine
    assert in_a_thread(cuda_graphs.calling_thread) is first


@pytest.mark.usefixtures("nobody_has_left")
def test_it_is_not_left_to_another_thread_while_outputs_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    node = Node(dead=False)

    def record() -> Any:
        here = cuda_graphs.calling_thread()
        here.tree_manager_containers[3] = Container(Manager(node))
        return here

    first = in_a_thread(record)
    second = in_a_thread(cuda_graphs.calling_thread)
    assert second is not first and waited == []
    node.dead = True
    together = threading.Barrier(2)

    def take() -> Any:
        here = cuda_graphs.calling_thread()
        together.wait(60)
        return here

    assert {*run_threads([take] * 2)} == {first, second} and waited == [3]


@pytest.mark.usefixtures("nobody_has_left")
def test_a_thread_takes_over_what_the_last_one_has_left() -> None:
    """It is most likely to call what that one has called: else each of those who have left would record it first."""
    older, last = cuda_graphs._Thread(), cuda_graphs._Thread()
    cuda_graphs._left.extend([older, last])
    for _ in range(3):
        assert in_a_thread(cuda_graphs.calling_thread) is last


@pytest.mark.usefixtures("nobody_has_left")
def test_a_call_of_another_thread_ends_no_step_of_mine() -> None:
    """Control: torch counts the calls of all threads together, and would let them overwrite this thread's outputs."""
    from torch._dynamo.mutation_guard import GenerationTracker

    compiled = thread_safe_compile(torch.sin, backend="eager")
    x = torch.ones(2)
    compiled(x)
    (point,) = (one for one in patches.points if one.name == "cuda-graphs")
    point.install()  # where torch is made for a CPU, too
    try:
        mine, of_torch = cuda_graphs.calling_thread().generation, GenerationTracker.generation
        run_threads([lambda: compiled(x)])
        assert GenerationTracker.generation > of_torch
        assert cuda_graphs.calling_thread().generation == mine
        compiled(x)
        assert cuda_graphs.calling_thread().generation == mine + 1
        from torch._inductor import cudagraph_trees

        run_threads([torch.compiler.cudagraph_mark_step_begin])
        assert not cudagraph_trees.CUDAGraphTreeManager.user_invoked_mark_step()
        torch.compiler.cudagraph_mark_step_begin()
        assert cudagraph_trees.CUDAGraphTreeManager.get_curr_generation() == -1
    finally:
        vars(cuda_graphs.calling_thread())["mark_step_counter"] = 0
        point.restore()


def test_a_step_marked_before_the_patches_are_installed_counts() -> None:
    """They are installed by the first call, and a step is marked before it: each call would be a step by itself."""
    from torch._inductor import cudagraph_trees

    (point,) = (one for one in patches.points if one.name == "cuda-graphs")
    of_torch = cudagraph_trees.MarkStepBox

    def generations() -> list[int]:
        return [cudagraph_trees.CUDAGraphTreeManager.get_curr_generation() for _ in range(2)]

    torch.compiler.cudagraph_mark_step_begin()
    point.install()
    try:
        assert run_threads([generations]) == [[of_torch.mark_step_counter] * 2] == [[-1, -1]]
    finally:
        point.restore()
        of_torch.mark_step_counter = 0


def test_a_replay_on_another_stream_waits_for_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[int, int, int]] = []
    whole: list[int] = []
    external, capturing = 4096, 9

    class Stream:
        def __init__(self, device: int, number: int) -> None:
            self.device, self.stream_id = device, number

        def wait_stream(self, other: Stream) -> None:
            waits.append((self.device, self.stream_id, other.stream_id))

    current = {0: 0, 1: 0}
    monkeypatch.setattr(cuda_graphs, "_number_of_stream", lambda device: current[device])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(device, current[device]))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[0] == capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", whole.append)
    here = cuda_graphs._Thread()
    used = [
        (0, 0),
        (0, 7),
        (1, 3),
        (0, capturing),
        (0, 7),
        (0, 0),
        (1, 3),
        (1, external),
        (1, external),
        (1, 5),
        (1, 3),
    ]
    for device, number in used:
        current[device] = number
        here.follow(device)
    assert waits == [(0, 7, 0), (0, 0, 7), (1, external, 3), (1, 3, 5)]
    assert whole == [1]  # instead of a wait for a stream that its maker may have destroyed


@pytest.mark.usefixtures("nobody_has_left")
def test_what_was_recorded_is_not_replayed_after_an_uninstallation(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch alone frees the cuBLAS workspaces that the graphs use. Graphs stay that somebody has an output of."""
    (point,) = (one for one in patches.points if one.name == "cuda-graphs")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    node = Node(dead=False)

    def record(node: Node | None) -> Any:
        here = cuda_graphs.calling_thread()
        here.tree_manager_containers[0] = Container(Manager(node))
        return here

    mine, used, unused = record(None), in_a_thread(lambda: record(node)), in_a_thread(lambda: record(None))
    point.install()
    try:
        assert cuda_graphs.calling_thread() is mine
    finally:
        point.restore()
    assert used.tree_manager_containers and not unused.tree_manager_containers
    assert cuda_graphs.calling_thread() not in (mine, used, unused)
    other = in_a_thread(cuda_graphs.calling_thread)
    assert other not in (mine, used, unused)
    assert used.tree_manager_containers and not mine.tree_manager_containers
    node.dead = True
    together = threading.Barrier(2)

    def begin() -> None:
        cuda_graphs.calling_thread()
        together.wait(60)

    run_threads([begin] * 2)  # one of them finds what `other` has left, and one looks further
    assert not used.tree_manager_containers


@pytest.mark.usefixtures("other_thread", "nobody_has_left")
def test_a_backward_is_looked_up_in_inductors_cache(
    generator: Generator, installed_point: list[tuple[str, int, Any]]
) -> None:
    """It is hashed with what its forward has left in the box; what cannot be pickled is compiled anew in each process."""
    from torch._inductor.cudagraph_utils import BoxedDeviceIndex

    boxes = [BoxedDeviceIndex(None) for _ in range(2)]
    for box in boxes:
        post_compiled(Code(generator), box, backward=False)
    assert vars(boxes[0]).keys() > {"value"}
    assert pickle.dumps(boxes[0]) == pickle.dumps(boxes[1])


def test_each_thread_has_a_copy_of_torchs_function_that_has_recorded_nothing() -> None:
    from torch._inductor import compile_fx

    options: Any = {"device_index": 0, "stack_traces": [], "is_backward": False, "is_inference": True}
    run: Any = compile_fx.cudagraphify(lambda inputs: inputs, **options)
    first, second = (cuda_graphs._with_graphs_of_its_own(run) for _ in range(2))
    found = [dict(zip(one.__code__.co_freevars, one.__closure__ or (), strict=True)) for one in (run, first, second)]
    differing = {name for name in found[0] if len({id(each[name].cell_contents) for each in found}) > 1}
    assert differing <= {"thread_local"}
    assert all(each["compiled_fn"].cell_contents is None for each in found if "compiled_fn" in each)
    cells = {name for name in found[0] if len({id(each[name]) for each in found}) > 1}
    assert cells and cells <= {"thread_local", "compiled_fn"}


def test_a_backend_whose_graphs_all_threads_would_share_is_refused() -> None:
    with pytest.raises(ValueError, match=r'use mode="reduce-overhead"'):
        thread_safe_compile(torch.sin, backend="cudagraphs")


def test_the_point_matches_this_torch() -> None:
    assert cuda_graphs.CudaGraphs(Turns(lambda: 60.0)).mismatch() is None


# -------------------------------------------------------------------------------------------- which calls replay (CPU)


class Generator:
    """Stands for a device's default generator."""

    offset = 0

    def initial_seed(self) -> int:
        return 1

    def get_offset(self) -> int:
        return self.offset


class Code:
    """Compiled code, and how often each thread ran it with and without graphs."""

    def __init__(self, generator: Generator, draws: bool = False) -> None:
        self.generator, self.draws = generator, draws
        self.ran: list[tuple[str, int]] = []

    def model(self, inputs: list[Any]) -> list[Any]:
        self.ran.append(("code", threading.get_ident()))
        self.generator.offset += 4 * self.draws
        return inputs

    def graphs(self, here: Any) -> Callable[[list[Any]], list[Any]]:
        def run(inputs: list[Any]) -> list[Any]:
            assert cuda_graphs.calling_thread() is here
            self.ran.append(("graph", threading.get_ident()))
            return inputs

        return run

    def how(self) -> list[str]:
        """Return how it has run since it was last asked."""
        ran, self.ran = [how for how, _ in self.ran], []
        return ran


class Model:
    """A forward and a backward as they are compiled, with a tree manager where their graphs are recorded."""

    def __init__(self, generator: Generator, *, draws: bool = False) -> None:
        self.forward, self.backward = Code(generator, draws), Code(generator)
        pair, turns = cuda_graphs._Pair(), Turns(lambda: 60.0)
        self.parts = [
            cuda_graphs._Graphs(code.graphs, (code.model, (), set()), 0, pair, turns, backward=code is self.backward)
            for code in (self.forward, self.backward)
        ]

    def call(self) -> None:
        self.parts[0].run([1])

    def call_backward(self) -> None:
        self.parts[1].run([1])

    def step(self) -> None:
        self.call()
        self.call_backward()

    def how(self) -> tuple[list[str], list[str]]:
        return self.forward.how(), self.backward.how()


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> Generator:
    generator = Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    monkeypatch.setattr(cuda_graphs, "_number_of_stream", lambda device: None)
    return generator


@pytest.fixture
def other_thread() -> Iterator[None]:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    yield
    over.set()
    thread.join()


@pytest.mark.usefixtures("other_thread")
def test_code_that_draws_nothing_runs_as_it_is_once_and_then_with_each_threads_graphs(generator: Generator) -> None:
    model = Model(generator)
    model.step()
    assert model.how() == (["code"], ["code"])
    model.step()
    model.step()
    assert model.how() == (["graph"] * 2, ["graph"] * 2)
    run_threads([model.step] * 3)
    assert model.how() == (["graph"] * 3, ["graph"] * 3)


@pytest.mark.usefixtures("other_thread")
def test_code_that_draws_runs_without_graphs_among_threads_and_so_does_its_backward(generator: Generator) -> None:
    model = Model(generator, draws=True)
    for _ in range(3):
        model.step()
    assert model.how() == (["code"] * 3, ["code"] * 3)


def test_code_that_draws_runs_with_graphs_in_a_process_of_one_thread(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = False
    monkeypatch.setattr(cuda_graphs, "alone", lambda: not others)
    model = Model(generator, draws=True)
    for _ in range(3):
        model.step()
    assert model.how() == (["code", "graph", "graph"], ["code", "graph", "graph"])
    others = True
    model.step()
    assert model.how() == (["code"], ["code"])


def test_numbers_that_another_thread_draws_meanwhile_only_delay_the_graphs(generator: Generator) -> None:
    model = Model(generator, draws=True)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(model.call).result()
        assert model.how() == (["code"], [])
        model.forward.draws = False  # it was another thread
        pool.submit(model.call).result()
        pool.submit(model.call).result()
    assert model.how() == (["code", "graph"], [])


@pytest.mark.usefixtures("other_thread")
def test_a_backward_in_another_thread_than_its_forwards_runs_without_graphs(generator: Generator) -> None:
    model = Model(generator)
    for _ in range(2):
        model.step()
    model.how()
    run_threads([model.call_backward])
    assert model.how() == ([], ["code"])
    model.step()
    assert model.how() == (["graph"], ["graph"])


@pytest.mark.usefixtures("other_thread")
def test_a_backward_without_graphs_tells_the_forward_of_its_own_thread(generator: Generator) -> None:
    model = Model(generator)
    model.backward.draws = True
    managers = {}

    def steps() -> None:
        manager = managers[threading.get_ident()] = Manager()
        cuda_graphs.calling_thread().tree_manager_containers[0] = Container(manager)
        for _ in range(3):
            model.step()

    try:
        steps()
        in_a_thread(steps)
    finally:
        cuda_graphs.calling_thread().tree_manager_containers.clear()
        cuda_graphs._left.clear()
    assert model.how() == (["code"] + ["graph"] * 5, ["code"] * 6)
    assert [manager.backwards for manager in managers.values()] == [2, 3]


@pytest.mark.usefixtures("other_thread")
def test_on_a_torch_that_nobody_measured_one_thread_has_graphs_and_the_others_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.12.0")
    monkeypatch.setattr(cuda_graphs, "MEASURED", ("2.11.",))
    point = cuda_graphs.CudaGraphs(Turns(lambda: 60.0))
    assert point._may_have_graphs(cuda_graphs.calling_thread())
    with pytest.warns(RuntimeWarning, match="nobody has measured CUDA graphs of several threads on torch 2.12.0"):
        assert run_threads([lambda: point._may_have_graphs(cuda_graphs.calling_thread())]) == [False]
    assert point._may_have_graphs(cuda_graphs.calling_thread())
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    measured = cuda_graphs.CudaGraphs(Turns(lambda: 60.0))
    assert measured._may_have_graphs(cuda_graphs.calling_thread())
    assert run_threads([lambda: measured._may_have_graphs(cuda_graphs.calling_thread())]) == [True]


def test_a_warm_up_calls_until_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [3]
    monkeypatch.setattr("safecompile._warmup.recordings", lambda: -left[0])

    def call(x: torch.Tensor) -> torch.Tensor:
        left[0] = max(0, left[0] - 1)
        calls.append(1)
        return x

    calls: list[int] = []
    warmup(call, (torch.ones(2),))
    assert len(calls) == 4
    calls.clear()
    warmup(call, (torch.ones(2),))
    assert len(calls) == 1


def post_compiled(code: Code, box: Any, *, backward: bool, graphs: bool = True) -> Callable[[list[Any]], Any]:
    """Do with compiled code what torch does with it on a GPU."""
    from torch._inductor import output_code
    from torch._inductor.utils import BoxedBool

    reasons = [] if graphs else ["an operator that cannot be recorded"]
    graph: Any = SimpleNamespace(
        current_callable=code.model,
        cudagraph_info=SimpleNamespace(cudagraph_fail_reasons=reasons, placeholders=(), stack_traces=[]),
        fx_kwargs={"is_inference": False, "is_backward": backward, "static_input_idxs": ()},
        device_idxs={0},
        device_types=set(),
        mutated_input_idxs=(),
        inputs_to_check=(),
        boxed_forward_device_index=box,
        kernel_free_cudagraph=False,  # which newer torch asks for
    )
    given: dict[str, Any] = {
        "example_inputs": [],
        "compiled_graph": graph,
        "cudagraphs": BoxedBool(True),
        "constants": {},
        "boxed_forward_device_index": box,
    }
    wanted = inspect.signature(output_code.cudagraph_post_compile).parameters
    output_code.cudagraph_post_compile(*(given[name] for name in wanted))
    run: Callable[[list[Any]], Any] = graph.current_callable
    return run


@pytest.fixture
def installed_point(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The point as it is on a GPU that was measured; torch's recordings are noted, and made by nobody."""
    from torch._inductor import cudagraph_trees

    def recorded(model: Any, inputs: list[Any], *args: Any, **kwargs: Any) -> Callable[[list[Any]], Any]:
        here = cudagraph_trees.get_container(kwargs["device_index"])
        name = "backward" if kwargs["is_backward"] else "forward"
        return lambda inputs: runs.append((name, threading.get_ident(), here))

    runs: list[tuple[str, int, Any]] = []
    monkeypatch.setattr(cudagraph_trees, "cudagraphify_impl", recorded)
    safecompile.install()
    (point,) = (one for one in patches.points if one.name == "cuda-graphs")
    monkeypatch.setattr(point, "each_thread", True)
    point.install()
    yield runs
    point.restore()
    cuda_graphs.calling_thread().tree_manager_containers.clear()


@pytest.mark.usefixtures("other_thread", "nobody_has_left")
def test_what_torch_compiles_for_a_gpu_is_run_with_each_threads_graphs(
    generator: Generator, installed_point: list[tuple[str, int, Any]]
) -> None:
    from torch._inductor.cudagraph_utils import BoxedDeviceIndex

    box = BoxedDeviceIndex(None)
    codes = Code(generator), Code(generator)
    forward = post_compiled(codes[0], box, backward=False)
    backward = post_compiled(codes[1], box, backward=True)

    def steps() -> None:
        for _ in range(2):
            forward([])
            backward([])

    steps()
    in_a_thread(steps)
    mine, other = threading.get_ident(), {ident for _, ident, _ in installed_point} - {threading.get_ident()}
    assert codes[0].how() == codes[1].how() == ["code"]
    assert [(name, ident in other) for name, ident, _ in installed_point] == [
        ("forward", False), ("backward", False), ("forward", True), ("backward", True), ("forward", True), ("backward", True)
    ]  # fmt: skip
    containers = {
        ident: {id(container) for _, one, container in installed_point if one == ident} for ident in (mine, *other)
    }
    assert all(len(each) == 1 for each in containers.values()) and len(set.union(*containers.values())) == 2


@pytest.mark.usefixtures("other_thread", "nobody_has_left", "installed_point")
def test_a_backward_that_cannot_be_recorded_tells_the_forward_of_the_thread_that_runs_it(generator: Generator) -> None:
    """Torch asks for the manager of the thread that compiles it, and fails where that has recorded nothing yet."""
    from torch._inductor.cudagraph_utils import BoxedDeviceIndex

    box = BoxedDeviceIndex(None)
    post_compiled(Code(generator), box, backward=False)
    backward = post_compiled(Code(generator), box, backward=True, graphs=False)

    def run() -> int:
        manager = Manager()
        cuda_graphs.calling_thread().tree_manager_containers[0] = Container(manager)
        backward([])
        cuda_graphs.calling_thread().tree_manager_containers.clear()
        return manager.backwards

    assert [run(), in_a_thread(run)] == [1, 1]


# ------------------------------------------------------------------------------------------------------------- on a GPU

on_gpu = functools.partial(run_threads, timeout=180.0)  # a first compile there takes long


@pytest.fixture
def each_thread_has_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    (point,) = (one for one in patches.points if isinstance(one, cuda_graphs.CudaGraphs))
    monkeypatch.setattr(point, "each_thread", True)


def measured(test: Any) -> Any:
    """Test what each thread's graphs give on the one torch for which they were made."""
    mark = pytest.mark.skipif(TORCH[:2] != (2, 11), reason="graphs of each thread were made for torch 2.11")
    return mark(pytest.mark.usefixtures("each_thread_has_graphs")(test))


@pytest.mark.gpu
@pytest.mark.hang_timeout(300)
@measured
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize(("threads", "streams"), [(2, "own"), (4, "default"), (8, "own"), (8, "new"), (40, "own")])
def test_no_result_is_wrong_and_no_call_fails(threads: int, streams: str, training: bool) -> None:
    bench = benchmark()
    case = bench.Case(True, threads, 200, training, streams == "own", streams == "new")
    result = bench.in_a_process(case)
    assert (result["calls"], result["wrong"], result["errors"]) == (200 * threads, 0, {}), result["first_error"]
    assert result["replays"] > 0.9 * 200 * threads * (1 + training)


@pytest.mark.gpu
@pytest.mark.hang_timeout(300)
@pytest.mark.skipif(torch.__version__.startswith(cuda_graphs.MEASURED), reason="on this torch each thread has graphs")
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
def test_where_it_was_not_measured_one_thread_has_graphs_and_no_result_is_wrong(training: bool) -> None:
    bench = benchmark()
    result = bench.in_a_process(bench.Case(True, 4, 200, training, each_thread=False))
    assert (result["calls"], result["wrong"], result["errors"]) == (800, 0, {}), result["first_error"]
    assert 0.9 * 200 * (1 + training) < result["replays"] <= 200 * (1 + training)


@pytest.mark.gpu
@pytest.mark.hang_timeout(300)
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
def test_control_with_torch_alone_results_are_wrong_or_calls_fail(training: bool) -> None:
    bench = benchmark()
    result = bench.in_a_process(bench.Case(False, 4, 200, training, main_first=True))
    assert result["wrong"] or result["errors"]


@pytest.mark.gpu
@pytest.mark.hang_timeout(300)
@measured
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
def test_outputs_of_one_part_live_until_the_next_parts_after_a_graph_break_have_run(training: bool) -> None:
    bench = benchmark()
    result = bench.in_a_process(bench.Case(True, 4, 200, training, breaks=True))
    assert (result["calls"], result["wrong"], result["errors"]) == (800, 0, {}), result["first_error"]
    assert result["replays"] > 0.9 * 3 * 800


@pytest.mark.gpu
@pytest.mark.hang_timeout(300)
@measured
@pytest.mark.parametrize("beside", ["synchronize", "empty_cache", "matmul"])
def test_what_another_thread_does_on_the_device_disturbs_no_recording(beside: str) -> None:
    bench = benchmark()
    result = bench.in_a_process(replace(bench.Case(True, 4, 200, True), beside=beside))
    assert (result["calls"], result["wrong"], result["errors"]) == (800, 0, {}), result["first_error"]


def layers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.sin(torch.relu(x @ w) @ w) + x


def tensors(number: int, *, grad: bool = False, device: str = "cuda") -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(number)
    x = torch.randn(64, 64, device=device, generator=generator)
    return x, (torch.randn(64, 64, device=device, generator=generator) / 8).requires_grad_(grad)


STREAMS_IN_TURN = """
import torch
from safecompile import thread_safe_compile
from safecompile._patches import cuda_graphs
{control}

def function(x, w):
    for _ in range(20):
        x = x @ w
    return x

call = thread_safe_compile(function, mode="reduce-overhead")
w = torch.linalg.qr(torch.randn(1024, 1024, device="cuda")).Q
inputs = [torch.randn(1024, 1024, device="cuda") for _ in range(32)]
wants = [function(x, w) for x in inputs]
streams = [torch.cuda.Stream() for _ in range(2)]
torch.cuda.synchronize()
with torch.cuda.stream(streams[0]):
    for x in inputs[:4]:
        call(x, w)
torch.cuda.synchronize()
outputs = []
for n, x in enumerate(inputs):
    with torch.cuda.stream(streams[n % 2]):
        outputs.append(call(x, w).clone())
torch.cuda.synchronize()
print(all(torch.allclose(output, want, atol=1e-2) for output, want in zip(outputs, wants)))
"""


DESTROYED_STREAMS = """
import ctypes
import torch
from safecompile import thread_safe_compile

driver = ctypes.CDLL("libcuda.so.1")
call = thread_safe_compile(lambda x, w: torch.sin(x @ w) @ w, mode="reduce-overhead")
x, w = (torch.randn(256, 256, device="cuda") / 16 for _ in range(2))
want = torch.sin(x @ w) @ w
torch.cuda.synchronize()
right = []
for _ in range(20):
    made = ctypes.c_void_p()
    assert driver.cuStreamCreate(ctypes.byref(made), 1) == 0
    with torch.cuda.stream(torch.cuda.ExternalStream(made.value)):
        right += [torch.allclose(call(x, w), want, atol=1e-3) for _ in range(3)]
        torch.cuda.current_stream().synchronize()
    assert driver.cuStreamDestroy_v2(made) == 0
    right.append(torch.allclose(call(x, w), want, atol=1e-3))
print(all(right))
"""


@pytest.mark.gpu
@pytest.mark.hang_timeout(300)
@measured
def test_a_stream_that_is_not_torchs_may_be_destroyed_between_calls() -> None:
    assert run_isolated(DESTROYED_STREAMS).check().stdout == "True\n"


@pytest.mark.gpu
@pytest.mark.hang_timeout(300)
@measured
@pytest.mark.parametrize(
    ("control", "right"),
    [("", True), ("cuda_graphs._Thread.follow = lambda *_: None", False)],
    ids=["library", "control"],
)
def test_a_thread_may_change_its_stream_between_calls(control: str, right: bool) -> None:
    """Control: the next replay begins on the other stream while the one before still runs, in the same memory."""
    assert run_isolated(STREAMS_IN_TURN.format(control=control)).check().stdout == f"{right}\n"


@pytest.mark.gpu
@pytest.mark.hang_timeout(300)
@measured
def test_outputs_outlive_the_thread_that_has_computed_them() -> None:
    call = thread_safe_compile(layers, mode="reduce-overhead")
    outputs = {}

    def compute(number: int) -> None:
        x, w = tensors(number)
        for _ in range(5):
            outputs[number] = call(x, w)

    for number in range(6):  # one after the other: each could take over what the one before has left
        on_gpu([functools.partial(compute, number)])
    torch.randn(1 << 22, device="cuda")
    for number, output in outputs.items():
        torch.testing.assert_close(output, layers(*tensors(number)), atol=1e-3, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.hang_timeout(300)
@measured
def test_a_thread_takes_over_the_graphs_of_one_that_has_ended() -> None:
    call = thread_safe_compile(layers, mode="reduce-overhead")
    x, w = tensors(0)
    want = layers(x, w)

    def compute() -> int:
        before = cuda_graphs.calling_thread().recordings  # of those before it, too
        for _ in range(5):
            torch.testing.assert_close(call(x, w), want, atol=1e-3, rtol=1e-3)
        return cuda_graphs.recordings() - before

    assert [in_a_thread(compute) for _ in range(4)] == [3, 0, 0, 0]


@pytest.mark.gpu
@pytest.mark.hang_timeout(300)
@measured
def test_a_reset_by_one_thread_leaves_the_graphs_of_others_usable() -> None:
    """Control: torch then says that no tensors are cached, and its next look at one of another thread's is an internal error."""
    call = thread_safe_compile(layers, mode="reduce-overhead")
    x, w = tensors(0)
    want = layers(x, w)
    reset, done = threading.Event(), threading.Event()

    def compute() -> None:
        for _ in range(5):
            torch.testing.assert_close(call(x, w), want, atol=1e-3, rtol=1e-3)
        done.set()
        assert reset.wait(120)
        for _ in range(5):
            torch.testing.assert_close(call(x, w), want, atol=1e-3, rtol=1e-3)

    def restart() -> None:
        call(x, w)
        assert done.wait(120)
        torch._dynamo.reset()
        reset.set()

    on_gpu([compute, restart])


@pytest.mark.gpu
@pytest.mark.hang_timeout(300)
@measured
def test_cold_backwards_on_autograds_threads_end_and_are_compiled_once() -> None:
    call = thread_safe_compile(layers, mode="reduce-overhead")
    together = threading.Barrier(4)

    def train(number: int) -> None:
        x, w = tensors(number, grad=True)
        (want,) = torch.autograd.grad(layers(x, w).square().sum(), w)
        together.wait(60)
        for _ in range(20):
            (got,) = torch.autograd.grad(call(x, w).square().sum(), w)
            torch.testing.assert_close(got, want, atol=1e-2, rtol=1e-2)

    with max_compiles(2) as limit:
        on_gpu(train, 4)
    assert Counter(one.kind for one in limit.compiles) == {"forward": 1, "backward": 1}


@pytest.mark.gpu
@pytest.mark.hang_timeout(300)
@measured
def test_what_a_forward_has_saved_is_there_after_the_calls_and_backwards_of_others() -> None:
    call = thread_safe_compile(layers, mode="reduce-overhead")
    x, w = tensors(0, grad=True)
    (want,) = torch.autograd.grad(layers(x, w).square().sum(), w)

    def others(number: int) -> None:
        a, b = tensors(1 + number, grad=True)
        for _ in range(6):
            torch.autograd.grad(call(a, b).sum(), b)

    for _ in range(5):
        loss = call(x, w).square().sum()
        on_gpu(others, 2)
        (got,) = torch.autograd.grad(loss, w)
        torch.testing.assert_close(got, want, atol=1e-2, rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.hang_timeout(300)
@measured
def test_a_backward_in_another_thread_gives_the_right_gradients() -> None:
    call = thread_safe_compile(layers, mode="reduce-overhead")

    def forward(number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, w = tensors(number, grad=True)
        return call(x, w).square().sum(), w, torch.autograd.grad(layers(x, w).square().sum(), w)[0]

    with ThreadPoolExecutor(2) as pool:
        for _ in range(6):
            for loss, w, want in list(pool.map(forward, range(4))):
                torch.testing.assert_close(torch.autograd.grad(loss, w)[0], want, atol=1e-2, rtol=1e-2)


REPEATED = 200


def repeated_draws(call: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """Return how many calls of four threads gave numbers that another call has given, or raise what a call raises."""
    x = torch.zeros(256, device="cuda")
    together = threading.Barrier(4)

    def draw() -> list[torch.Tensor]:
        with torch.cuda.stream(torch.cuda.Stream()):
            together.wait(60)
            rows = [call(x)[:8].clone() for _ in range(REPEATED)]
            torch.cuda.current_stream().synchronize()
        return rows

    rows = [tuple(row.tolist()) for rows in on_gpu([draw] * 4) for row in rows]
    return len(rows) - len(set(rows))


def noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


@pytest.mark.gpu
@pytest.mark.hang_timeout(300)
@measured
def test_no_random_number_is_drawn_twice() -> None:
    assert repeated_draws(thread_safe_compile(noise, mode="reduce-overhead")) == 0


@pytest.mark.gpu
@pytest.mark.hang_timeout(300)
@measured
def test_control_with_torch_alone_threads_get_the_same_random_numbers_or_fail() -> None:
    """In a process of its own: a recording that fails can leave memory behind which aborts the process when it is freed."""
    result = run_isolated(
        """
        import torch
        from tests.helpers.threads import WorkersFailedError
        from tests.test_cuda_graphs import noise, repeated_draws

        call = torch.compile(noise, mode="reduce-overhead")
        for _ in range(4):
            call(torch.zeros(256, device="cuda"))
        print("recorded", flush=True)
        try:
            print(repeated_draws(call), "repeated")
        except WorkersFailedError:
            print("failed")
        """,
        timeout=240,
    )
    assert not result.hung
    assert re.match(r"recorded\n(failed|[1-9]\d* repeated)?\n?$", result.stdout), result.stderr
    assert result.rc < 0 or result.stdout != "recorded\n"


@pytest.mark.gpu
@pytest.mark.hang_timeout(300)
@measured
def test_a_forward_with_dropout_and_its_backward_agree() -> None:
    def dropped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x @ w, 0.5)

    call = thread_safe_compile(dropped, mode="reduce-overhead")

    def train(number: int) -> None:
        x, w = tensors(number, grad=True)
        for _ in range(50):
            output = call(x, w)
            (got,) = torch.autograd.grad(output.sum(), w)
            want = x.t() @ (output.detach() != 0).to(x.dtype) * 2
            torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)

    on_gpu(train, 4)


@pytest.mark.gpu
@pytest.mark.hang_timeout(300)
@measured
@pytest.mark.parametrize("backward", [False, True])
def test_a_warm_up_records_the_graphs_of_every_worker(backward: bool) -> None:
    call = thread_safe_compile(layers, mode="reduce-overhead")

    def serve(number: int) -> int:
        x, w = tensors(number, grad=backward)
        before = cuda_graphs.recordings()
        output = call(x, w)
        torch.testing.assert_close(output, layers(x, w), atol=1e-3, rtol=1e-3)
        if backward:
            torch.autograd.grad(output.sum(), w)
        return cuda_graphs.recordings() - before

    with ThreadPoolExecutor(4) as pool:
        warmup(call, tensors(0, grad=backward), backward=backward, executor=pool)
        with no_compiles():
            assert list(pool.map(serve, range(16))) == [0] * 16


@pytest.mark.gpu
@pytest.mark.hang_timeout(300)
@measured
def test_a_step_marked_by_one_thread_leaves_the_outputs_of_others() -> None:
    call = thread_safe_compile(layers, mode="reduce-overhead")
    x, w = tensors(0)
    want = layers(layers(x, w), w)

    def steps() -> None:
        for _ in range(50):
            torch.compiler.cudagraph_mark_step_begin()
            torch.testing.assert_close(call(call(x, w), w), want, atol=1e-3, rtol=1e-3)

    on_gpu([steps] * 3)


@pytest.mark.gpu
@pytest.mark.hang_timeout(300)
@measured
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_thread_for_each_device_records_its_own_graphs() -> None:
    call = thread_safe_compile(layers, mode="reduce-overhead")

    def train(index: int) -> None:
        with torch.cuda.device(index):
            x, w = tensors(index, grad=True, device=f"cuda:{index}")
            (want,) = torch.autograd.grad(layers(x, w).square().sum(), w)
            for _ in range(20):
                (got,) = torch.autograd.grad(call(x, w).square().sum(), w)
                torch.testing.assert_close(got, want, atol=1e-2, rtol=1e-2)

    on_gpu(train, 2)


@pytest.mark.gpu
def test_the_patch_is_installed_on_this_torch() -> None:
    safecompile.install(strict=True)
    assert {"capture-streams", "cuda-graphs", "first-launches"} <= {
        point.name for point in patches.points if point.active
    }
