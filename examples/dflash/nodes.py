"""Several machines: one process on each, started by torchrun. They average gradients, watch each other, and end together.

Everything that nodes say to each other, but gradients and weights, goes through the key-value store that torchrun keeps: who is
there, values that all need, and a sign of life every second with what a node is doing. So a wait for others is never blind: its
error says which node is missing, and what that one was at.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

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

BEAT = 1.0
"""Seconds between two signs of life of a node."""

_SILENT = 3.5 * BEAT
"""Seconds of silence that are told where there is another reason to end."""

GRACE = 15.0
"""Seconds that the main thread has to hear that another node has ended; then the process ends without it."""


INTERRUPTED = "it was interrupted"


class NodeError(RuntimeError):
    """Another node has ended or does not come; says which, and what it was doing."""


class Nodes:
    """A node that is alone: it has nobody to wait for.

    Attributes:
        rank: this node's number; node 0 writes checkpoints and exports.
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
    def prefix(self) -> str:
        """What a line for people begins with, to tell which node says it; nothing where there is one."""
        return ""

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
        """Raise `NodeError` if another node has ended or is silent."""

    def why(self) -> str | None:
        """Return what has happened to other nodes that this one may be ended for from outside, if anything, after some seconds at most."""
        return None

    def stop(self) -> None:
        """End every wait for other nodes, now and later, with `Stopped`."""

    def ending(self, error: str) -> None:
        """Say that this node is about to end, and why: others end with that, and this one does not look after them any more."""

    def leave(self, error: str | None = None) -> None:
        """Say that this node has ended, and why if not because all was done."""


ALONE = Nodes()


def fingerprints(model: nn.Module) -> dict[str, str]:
    """Return a hash of the bits of each parameter."""
    return {
        name: hashlib.sha256(weight.detach().cpu().contiguous().view(torch.uint8).numpy().data).hexdigest()
        for name, weight in model.state_dict().items()
    }


def join(config: Config) -> Nodes:
    """Meet the other processes that torchrun has started, if there are any; to be called once, in the main thread.

    Raises:
        ConfigError: if they cannot share this machine's devices.
        NodeError: if one of them does not come.
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
        store: Store = next(iter(rendezvous("env://", timeout=timedelta(seconds=config.collective_timeout))))[0]
        return store

    return Connected(connect, rank, count, restarts, config, "cpu:gloo,cuda:nccl" if cuda else "gloo")


def _yes() -> bool:
    return True


def _no() -> bool:
    return False


@dataclass
class _Wait:
    """A wait for all nodes.

    Attributes:
        number: of all such waits so far, the same on all nodes.
        what: they wait for.
        limit: seconds until a node that is alive counts as missing; None for never.
        over: whether it is, on the device, too.
    """

    number: int
    what: str
    limit: float | None
    thread: str = field(default_factory=lambda: threading.current_thread().name)
    since: float = field(default_factory=time.monotonic)
    over: Callable[[], bool] = _no


class Connected(Nodes):
    """One of several nodes.

    Args:
        connect: makes a client of the store that all nodes share.
        rank, count, restarts: see `Nodes`.
        config: for time-outs.
        backend: of torch.distributed.
    """

    def __init__(
        self, connect: Callable[[], Store], rank: int, count: int, restarts: int, config: Config, backend: str
    ) -> None:
        super().__init__(restarts)
        self.rank, self.count = rank, count
        self._silence, self._limit = config.node_timeout, config.collective_timeout
        self._stopped = False
        self._failure: str | None = None  # the first one stays
        self._failed = 0.0
        self._ended: str | None = None
        self._ending = False
        self._interrupted: dict[int, float] = {}  # since when nodes have said so
        self._left = threading.Event()
        self._beats = 0
        self._said: dict[int, dict[str, Any]] = {}
        self._heard = dict.fromkeys(range(count), time.monotonic())
        self._looked = time.monotonic()
        self._asking: float | None = None  # since when the thread of signs of life waits for the store
        self._waits = 0
        self._wait: _Wait | None = None
        session = _meet(connect(), rank, count, self._silence)
        # A client answers one thread at a time: signs of life must not wait for those who wait.
        self._store, self._own_store = (PrefixStore(session, connect()) for _ in range(2))
        self._own_store.set(f"alive/{rank}", self._sign())
        self.gather("alive", None, self._silence)
        threading.Thread(target=self._watch, name="nodes", daemon=True).start()
        dist.init_process_group(
            backend,
            store=PrefixStore(f"{session}/group", connect()),
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=self._limit + 60),  # later than the errors that say more
        )

    @property
    def prefix(self) -> str:
        """See `Nodes`."""
        return f"node {self.rank}: "

    def gather(self, what: str, value: Any, limit: float | None = None) -> list[Any]:
        """See `Nodes`."""
        wait = self._begin(what, limit)
        keys = [f"value/{what}/{rank}" for rank in range(self.count)]
        self._store.set(keys[self.rank], json.dumps(value))
        while not self._store.check(keys):
            self._still_wanted()
            if limit is not None and time.monotonic() - wait.since > limit:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise NodeError(self._too_long(wait, missing))
            time.sleep(0.02)
        wait.over = _yes
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
        return {rank: said["numbers"] for rank, said in sorted(self._said.items()) if rank != self.rank}

    def check(self) -> None:
        """See `Nodes`."""
        asking = self._asking
        if asking is not None and time.monotonic() - asking > self._silence:
            self._fail(
                f"the store of torchrun has not answered for {self._silence:g} s: the machine that keeps it, node 0's, is cut off"
            )
        if self._failure is not None:
            raise NodeError(self._failure)

    def why(self) -> str | None:
        """See `Nodes`. A torchrun that loses those of other machines ends its processes at once, and does not know which process died."""
        until = time.monotonic() + _SILENT + 2 * BEAT
        while time.monotonic() < until:
            if silent := self._silent(_SILENT):
                return silent
            others = {said["ended"] for rank, said in self._said.items() if rank != self.rank}
            if others <= {INTERRUPTED}:
                return None  # like this one
            if None not in others:
                break
            time.sleep(0.1)
        return self._failure

    def stop(self) -> None:
        """See `Nodes`."""
        self._stopped = True

    def ending(self, error: str) -> None:
        """See `Nodes`."""
        self._ended = self._ended or error
        self._ending = True

    def leave(self, error: str | None = None) -> None:
        """See `Nodes`."""
        self._ended = self._ended or error or ""
        if self._ended and self.rank == 0:
            time.sleep(3 * BEAT)  # torchrun's store goes when it ends node 0, and the others are to learn why
        self._left.set()
        try:
            self._own_store.set(f"alive/{self.rank}", self._sign())
        except RuntimeError:
            return  # nobody is left to hear it
        if not self._ended:
            dist.destroy_process_group()

    def _together(self, what: str, device: torch.device, operations: Iterable[Any]) -> None:
        """Begin operations of torch.distributed, one after the other, and wait for all; on GPUs the stream waits."""
        wait = self._begin(what, self._limit)
        try:
            for work in list(operations):
                # NCCL's are ready once they are queued; `_watch` looks whether the device comes to their end.
                ready = threading.Event()
                work.get_future().add_done_callback(lambda _, ready=ready: ready.set())
                while not ready.wait(0.1):
                    self._still_wanted()
                work.wait()
            mark = devices.mark(device)
            wait.over = _yes if mark is None else mark.query
        except RuntimeError as error:
            if isinstance(error, NodeError):
                raise
            self._lost(wait, error)

    def _begin(self, what: str, limit: float | None) -> _Wait:
        self._waits += 1
        self._wait = _Wait(self._waits, what, limit)
        return self._wait

    def _still_wanted(self) -> None:
        if self._stopped:
            raise Stopped
        self.check()

    def _lost(self, wait: _Wait, error: RuntimeError) -> None:
        """Raise for a connection that broke: it does not say whose, the signs of life do in a moment."""
        until = time.monotonic() + self._silence + 5 * BEAT
        while time.monotonic() < until:
            self._still_wanted()
            time.sleep(0.1)
        raise NodeError(
            f"{wait.what} could not be exchanged, though all nodes say that they are alive: {error}"
        ) from error

    def _sign(self) -> str:
        self._beats += 1
        lock = fx_trace_lock.statistics()
        compiles = f"; thread {lock.owner!r} is {lock.doing}, for {lock.held_seconds:.0f} s" if lock.locked else ""
        return json.dumps(
            {
                "beat": self._beats,
                "who": f"{socket.gethostname()}, process {os.getpid()}",
                "doing": self.doing() + compiles,
                "waits": self._waits,
                "ended": self._ended,
                "numbers": self.numbers(),
            }
        )

    def _watch(self) -> None:
        """Be the thread of signs of life: give one every second, look for those of the others, and end this node if one is missing."""
        while not self._left.wait(BEAT):
            self._asking = time.monotonic()
            try:
                self._own_store.set(f"alive/{self.rank}", self._sign())
                said = self._own_store.multi_get([f"alive/{rank}" for rank in range(self.count)])
                self._asking = None
                self._look([json.loads(each) for each in said])
            except dist.DistError as error:
                silent = self._silent(_SILENT) or "node 0's machine or its torchrun has ended"
                self._fail(
                    f"{silent}; torchrun's store, which is there, does not answer ({str(error).splitlines()[0]})"
                )
            except Exception as error:  # nobody would notice the end of this thread
                self._fail(f"node {self.rank} cannot watch the others: {error!r}")
            if self._failure and not self._ending and time.monotonic() - self._failed > GRACE:
                print(f"{self.prefix}stopped: {self._failure}", file=sys.stderr, flush=True)
                os._exit(1)

    def _look(self, said: list[dict[str, Any]]) -> None:
        now = time.monotonic()
        # This process itself may have been stopped for a while, and the others were not silent.
        heard_nobody = now - self._looked > 5 * BEAT
        self._looked = now
        for rank, sign in enumerate(said):
            if heard_nobody or self._said.get(rank, {}).get("beat") != sign["beat"]:
                self._heard[rank] = now
            self._said[rank] = sign
        if self._ending:
            return
        silence, interrupted = self._silence, None
        for rank, sign in enumerate(said):
            if rank == self.rank or not sign["ended"]:
                continue
            ended = f"node {rank} ({sign['who']}) has ended: {sign['ended']}"
            if sign["ended"] != INTERRUPTED:
                self._fail(ended)
            else:
                # By torchrun, it may be, because another node has died, which shows in a moment.
                silence = _SILENT
                if now - self._interrupted.setdefault(rank, now) > _SILENT + 2 * BEAT:
                    interrupted = ended
        if found := self._silent(silence) or interrupted:
            self._fail(found)
        wait = self._wait
        if wait and wait.limit is not None and now - wait.since > wait.limit and not wait.over():
            self._fail(self._too_long(wait, [rank for rank, sign in enumerate(said) if sign["waits"] < wait.number]))

    def _silent(self, seconds: float) -> str | None:
        """Say which nodes had not been heard of for so long when the store last answered, though they have not ended."""
        silent = {
            rank: self._looked - self._heard[rank]
            for rank, sign in self._said.items()
            if rank != self.rank and sign["ended"] is None and self._looked - self._heard[rank] > seconds
        }
        said = [
            f"node {rank} ({self._said[rank]['who']}) has not been heard of for {since:.0f} s, it was killed or is cut off; the last it said "
            f"was: {self._said[rank]['doing']}"
            for rank, since in silent.items()
        ]
        return "; ".join(said) or None

    def _too_long(self, wait: _Wait, missing: Sequence[int]) -> str:
        unknown = {"who": "never heard of", "doing": "starts"}
        signs = {rank: self._said.get(rank, unknown) for rank in missing if rank != self.rank}
        at = "; ".join(f"node {rank} ({sign['who']}), which {sign['doing']}" for rank, sign in signs.items())
        why = f"without {at}" if at else "though all have come to it, so that the network may be to blame"
        return (
            f"thread {wait.thread!r} of node {self.rank} has waited {time.monotonic() - wait.since:.0f} s for {wait.what}, {why}; "
            f"if it can take that long, raise collective_timeout ({self._limit:g} s)"
        )

    def _fail(self, text: str) -> None:
        if self._failure is None:
            self._failed = time.monotonic()
            self._failure = text
            self._ended = self._ended or text


def _meet(store: Store, rank: int, count: int, limit: float) -> str:
    """Return a name that the processes which run now, and no others, have for their keys in the store.

    torchrun keeps the store when it starts processes again, with all keys of those before, and its restart counts differ between
    machines. So each process makes up a name of its own, node 0 says which ones it has seen, and all agree to that.
    """
    own, since = uuid.uuid4().hex, time.monotonic()
    here, agreed = ([f"{what}/{each}" for each in range(count)] for what in ("here", "agreed"))
    store.set(here[rank], own)
    name = ""
    while time.monotonic() - since < limit:
        if rank == 0 and store.check(here):
            store.set("session", b"/".join(store.multi_get(here)).decode())
        if store.check(["session"]):
            session = store.get("session").decode()
            if session.split("/")[rank] == own:
                name = hashlib.sha256(session.encode()).hexdigest()
                store.set(agreed[rank], name)
                if all(store.check([key]) and store.get(key).decode() == name for key in agreed):
                    return name
        time.sleep(0.05)
    missing = [str(each) for each, key in enumerate(here) if not store.check([key])] or [
        str(each)
        for each, key in enumerate(agreed)
        if name and not (store.check([key]) and store.get(key).decode() == name)
    ]
    raise NodeError(
        f"node {rank} has waited {limit:g} s for all {count} nodes to start, without node {' and '.join(missing or ['0'])}: it was killed, or "
        "starts slowly, for which node_timeout can be raised"
    )
