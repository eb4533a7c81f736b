"""CUDA graphs (``mode="reduce-overhead"``, ``"max-autotune"``): each thread records and replays its own."""

from __future__ import annotations

import atexit
import ctypes
import inspect
import sys
import threading
import time
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CellType, FunctionType
from typing import Any, cast

import torch
from torch.utils._ordered_set import OrderedSet

from safecompile._core.turns import Turns
from safecompile._patches.company import alone
from safecompile._patches.point import PatchPoint
from safecompile._patches.rewriting import codes_in

# Where benchmarks/cuda_graphs.py has counted no wrong result and no error: the beginnings of such versions, as "2.11.".
# Everywhere else only one thread replays graphs.
MEASURED: tuple[str, ...] = ("2.11.",)

_KEY = "safecompile_graphs"
_POST_COMPILES = ("cudagraph_post_compile", "cudagraph_partition_post_compile")
_SYNCHRONIZE = ("_cuda_synchronize", "_accelerator_synchronizeDevice")
_EMPTY_CACHE = ("_cuda_emptyCache", "_accelerator_emptyCache")


class CudaGraphs(PatchPoint):
    """Gives each thread graphs, buffers and a memory pool of its own, and lets recordings on a device take turns.

    What a thread has is kept where autograd passes it on: the backwards of all threads run in one thread for a device.
    """

    name = "cuda-graphs"
    protects = (
        "threads that replay one graph overwrite each other's buffers, and get wrong results in silence; a recording fails "
        "while other threads use the device (S8)"
    )
    upstream = "pytorch#123177, pytorch#184357; torch/_inductor/cudagraph_trees.py; compile_fx.py, cudagraphify"
    relies_on = (
        "torch._dynamo.eval_frame:install_generation_tagging_init",
        "torch._inductor.output_code:cudagraph_post_compile",
        *(
            f"torch._inductor.cudagraph_trees:{name}"
            for name in ("GenerationTracker", "MarkStepBox", "get_manager", "get_obj")
        ),
        "torch._inductor.cudagraph_trees:CUDAGraphTreeManager.set_to_running_backward",
    )

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns
        self._compiling = threading.local()
        self.each_thread = torch.__version__.startswith(MEASURED) and not torch.version.hip
        self._warned = False

    def needed(self) -> bool:
        return bool(torch.version.cuda or torch.version.hip)

    def mismatch(self) -> str | None:
        import_trees()
        from torch._inductor.compile_fx import cudagraphify

        codes = codes_in(cast("Any", inspect.unwrap(cudagraphify)).__code__)
        if not any(_OF_A_THREAD.keys() & {*code.co_freevars} for code in codes):
            return "torch's cudagraphify has no place for what a thread has recorded"
        return super().mismatch()

    def apply(self) -> None:
        from torch._dynamo import eval_frame
        from torch._inductor import compile_fx, cudagraph_trees, output_code

        self.wrap(compile_fx, "cudagraphify", self._cudagraphify)
        for name in _POST_COMPILES:
            if hasattr(output_code, name):
                self.wrap(output_code, name, self._post_compile)
        self.replace(cudagraph_trees, "get_obj", lambda _, name: vars(calling_thread())[name])
        # A reset by one thread says that no tensors are cached any more, and torch asserts it of those of others.
        self.replace(cudagraph_trees, "_set_cached_tensors_enabled", lambda _: None)
        self.wrap(cudagraph_trees, "get_manager", _get_manager)
        # A thread's call allows that its own earlier outputs are overwritten, and not those of others.
        self.wrap(eval_frame, "install_generation_tagging_init", _count_call)
        for owner, name in (("GenerationTracker", "generation"), ("MarkStepBox", "mark_step_counter")):
            self.replace(cudagraph_trees, owner, _PerThread(getattr(cudagraph_trees, owner), name))
        for name in ("run_eager", "record_function"):
            self.wrap(cudagraph_trees.CUDAGraphTreeManager, name, self._record)
        # Beside a recording these fail, and the recording with them.
        for names, wrapper in ((_SYNCHRONIZE, self._synchronize), (_EMPTY_CACHE, self._empty_cache)):
            for name in names:
                if hasattr(torch._C, name):
                    self.wrap(torch._C, name, wrapper)

    def restore(self) -> None:
        super().restore()
        vars(self).pop("_only", None)
        _forget()

    def after_fork(self) -> None:
        self._turns.clear()

    def _record(self, record: Callable[..., Any], manager: Any, args: Any, kwargs: Any) -> Any:
        with self._turns[manager.device_index]:
            calling_thread().recordings += 1
            return record(*args, **kwargs)

    def _synchronize(self, synchronize: Callable[..., None], _: Any, args: Any, kwargs: Any) -> None:
        with self._turns[args[0] if args else torch.cuda.current_device()]:
            synchronize(*args, **kwargs)

    def _empty_cache(self, empty: Callable[..., None], _: Any, args: Any, kwargs: Any) -> None:
        self._turns[torch.cuda.current_device()]  # so that there is one
        taken = self._turns.take_all()
        if taken:  # else another thread records, and may wait for the turn that this thread has
            empty(*args, **kwargs)
        for turn in taken:
            turn.release()

    def _post_compile(self, post_compile: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
        from torch._inductor.cudagraph_utils import BoxedDeviceIndex

        # A forward and its backward share one; older torch has it in the graph.
        given = ((one, getattr(one, "boxed_forward_device_index", None)) for one in (*args, *kwargs.values()))
        box: Any = next((one for pair in given for one in pair if isinstance(one, BoxedDeviceIndex)), _Pair())
        self._compiling.pair = vars(box).setdefault("safecompile_pair", _Pair())
        try:
            return post_compile(*args, **kwargs)
        finally:
            del self._compiling.pair

    def _cudagraphify(self, cudagraphify: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
        run, pair = cudagraphify(*args, **kwargs), getattr(self._compiling, "pair", None) or _Pair()

        def make(here: _Thread) -> Any:
            return _with_graphs_of_its_own(run) if self._may_have_graphs(here) else None

        static = args[1] if len(args) > 1 else kwargs.get("static_input_idxs", ())
        plain = args[0], static, OrderedSet(kwargs.get("mutated_input_idxs", ()))
        return _Graphs(make, plain, kwargs["device_index"], pair, self._turns, backward=kwargs["is_backward"]).run

    def _may_have_graphs(self, here: _Thread) -> bool:
        if self.each_thread or here is vars(self).setdefault("_only", here):
            return True
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"nobody has measured CUDA graphs of several threads on torch {torch.__version__}: all but the first thread "
                "run the compiled code without them. Results are right; the default mode does the same without this warning.",
                RuntimeWarning,
                stacklevel=2,
            )
        return False


def import_trees() -> None:
    """Import torch's trees, but leave nothing of theirs with a thread that ends: torch 2.11 and older free it once too often then."""
    stash = torch._C._stash_obj_in_tls
    if threading.current_thread() is not threading.main_thread():
        torch._C._stash_obj_in_tls = lambda *_: None
    try:
        from torch._inductor import cudagraph_trees  # noqa: F401
    finally:
        torch._C._stash_obj_in_tls = stash


# What torch's function that runs a part keeps of its recordings, in older and in newer torch.
_OF_A_THREAD: dict[str, Callable[[], Any]] = {"compiled_fn": lambda: None, "thread_local": threading.local}


def _with_graphs_of_its_own(run: FunctionType) -> FunctionType:
    """Copy torch's function, made with the settings of the compile, as it was before it has recorded anything."""
    names = zip(run.__code__.co_freevars, run.__closure__ or (), strict=True)
    cells = tuple(CellType(_OF_A_THREAD[name]()) if name in _OF_A_THREAD else cell for name, cell in names)
    return FunctionType(run.__code__, run.__globals__, run.__name__, run.__defaults__, cells)


_number_of_stream: Callable[[int], int | None] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: None)


class _Thread:
    """What a thread has, and takes over from one that has ended."""

    def __init__(self) -> None:
        # Torch's own, under its names.
        self.tree_manager_containers: dict[int, Any] = {}
        self.tree_manager_locks: dict[int, Any] = defaultdict(threading.Lock)
        self.generation = 0
        self.key = _KEY
        self.capture_streams: dict[int, torch.cuda.Stream] = {}
        """One for each device. As long as this lives, no other thread records on them."""
        self.streams: dict[int, tuple[int | None, torch.cuda.Stream | None]] = {}
        """Those of its latest replays on each device."""
        self.entries: weakref.WeakKeyDictionary[_Graphs, _Entry] = weakref.WeakKeyDictionary()
        self.forwards: weakref.WeakKeyDictionary[_Pair, _Forward] = weakref.WeakKeyDictionary()
        self.recordings = 0

    def manager(self, device: int) -> Any:
        """Return the tree manager for a device, if there is one."""
        return getattr(self.tree_manager_containers.get(device), "tree_manager", None)

    def follow(self, device: int) -> None:
        """Let what comes on another stream than the replay before wait for it, and for what uses its outputs there."""
        number, (before, stream) = _number_of_stream(device), self.streams.get(device, (None, None))
        if number != before and not torch.cuda.is_current_stream_capturing():
            now = torch.cuda.current_stream(device)
            # Torch's have odd numbers, or 0; one of somebody else's may be destroyed by now, and whoever names it crashes.
            if stream is not None and stream.stream_id and not stream.stream_id % 2:
                torch.cuda.synchronize(device)
            elif stream is not None:
                now.wait_stream(stream)
            self.streams[device] = number, now

    def idle(self) -> bool:
        """Tell whether nobody has an output any more: a replay's does not own its memory."""
        managers = [self.manager(device) for device in list(self.tree_manager_containers)]
        nodes = [manager.current_node for manager in managers if manager is not None]
        return all(node is None or node.all_outputs_are_dead() for node in nodes)


class _Owner:
    """Lives as long as a thread of Python's."""

    def __init__(self) -> None:
        self.thread = _taken_over() or _Thread()
        weakref.finalize(self, _left.append, self.thread).atexit = False


_local = threading.local()
# Of threads that have ended. It costs less to take them over than to record anew, and their outputs may be in use.
_left: deque[_Thread] = deque()


# System's numbers of the threads that torch keeps a `_Thread` for.
_stashed: set[int] = set()


@atexit.register
def _wait_for_the_end_of_threads() -> None:
    """Let threads end that Python has joined.

    At its end torch takes the interpreter lock to free what a thread has, and aborts the process if the interpreter is ending.
    """
    until, alive = time.monotonic() + 1, {thread.native_id for thread in threading.enumerate()}
    while time.monotonic() < until and any(Path(f"/proc/self/task/{one}").exists() for one in _stashed - alive):
        time.sleep(0.001)


def calling_thread() -> _Thread:
    """Return what the calling thread has; in a backward, what the thread has that has called it."""
    here = _stashed_here()
    if here is None:
        if getattr(_local, "owner", None) is None or _local.owner.thread.key != _KEY:
            _local.owner = _Owner()
        here = cast("_Thread", _local.owner.thread)
        before = sys.getrefcount(here)
        torch._C._stash_obj_in_tls(here.key, here)
        _stashed.add(threading.get_native_id())
        if sys.getrefcount(here) == before:  # torch 2.11 and older give back what they have not taken
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(here))
    return here


def _stashed_here() -> _Thread | None:
    key = _KEY  # an uninstallation may change it meanwhile
    return cast("_Thread", torch._C._get_obj_in_tls(key)) if torch._C._is_key_in_tls(key) else None


def _taken_over() -> _Thread | None:
    for _ in range(len(_left)):
        try:
            thread = _left.pop()  # the last one: what it called is what its successor is about to call
        except IndexError:  # another thread was quicker
            return None
        if thread.idle() and thread.key != _KEY:
            thread.tree_manager_containers.clear()
            thread.entries.clear()
        elif thread.idle():
            vars(thread).pop("mark_step_counter", None)  # whoever takes over may mark no steps
            for device in thread.tree_manager_containers:
                torch.cuda.synchronize(device)  # its last replay may be going on, on its own stream
            return thread
        else:
            _left.appendleft(thread)
    return None


def _forget() -> None:
    """Let each thread begin anew: without the patches torch frees what the graphs that were recorded with them work with."""
    global _KEY  # noqa: PLW0603  of the process, as the patches are
    _KEY = f"{_KEY}'"
    _taken_over()  # frees what nobody has an output of


def recordings() -> int:
    """Return how many steps towards calls that only replay the calling thread has made."""
    return getattr(_stashed_here(), "recordings", 0)


def _PerThread(old: Any, name: str) -> Any:  # noqa: N802  stands for a class of torch's
    """Return what has one of torch's counters, for each thread its own; who marks steps began before the installation."""

    def write(_: Any, value: int) -> None:
        vars(calling_thread())[name] = value

    counter = property(lambda _: vars(calling_thread()).setdefault(name, getattr(old, name)), write)
    return type("PerThread", (), {name: counter})()


def _count_call(count: Callable[[], None], *_: Any) -> None:
    count()
    here = _stashed_here()
    if here:
        here.generation += 1


def _get_manager(get: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    """Let a backward without graphs, which asks when it is compiled, tell the forward of the thread that runs it."""
    return _Caller(*args) if args and kwargs == {"create_if_none_exists": False} else get(*args, **kwargs)


@dataclass
class _Caller:
    device: int

    def set_to_running_backward(self) -> None:
        manager = calling_thread().manager(self.device)
        if manager is not None:
            manager.set_to_running_backward()


class _Pair:
    """The parts of a compiled forward and of its backward, or of compiled code without one."""

    def __init__(self) -> None:
        self.forward, self.backward = _Draws(), _Draws()

    def __reduce__(self) -> Any:  # Inductor hashes what it is attached to, to look a backward up in its cache
        return _Pair, ()


@dataclass
class _Draws:
    """Whether code draws random numbers."""

    unknown: weakref.WeakSet[_Graphs] = field(default_factory=weakref.WeakSet)
    """Parts not yet seen to draw none."""
    some: bool = False
    """One was seen to draw when no other thread could."""


@dataclass
class _Forward:
    """Whether a thread's latest forward ran with its graphs."""

    graphed: bool = False


@dataclass
class _Entry:
    """A thread's graphs of one part."""

    graphs: Any
    forward: _Forward
    begun: bool = False


class _Graphs:
    """One part of compiled code, run with the calling thread's graphs.

    It runs without them in a process of several threads if it draws random numbers: on torch 2.11 and older all graphs of
    a device read one seed and offset, which every replay writes. So does a backward whose forward ran without them or in
    another thread, because torch would record it anew for each place in memory of what a forward has saved.
    """

    def __init__(
        self, make: Callable[[_Thread], Any], plain: Any, device: int, pair: _Pair, turns: Turns, *, backward: bool
    ) -> None:
        self._make, self._plain, self._device, self._pair = make, plain, device, pair
        self._turns, self._backward = turns, backward
        self._model: Any = None
        self._draws = pair.backward if backward else pair.forward
        self._draws.unknown.add(self)

    def run(self, inputs: list[Any]) -> Any:
        here = calling_thread()
        entry = here.entries.get(self) or self._enter(here)
        if entry.begun and not self._draws.unknown and (entry.forward.graphed or not self._backward):
            entry.forward.graphed = True
            here.follow(self._device)
            return entry.graphs(inputs)
        return self._run_seldom(here, entry, inputs)

    def _enter(self, here: _Thread) -> _Entry:
        entry = here.entries[self] = _Entry(self._make(here), here.forwards.setdefault(self._pair, _Forward()))
        return entry

    def _run_seldom(self, here: _Thread, entry: _Entry, inputs: list[Any]) -> Any:
        may_replay = not self._draws.unknown or (self._draws.some and alone())
        if entry.graphs and may_replay and (entry.forward.graphed or not self._backward):
            entry.begun = entry.forward.graphed = True
            with self._turns[self._device]:  # makes the thread's memory pool
                here.follow(self._device)
                torch._C._set_cached_tensors_enabled(True)  # a reset while nothing was installed has switched it off
                return entry.graphs(inputs)
        if not self._backward:
            entry.forward.graphed = False
        elif entry.forward.graphed:
            _Caller(self._device).set_to_running_backward()
        if self not in self._draws.unknown:
            return self._without_graphs(inputs)
        by_itself, given = alone(), any(isinstance(one, torch.Generator) for one in inputs)
        with self._turns[self._device]:
            before = self._state()
            outputs = self._without_graphs(inputs)
            drew = given or self._state() != before
        if not drew:
            self._draws.unknown.discard(self)
            here.recordings += 1
        elif by_itself and alone():
            self._draws.some = True
        return outputs

    def _without_graphs(self, inputs: list[Any]) -> Any:
        if self._model is None:  # copies inputs that are not where the kernels expect them, as torch's graphs do
            from torch._inductor.compile_fx import get_input_idxs_to_check
            from torch._inductor.utils import align_inputs_from_check_idxs

            model, static, mutated = self._plain
            check, align = get_input_idxs_to_check(inputs, static), cast("Any", align_inputs_from_check_idxs)
            self._model = align(*(model, check, mutated)[: len(inspect.signature(align).parameters)])  # 2 in torch 2.6
        return self._model(inputs)

    def _state(self) -> tuple[int, int]:
        generator = torch.cuda.default_generators[self._device]
        return generator.initial_seed(), generator.get_offset()
