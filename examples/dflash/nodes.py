"""Several machines: one process on each, started by torchrun. They average gradients, watch each other, and end together.

Where nodes meet, and values that all need, go through the key-value store that torchrun keeps, gradients and weights through
torch.distributed. A wait for others is never blind: `watch.Watch` knows who is alive and what each is doing, so that its error says which
node is missing, and what that one was at.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

import devices
from checkpoints import Snapshot
from config import Config, ConfigError
from pipeline import Stopped
from safecompile import fx_trace_lock
from watch import BEAT, CONNECTED, NodeError, Watch, way_to

INTERRUPTED = "it was interrupted"


class Nodes:
    """A node that is alone: it has nobody to wait for.

    Attributes:
        rank: this node's number.
        count: of nodes.
        restarts: how often torchrun may start all processes again (``--max-restarts``); None if it did not start this one.
        doing: tells what the node does, for the errors of others.
        numbers: tells what others may know of its training, in JSON's types.
    """

    rank = 0
    count = 1

    def __init__(self, restarts: int | None = None) -> None:
        self.restarts = restarts
        self.doing: Callable[[], str] = lambda: "starts"
        self.numbers: Callable[[], dict[str, Any]] = dict

    @property
    def writes(self) -> bool:
        """Whether this node is the one that evaluates, prints, and writes all that belongs to the run as a whole."""
        return self.rank == 0

    @property
    def prefix(self) -> str:
        """What a line for people begins with, to tell which node says it; nothing where there is one."""
        return ""

    def meet(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Meet the others; to be called once, in the main thread, before all else.

        Args:
            interrupted: tells whether this process is to end; the wait for the others is short then.

        Raises:
            NodeError: if one of them does not come.
        """

    def gather(self, what: str, value: Any, limit: float | None = None) -> list[Any]:
        """Return the value that each node has for ``what``, in the order of the nodes, once all have come.

        To be called by one thread at a time, for each ``what`` once.

        Args:
            what: a name for it, the same on all nodes.
            value: of this node, in JSON's types.
            limit: seconds to wait for nodes that are alive; None for as long as it takes.

        Raises:
            NodeError: if a node has ended, or does not come.
            Stopped: if the run is over.
        """
        return [value]

    def mean_(self, tensors: Sequence[Tensor], what: str) -> None:
        """Replace tensors by their means over the nodes, which have the same bits on all nodes.

        To be called by one thread of each node at a time, in the same order on all; never inside a compile.

        Args:
            tensors: on one device, in the same order and with the same shapes on all nodes.
            what: they are, for errors.

        Raises:
            NodeError: if a node has ended, or does not come.
            Stopped: if the run is over.
        """

    def spread(self, snapshot: Snapshot | None) -> Snapshot | None:
        """Return node 0's snapshot, on the CPU."""
        return snapshot

    def others(self) -> dict[int, dict[str, Any]]:
        """Return what each other node said last of its training."""
        return {}

    def check(self) -> None:
        """Raise `NodeError` if another node has ended or does not answer."""

    def stop(self) -> None:
        """End every wait for other nodes, now and later, with `Stopped`."""

    def ending(self, why: str) -> str | None:
        """Say that this node is about to end, and why: others end with that. To be called in the main thread.

        Returns:
            What had happened to other nodes before, if anything, which this one may be ended for from outside.
        """
        return None

    def leave(self) -> None:
        """Say that this node has ended, all being done unless it was `ending`."""


ALONE = Nodes()


def fingerprints(model: nn.Module) -> dict[str, str]:
    """Return a hash of the bits of each parameter."""
    return {
        name: hashlib.sha256(weight.detach().cpu().contiguous().view(torch.uint8).numpy().data).hexdigest()
        for name, weight in model.state_dict().items()
    }


def join(config: Config) -> Nodes:
    """Return this process's place among those that torchrun has started, if it has; to `Nodes.meet` them is up to the caller.

    Raises:
        ConfigError: if they cannot share this machine's devices.
    """
    if not dist.is_torchelastic_launched():
        return Nodes()
    rank, count, here, restarts = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS")
    )
    if count == 1:
        return Nodes(restarts)
    cuda = any(device.type == "cuda" for device in config.devices()[config.targets :])
    if cuda and here > 1:
        raise ConfigError(
            f"torchrun started {here} processes on this machine, and each would use its GPUs with threads of its own: "
            "start one, with --nproc-per-node 1"
        )
    if cuda:
        # Its watchdog would end the process before anyone has said which node is missing; here that is the signs of life's part.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")

    def connect() -> Store:
        store: Store = next(iter(rendezvous("env://", timeout=timedelta(seconds=CONNECTED))))[0]
        store.set_timeout(timedelta(seconds=config.collective_timeout + 60))  # later than the errors that say more
        return store

    return Connected(connect, _address, rank, count, restarts, config, "cpu:gloo,cuda:nccl" if cuda else "gloo")


def _address() -> str:
    """Return the address at which the others reach this machine: node 0's, or that of the way there."""
    host = os.environ["MASTER_ADDR"]
    own = way_to(host, int(os.environ["MASTER_PORT"]))
    return host if os.environ["GROUP_RANK"] == "0" else own


@dataclass
class _Wait:
    """A wait for all nodes.

    Attributes:
        number: of all such waits so far, the same on all nodes.
        what: they wait for.
        limit: seconds until a node that is alive counts as missing; None for never.
        on_device: tells whether the device has come to the end of it; None for one that this thread sees the end of.
    """

    number: int
    what: str
    limit: float | None
    thread: str = field(default_factory=lambda: threading.current_thread().name)
    since: float = field(default_factory=time.monotonic)
    on_device: Callable[[], bool] | None = None


class Connected(Nodes):
    """One of several nodes.

    Args:
        connect: makes a client of the store that all nodes share.
        address: tells where the others reach this machine.
        rank, count, restarts: see `Nodes`.
        config: for time-outs.
        backend: of torch.distributed.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        address: Callable[[], str],
        rank: int,
        count: int,
        restarts: int,
        config: Config,
        backend: str,
    ) -> None:
        super().__init__(restarts)
        self.rank, self.count = rank, count
        self._connect, self._address, self._backend = connect, address, backend
        self._silence, self._limit = config.node_timeout, config.collective_timeout
        self._stopped = False
        self._ending = False
        self._waits = 0
        self._wait: _Wait | None = None  # that is not over
        self._watch = Watch(rank, count, self._sign, self._overdue, self._silence)

    @property
    def prefix(self) -> str:
        """See `Nodes`."""
        return f"node {self.rank}: "

    def meet(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        """See `Nodes`."""
        try:
            address = self._address()
            store = self._connect()
            session = self._watch.meet(store, address, interrupted)
            self._store = PrefixStore(session, store)
            group = PrefixStore(f"{session}/group", self._connect())
        except (OSError, dist.DistError) as error:
            self._watch.look_again()
            self._watch.check()
            raise NodeError(
                f"node 0 has ended before all had met: the store that its torchrun keeps does not answer ({_first_line(error)})"
            ) from error
        with self._waiting("the connections of torch.distributed", self._limit):
            dist.init_process_group(
                self._backend,
                store=group,
                rank=self.rank,
                world_size=self.count,
                timeout=timedelta(seconds=self._limit + 60),  # later than the errors that say more
            )

    def gather(self, what: str, value: Any, limit: float | None = None) -> list[Any]:
        """See `Nodes`."""
        keys = [f"value/{what}/{rank}" for rank in range(self.count)]
        with self._waiting(what, limit) as wait:
            self._store.set(keys[self.rank], json.dumps(value))
            while not self._store.check(keys):
                self._still_wanted()
                if limit is not None and time.monotonic() - wait.since > limit:
                    missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                    raise NodeError(self._too_long(wait, missing))
                time.sleep(0.02)
            return [json.loads(gathered) for gathered in self._store.multi_get(keys)]

    def mean_(self, tensors: Sequence[Tensor], what: str) -> None:
        """See `Nodes`."""
        if fx_trace_lock.owned() or fx_trace_lock.owned_by_torch():
            raise RuntimeError(
                f"{what} would be averaged over the nodes inside a compile, which other nodes may not make: that must not be"
            )
        self._together(what, tensors[0].device, (dist.all_reduce(tensor, async_op=True) for tensor in tensors))
        for tensor in tensors:
            tensor.div_(self.count)

    def spread(self, snapshot: Snapshot | None) -> Snapshot | None:
        """See `Nodes`."""
        layout = None
        if snapshot is not None and self.rank == 0:
            parts = (snapshot.weights, snapshot.optimizer)
            layout = [
                snapshot.step,
                *({n: [list(t.shape), str(t.dtype).removeprefix("torch.")] for n, t in p.items()} for p in parts),
            ]
        layout = self.gather("layout of the checkpoint", layout)[0]
        if layout is None:
            return None
        step, *named = layout
        if self.rank or snapshot is None:
            weights, gathered = (
                {name: torch.empty(shape, dtype=getattr(torch, kind)) for name, (shape, kind) in part.items()}
                for part in named
            )
            snapshot = Snapshot(step, weights, gathered)
        # In the order of the layout, whatever that of the files is.
        tensors = [
            mine[name]
            for mine, part in zip((snapshot.weights, snapshot.optimizer), named, strict=True)
            for name in part
        ]
        self._together(
            "the checkpoint", torch.device("cpu"), (dist.broadcast(tensor, 0, async_op=True) for tensor in tensors)
        )
        return snapshot

    def others(self) -> dict[int, dict[str, Any]]:
        """See `Nodes`."""
        return {rank: said["numbers"] for rank, said in sorted(self._watch.said.items())}

    def check(self) -> None:
        """See `Nodes`."""
        self._watch.check()

    def stop(self) -> None:
        """See `Nodes`."""
        self._stopped = True

    def ending(self, why: str) -> str | None:
        """See `Nodes`."""
        self._ending = True
        self._watch.end(why)
        return self._watch.failure

    def leave(self) -> None:
        """See `Nodes`."""
        if not self._ending:
            self._watch.end("")
            dist.destroy_process_group()
        self._watch.leave()

    def _together(self, what: str, device: torch.device, operations: Iterable[Any]) -> None:
        """Begin operations of torch.distributed, one after the other, and wait for all; on GPUs the stream waits."""
        with self._waiting(what, self._limit) as wait:
            for work in list(operations):
                # NCCL's are ready once they are queued; `_overdue` looks whether the device comes to their end.
                ready = threading.Event()
                work.get_future().add_done_callback(lambda _, ready=ready: ready.set())
                while not ready.wait(0.1):
                    self._still_wanted()
                work.wait()
            mark = devices.mark(device)
            if mark is not None:
                wait.on_device = mark.query

    @contextmanager
    def _waiting(self, what: str, limit: float | None) -> Iterator[_Wait]:
        """Inside, this thread waits for all nodes; an error of torch.distributed or its store becomes one that names a node."""
        self._waits += 1
        self._wait = wait = _Wait(self._waits, what, limit)
        try:
            yield wait
        except NodeError:
            raise
        except RuntimeError as error:
            self._lost(wait, error)
        if not wait.on_device:
            self._wait = None

    def _still_wanted(self) -> None:
        if self._stopped:
            raise Stopped
        self.check()

    def _lost(self, wait: _Wait, error: RuntimeError) -> NoReturn:
        """Raise for a connection that broke: it does not say whose, the watch does in a moment."""
        until = time.monotonic() + self._silence + 5 * BEAT
        while time.monotonic() < until:
            self._watch.look_again()
            self._still_wanted()
            time.sleep(0.1)
        raise NodeError(f"{wait.what} could not be exchanged, though all nodes answer: {_first_line(error)}") from error

    def _sign(self) -> dict[str, Any]:
        lock = fx_trace_lock.statistics()
        compiles = f"; thread {lock.owner!r} is {lock.doing}, for {lock.held_seconds:.0f} s" if lock.locked else ""
        return {"doing": self.doing() + compiles, "waits": self._waits, "numbers": self.numbers()}

    def _overdue(self) -> str | None:
        """Say for what this node has waited too long, if it has."""
        wait = self._wait
        if not wait or wait.limit is None or time.monotonic() - wait.since < wait.limit:
            return None
        if wait.on_device and wait.on_device():
            return None
        return self._too_long(wait, [rank for rank, said in self._watch.said.items() if said["waits"] < wait.number])

    def _too_long(self, wait: _Wait, missing: Sequence[int]) -> str:
        signs = {
            self._watch.names[rank]: self._watch.said.get(rank, {"doing": "starts"})
            for rank in missing
            if rank != self.rank
        }
        at = "; ".join(f"{name}, which {said['doing']}" for name, said in signs.items())
        why = f"without {at}" if at else "though all have come to it, so that the network may be to blame"
        return (
            f"thread {wait.thread!r} of node {self.rank} has waited {time.monotonic() - wait.since:.0f} s for {wait.what}, {why}; "
            f"if it can take that long, raise collective_timeout ({self._limit:g} s)"
        )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
