"""``warmup``: compile before serving or training, in each thread and for each device that will be used."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from safecompile._core import events
from safecompile._core.errors import UnsupportedCallableError
from safecompile._core.events import Compile
from safecompile._core.guarded import Guarded, warming
from safecompile._core.rendezvous import in_each_worker
from safecompile._patches import fx_trace_lock
from safecompile._patches.cuda_graphs import recordings
from safecompile._patches.generators import moved, tensors_in

__all__ = ["ThreadWarmup", "WarmupReport", "warmup"]

log = logging.getLogger("safecompile")

# Seconds between two messages about a long warm-up.
LOG_EVERY = 10.0
# A call with CUDA graphs is made until it records nothing, usually the fourth time, and not more often than this.
MOST_CALLS = 8


@dataclass(frozen=True)
class ThreadWarmup:
    """What a warm-up did in one thread."""

    thread: str
    graphs: int
    """Frames that the thread compiled (the parts of a graph-broken function count each)."""
    compile_seconds: float
    """Also of backwards, and of compiles that failed."""
    waited_seconds: float
    """For the FX-trace lock."""
    seconds: float
    """Without the time for which it waited for the other threads to come."""
    variants: tuple[Compile, ...] = ()
    """The frames that it compiled although another thread had done the same calls before. The first of the ``reasons``
    of each names the guard that differs."""

    def __str__(self) -> str:
        made = f"{_graphs(self.graphs)} compiled in {self.compile_seconds:.1f} s" if self.graphs else "nothing compiled"
        waited = f", waited {self.waited_seconds:.1f} s" if self.waited_seconds else ""
        variants = (f"\n    variant of {v.function} ({v.filename}:{v.line}): {v.reasons[0]}" for v in self.variants)
        return f"{self.thread}: {made}{waited}, {self.seconds:.1f} s in all{''.join(variants)}"


@dataclass(frozen=True)
class WarmupReport:
    """What a warm-up did. As text it has a line for each thread, and one for each variant."""

    thread: str
    """Name of the calling thread."""
    graphs: int
    """Of all threads that were warmed up."""
    seconds: float
    threads: tuple[ThreadWarmup, ...] = ()
    """The calling thread, or the workers of the executor. The first one warmed up alone, before the others."""

    def __str__(self) -> str:
        lines = (f"\n  {thread}" for thread in self.threads)
        return f"warm-up: {_graphs(self.graphs)} compiled in {self.seconds:.1f} s{''.join(lines)}"


def _graphs(count: int) -> str:
    return f"{count} graph{'' if count == 1 else 's'}"


def warmup(
    fn: Callable[..., Any] | Mapping[Any, Callable[..., Any]],
    inputs: Sequence[Any],
    *,
    kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    backward: bool = False,
    grad: bool | Literal["both"] | None = None,
    devices: Sequence[torch.device | str | int] | None = None,
    executor: ThreadPoolExecutor | None = None,
    timeout: float = 60.0,
    progress: Callable[[int, int], object] | None = None,
) -> WarmupReport:
    """Call ``fn`` with each set of inputs, so that later calls with such inputs compile nothing.

    The calls have the settings of the thread that makes them (grad mode, autocast, intra-op threads; see
    ``capture_context``), which must be those of later calls: they are part of what is compiled for.
    Random numbers are drawn as by any call. With CUDA graphs (``mode="reduce-overhead"``, ``"max-autotune"``) each call is
    made until the thread has recorded its graphs and replays them. A callable with another ``when_compiling`` waits here as well.

    Args:
        fn: a guarded callable, or any function that calls some; with ``devices`` also a mapping from each of them to one
            (replicas). With ``executor`` it must not wait for further tasks of the same pool.
        inputs: the positional arguments, as a tuple, or a list of tuples: several sets, each called. A list of anything
            else is one set.
        kwargs: the keyword arguments of all sets, or a list with those of each.
        backward: also run the backward of the calls with grad; it is compiled when first used. Gradients are computed for
            every leaf and thrown away: no ``.grad`` changes.
        grad: the grad mode; ``None`` for the thread's own, ``"both"`` for a call without and one with grad.
        devices: call with each of these current, and with detached copies on it of the tensors in the inputs, also in
            nested tuples, lists and dicts. ``requires_grad`` and the strides of dense tensors are kept.
        executor: make the calls in each worker of this pool, and not in the calling thread. When all workers have met, one
            makes them alone, and then the others do, at the same time.
        timeout: seconds within which the workers meet. How long they work is not limited.
        progress: called as ``progress(done, total)`` after each call, in the thread that made it, one at a time.

    Returns:
        For each thread the graphs, the seconds, and the variants that its own settings made necessary.

    Raises:
        WarmupTimeoutError: workers were too busy to meet; nothing was called or compiled.
        UnsupportedCallableError: ``fn`` is not callable.
        TypeError: ``inputs`` is not a tuple or list; another argument has a type that does not fit.
        ValueError: ``backward`` was asked for, but no output needs a gradient; ``kwargs`` for another number of sets; a
            device that is not there, or is there twice; replicas for other devices; another ``grad`` or ``timeout``.
        RuntimeError: the executor was shut down, or its workers could not start; the calling thread is one of them, or has
            the FX-trace lock, so that it would wait for itself.
        BaseException: what ``fn`` or ``progress`` raises, the first time, when all workers have ended.
    """
    modes, sets = _grad_modes(grad, backward=backward), _sets(inputs, kwargs)
    replicas = _replicas(fn, devices).items()
    calls = [(replica, *one, mode, device) for device, replica in replicas for one in sets for mode in modes]
    if executor is not None:
        _check_executor(executor, timeout)
    workers = 1 if executor is None else executor._max_workers
    work = _Warmup(calls, backward, progress or (lambda *_: None), len(calls) * workers)
    subscriber, start = work.note, events.clock()
    events.subscribe(subscriber, Compile, events.Call)
    try:
        if executor is None:
            threads = [work.in_this_thread(True)]
        else:
            threads = in_each_worker(executor, work.in_this_thread, timeout)
    finally:
        work.stopped = True
        events.unsubscribe(subscriber)
    graphs = sum(thread.graphs for thread in threads)
    return WarmupReport(threading.current_thread().name, graphs, events.clock() - start, tuple(threads))


# A callable, its positional and keyword arguments, the grad mode and the device, if they are asked for.
_OneCall = tuple[Callable[..., Any], Sequence[Any], dict[str, Any], bool | None, torch.device | None]


@dataclass
class _Seen:
    """What a thread has done so far."""

    compiles: list[Compile] = field(default_factory=list)
    called: set[Guarded] = field(default_factory=set)
    in_backward: bool = False


@dataclass
class _Warmup:
    calls: list[_OneCall]
    backward: bool
    progress: Callable[[int, int], object]
    total: int
    stopped: bool = False
    seen: dict[int, _Seen] = field(default_factory=dict)
    done: int = 0
    logged: float = field(default_factory=events.clock)
    counting: threading.Lock = field(default_factory=threading.Lock)
    """Guards ``done`` and ``logged``, and lets ``progress`` be called once at a time."""

    def in_this_thread(self, first: bool) -> ThreadWarmup:
        """Make the calls; what others than the first thread compile then is a variant."""
        me, start = threading.get_ident(), events.clock()
        seen, waited = self.seen.setdefault(me, _Seen()), fx_trace_lock.waited_by(me)
        before, warming.up = warming.up, True
        try:
            for call in self.calls:
                if not self.stopped:
                    self._make(call, seen)
                    self._count()
        except BaseException:
            self.stopped = True
            raise
        finally:
            warming.up = before
        graphs = tuple(one for one in seen.compiles if one.kind in ("forward", "resume function") and not one.error)
        name, compiling = threading.current_thread().name, sum(one.seconds for one in seen.compiles)
        waited = fx_trace_lock.waited_by(me) - waited
        variants = () if first else _with_what_they_share(graphs)
        return ThreadWarmup(name, len(graphs), compiling, waited, events.clock() - start, variants)

    def _make(self, call: _OneCall, seen: _Seen) -> None:
        fn, args, kwargs, grad, device = call
        with _current(device), nullcontext() if grad is None else torch.set_grad_enabled(grad):
            if device is not None:
                args, kwargs = moved((args, kwargs), device)
            for _ in range(MOST_CALLS):
                before = recordings()
                outputs = fn(*args, **kwargs)
                if self.backward and grad is not False:
                    seen.in_backward = True
                    _run_backward(outputs, tensors_in((args, kwargs)))
                    seen.in_backward = False
                del outputs  # in use, it would keep the graphs from being replayed
                if recordings() == before:
                    break

    def _count(self) -> None:
        with self.counting:
            self.done += 1
            if events.clock() - self.logged >= LOG_EVERY:
                self.logged = events.clock()
                log.info("warm-up: %d of %d calls are made", self.done, self.total)
            self.progress(self.done, self.total)

    def note(self, event: Compile | events.Call) -> None:
        """Note what the threads do that are warmed up; other threads compile for others."""
        seen = self.seen.get(event.ident)
        if isinstance(event, events.Call):
            if seen:
                seen.called.add(event.guarded)
            return
        # On an accelerator autograd has threads of its own, which no thread of Python's has started.
        if event.kind == "backward" and isinstance(threading.current_thread(), threading._DummyThread):
            waiting = (one for one in list(self.seen.values()) if one.in_backward and event.guarded in one.called)
            seen = seen or next(waiting, None)
        if seen:
            seen.compiles.append(event)


def _with_what_they_share(graphs: tuple[Compile, ...]) -> tuple[Compile, ...]:
    """Put the reasons first that most of a thread's compiles have: from each other they differ by their inputs."""
    count = Counter(reason for one in graphs for reason in one.reasons)
    return tuple(replace(one, reasons=tuple(sorted(one.reasons, key=lambda r: (-count[r], len(r))))) for one in graphs)


@contextmanager
def _current(device: torch.device | None) -> Iterator[None]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None or accelerator is None or device.type != accelerator.type:
        yield
        return
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(device.index)
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


def _sets(inputs: Any, kwargs: Any) -> list[tuple[Any, dict[str, Any]]]:
    if not isinstance(inputs, (tuple, list)):
        raise TypeError(
            f"warmup takes the positional arguments as a tuple or list, not {type(inputs).__name__}; "
            "for one tensor x, give (x,)."
        )
    # A named tuple, or a torch.Size, is rather an argument.
    several = isinstance(inputs, list) and inputs and all(type(one) is tuple for one in inputs)
    sets = inputs if several else [inputs]
    mappings = kwargs if isinstance(kwargs, list) else [kwargs or {}] * len(sets)
    if not all(isinstance(one, Mapping) for one in mappings):
        raise TypeError("warmup takes the keyword arguments as a mapping, or as a list of a mapping for each set.")
    if len(mappings) != len(sets):
        raise ValueError(f"warmup got keyword arguments for {len(mappings)} sets of inputs, and there are {len(sets)}.")
    return [(one, dict(mapping)) for one, mapping in zip(sets, mappings, strict=True)]


def _grad_modes(grad: Any, *, backward: bool) -> list[bool | None]:
    if grad is not None and not isinstance(grad, bool) and grad != "both":
        raise ValueError(f'warmup takes grad=None, True, False or "both", not {grad!r}.')
    if backward and grad is False:
        raise ValueError("warmup(backward=True, grad=False): without grad there is no backward; leave one of them out.")
    return [False, True] if grad == "both" else [grad]


def _device(device: Any) -> torch.device:
    """Return the device as tensors name it: with its index, if it has one."""
    try:
        return torch.empty(0, device=device).device
    except Exception as error:  # of many kinds
        raise ValueError(f"warmup cannot use the device {device!r}: {str(error).splitlines()[0]}") from error


def _replicas(fn: Any, devices: Any) -> dict[torch.device | None, Callable[..., Any]]:
    """Return what to call on each device, or by ``None`` what to call as it is."""
    if devices is not None and (not isinstance(devices, (tuple, list)) or not devices):
        raise TypeError(f"warmup takes devices as a list of one or more, not {devices!r}.")
    found = [None] if devices is None else [_device(one) for one in devices]
    replicas = dict.fromkeys(found, fn)
    if len(replicas) < len(found):
        raise ValueError(f"warmup got a device more than once: {', '.join(map(str, found))}.")
    if devices is not None and isinstance(fn, Mapping):
        replicas = {_device(device): replica for device, replica in fn.items()}
        if len(replicas) < len(fn) or replicas.keys() != set(found):
            given, wanted = (", ".join(map(str, each)) for each in (fn, found))
            raise ValueError(f"warmup got callables for the devices {given}, not for {wanted}: give one for each.")
    wrong = next((type(one).__name__ for one in replicas.values() if not callable(one)), None)
    if wrong is not None:
        hint = ", and devices for a mapping" if isinstance(fn, Mapping) else ""
        raise UnsupportedCallableError(f"warmup cannot call {wrong}: give a function or module{hint}.")
    return {device: replicas[device] for device in found}


def _check_executor(executor: Any, timeout: float) -> None:
    if not isinstance(executor, ThreadPoolExecutor):
        raise TypeError(f"warmup takes a ThreadPoolExecutor, not {type(executor).__name__}: call it in what runs there")
    if not timeout >= 0:  # not a number is refused as well
        raise ValueError(f"timeout must be at least 0 seconds, not {timeout}.")
    with executor._shutdown_lock:  # a worker may begin with a task before it is entered
        its_own = threading.current_thread() in executor._threads
    if its_own:
        raise RuntimeError(
            "warmup was called in a worker of the executor, and would wait for itself: call it elsewhere"
        )
    if fx_trace_lock.owned() or fx_trace_lock.owned_by_torch():
        raise RuntimeError("warmup(executor=) was called with the FX-trace lock, for which its workers would wait.")


def _run_backward(outputs: Any, inputs: list[torch.Tensor]) -> None:
    tensors = [t for t in tensors_in(outputs) if t.grad_fn is not None]
    if not tensors:
        raise ValueError(
            "warmup(backward=True): no output needs a gradient; call it with grad mode on (grad=True) and with inputs or "
            "parameters that require gradients, or leave backward out."
        )
    sources = _sources([t.grad_fn for t in tensors], [t for t in inputs if t.grad_fn is not None])
    torch.autograd.grad(tensors, sources, [torch.ones_like(t) for t in tensors], allow_unused=True)


def _sources(nodes: list[Any], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors from which the graph of ``nodes`` starts: leaves, and inputs with a graph of their own."""
    own = {t.grad_fn: t for t in inputs}
    sources, seen = [], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in own:
            sources.append(own[node])
        elif type(node).__name__ == "AccumulateGrad":
            sources.append(node.variable)
        else:
            nodes += [following for following, _ in node.next_functions]
    return sources
