"""Which of the other nodes are alive: each keeps a small store of torch's in its own process, which ends with the process.

A node asks every other one for a sign of life each second, at that one's store. A connection that is closed is a process that has
ended. One that ends in order says so first, in the stores of the others; one that has ended and has not said so has died. So a death is
known from the dead node itself, not from how long a busy machine is silent, nor from what it brings about, such as the end of
torchrun or of other nodes.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]  # torch has no list of what it exports there
from torch.distributed.distributed_c10d import Store

BEAT = 1.0
"""Seconds between two signs of life of a node."""

GRACE = 15.0
"""Seconds that the main thread has to hear that another node has ended; then the process ends without it."""

CONNECTED = 10.0
"""Seconds that torch may try to connect to a store that is there; it tries twice, with a pause between."""

INTERRUPTED_WAITS = 15.0
"""Seconds that a node which is interrupted before all have met waits for the others: torchrun interrupts when one has failed, which is
then the one that does not come. It kills after 30 seconds, in which others may have to end their imports first."""

_SLOW = 5.0
"""Seconds that a node which ends waits for the answer of another one."""


class NodeError(RuntimeError):
    """Another node has ended or does not come; says which, and what it was doing."""


class Watch:
    """One node's watch over the others; a thread of its own asks them, and another one sees that they answer.

    Attributes:
        names: of the nodes that were found, for errors.
        said: the last sign of life of each other node.
        failure: why this node has to end, in the words of the first reason; None while there is none.

    Args:
        rank, count: this node's number, and how many there are.
        sign: makes this node's sign of life, in JSON's types; what it does is in ``doing``.
        overdue: tells why this node has to end though all live, if it has to.
        silence: seconds without an answer after which a node is given up.
    """

    def __init__(
        self,
        rank: int,
        count: int,
        sign: Callable[[], dict[str, Any]],
        overdue: Callable[[], str | None],
        silence: float,
    ) -> None:
        self.names = {rank: f"node {rank} ({socket.gethostname()}, process {os.getpid()})"}
        self.said: dict[int, dict[str, Any]] = {}
        self.failure: str | None = None
        self._rank, self._count = rank, count
        self._sign, self._overdue, self._silence = sign, overdue, silence
        self._own: Store  # in this process, from `meet` on
        self._others: dict[int, Store] = {}  # clients of the others'
        self._failing = threading.Lock()  # guards the first write of `failure` and what `_fail` says of it to others
        self._ended: str | None = None  # what this node says when it ends; nothing where all is done
        self._heard = False  # whether the main thread knows that this node has to end
        self._looks = 0
        # By thread: which node it asks, since when; another tuple each time.
        self._asked: dict[int, tuple[int, float]] = {}
        self._hurry, self._left = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="nodes", daemon=True)
        self._listener = threading.Thread(target=self._see_silence, name="nodes that answer", daemon=True)

    def meet(self, store: Store, host: str, interrupted: Callable[[], bool] = lambda: False) -> str:
        """Find the others, and begin to watch each that is there; return a name that these processes, and no others, have for themselves.

        torchrun keeps its store when it starts processes again, with all keys of those before: only one that answers is there.

        Args:
            store: that all nodes share.
            host: this machine's address, for the others.
            interrupted: tells whether this process is to end, for which there may be a reason that is known only here.

        Raises:
            NodeError: if one of them does not come.
        """
        since = time.monotonic()
        until = since + self._silence
        try:
            self._own = server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        except RuntimeError as error:
            raise NodeError(f"node {self._rank} cannot listen to the others: {error}") from error
        card = json.dumps([uuid.uuid4().hex, host, server.port, self.names[self._rank]])
        server.set(card, "")
        server.set("sign", json.dumps(self._sign()))
        self._thread.start()
        self._listener.start()
        self.names.setdefault(0, "node 0")  # whose machine keeps the store
        with self._asking(0):
            store.set(f"here/{self._rank}", card)
        cards = {self._rank: card}
        while missing := sorted(set(range(self._count)) - cards.keys()):
            for rank in missing:
                with self._asking(0):
                    card = store.get(f"here/{rank}").decode() if store.check([f"here/{rank}"]) else ""
                if card:
                    self.names.setdefault(rank, f"node {rank}")
                    with self._asking(rank):
                        client = _client(card)
                    if client:
                        cards[rank], self.names[rank] = card, json.loads(card)[-1]
                        self._others[rank] = client
            self.check()
            if interrupted():
                until = min(until, time.monotonic() + INTERRUPTED_WAITS)
            if (now := time.monotonic()) > until:
                self._fail(
                    f"node {self._rank} has waited {now - since:.0f} s for all {self._count} nodes to start, without node "
                    f"{' and '.join(map(str, missing))}: "
                    + (
                        "this one was interrupted meanwhile, which torchrun does when one has failed"
                        if interrupted()
                        else "it was killed, or starts slowly, for which node_timeout can be raised"
                    )
                )
            time.sleep(0.05)
        return hashlib.sha256("".join(cards[rank] for rank in range(self._count)).encode()).hexdigest()

    def check(self) -> None:
        """Raise `NodeError` if another node has ended or does not answer."""
        if self.failure is not None:
            raise NodeError(self.failure)

    def look_again(self) -> None:
        """Wait for a look at all nodes that begins from now on, but not for a node that does not answer."""
        wanted = self._looks + 2  # one may be under way
        while self._looks < wanted and self._thread.is_alive() and self._unanswered(_SLOW) is None:
            self._hurry.set()
            time.sleep(0.01)

    def end(self, why: str) -> None:
        """Tell the others that this node ends, before it does, and why; nothing where all is done.

        `failure` is then what had happened to others before, which may be the reason.
        """
        self._heard = True
        if self._ended is None:
            self.look_again()
        if self._ended is None:
            self._ended = f"{self.names[self._rank]} has ended: {why}" if why else ""
        self.look_again()

    def leave(self) -> None:
        """End the watch."""
        self._left.set()
        self._hurry.set()

    def look(self) -> None:
        """Ask each other node once; the thread does it every second."""
        # Before the others are asked: if one ended because another had died, the asking finds that one, too.
        told = self._farewells()
        self._own.set("sign", json.dumps(self._sign()))
        dead = []
        for rank, store in list(self._others.items()):
            if not self._ask(rank, store):
                del self._others[rank]
                if rank not in self._farewells():
                    dead.append(rank)
        reasons = [f"{self.names[rank]} has died: its process was killed or crashed{self._last(rank)}" for rank in dead]
        if self._ended is None:
            reasons = reasons or list(filter(None, [*told.values(), self._overdue()]))[:1]
        if reasons:
            self._fail("; ".join(reasons))

    def _ask(self, rank: int, store: Store) -> bool:
        """Exchange what there is to say with a node; return whether its process is there."""
        with self._asking(rank):
            try:
                if self._ended is not None:
                    store.set(f"ended/{self._rank}", self._ended)
                self.said[rank] = json.loads(store.get("sign"))  # an answer to what was set, too
            except DistNetworkError:
                return False
        return True

    def _run(self) -> None:
        while not self._left.is_set():
            self._hurry.clear()
            try:
                self.look()
            except Exception as error:  # nobody would notice the end of this thread
                self._fail(f"node {self._rank} cannot watch the others: {error!r}")
            self._looks += 1  # also of one that failed: whoever waits for it would wait for ever
            self._hurry.wait(BEAT)

    def _see_silence(self) -> None:
        try:
            while not self._left.wait(BEAT):
                self.give_up_silent()
        except Exception as error:  # as in `_run`
            self._fail(f"node {self._rank} cannot watch the others: {error!r}")

    def give_up_silent(self) -> None:
        """Fail if a node has not answered for too long, whatever the main thread does."""
        if (asked := self._unanswered(self._silence)) is not None:
            time.sleep(BEAT)  # this process itself may have been stopped for a while, and the answer be there
            if asked in list(self._asked.values()):
                why = (
                    f"{self.names[asked[0]]} has not answered for {self._silence:g} s: its machine has stopped or is cut off"
                    + self._last(asked[0])
                )
                self._tell(why)
                self._fail(why)

    def _tell(self, why: str) -> None:
        """Tell the others why this node ends, past the thread that does so otherwise: it waits for the silent one."""

        def tell(store: Store) -> None:
            with suppress(RuntimeError):
                store.set(f"ended/{self._rank}", why)

        tellers = [threading.Thread(target=tell, args=(store,), daemon=True) for store in list(self._others.values())]
        for teller in tellers:
            teller.start()
        for teller in tellers:
            teller.join(BEAT)

    @contextmanager
    def _asking(self, rank: int) -> Iterator[None]:
        """Inside, this thread waits for a node."""
        self._asked[threading.get_ident()] = rank, time.monotonic()
        try:
            yield
        finally:
            del self._asked[threading.get_ident()]

    def _unanswered(self, seconds: float) -> tuple[int, float] | None:
        """Return what a node has been asked for longer."""
        now = time.monotonic()
        return next((asked for asked in list(self._asked.values()) if now - asked[1] > seconds), None)

    def _farewells(self) -> dict[int, str]:
        """Return what nodes that end in order have said, those among them that this one has not met."""
        keys = {rank: f"ended/{rank}" for rank in range(self._count)}
        return {rank: self._own.get(key).decode() for rank, key in keys.items() if self._own.check([key])}

    def _last(self, rank: int) -> str:
        return f"; the last it said was: {self.said[rank]['doing']}" if rank in self.said else ""

    def _fail(self, why: str) -> None:
        with self._failing:
            first = self.failure is None
            if first:
                self.failure = why
                self._ended = why if self._ended is None else self._ended
        if first:
            self._hurry.set()  # tells the others at once
            timer = threading.Timer(GRACE, self._give_up)
            timer.daemon = True
            timer.start()

    def _give_up(self) -> None:
        """End the process if the main thread has not heard: it may be inside an operation that waits for the dead node."""
        if not (self._heard or self._left.is_set()):
            print(f"node {self._rank}: stopped: {self.failure}", file=sys.stderr, flush=True)
            os._exit(1)


def way_to(host: str, port: int) -> str:
    """Return this machine's own address on the way to a store.

    Raises:
        OSError: if nobody listens there, for which torch would go on trying.
    """
    with socket.create_connection((host, port), _SLOW) as way:
        return str(way.getsockname()[0])


def _client(card: str) -> Store | None:
    """Return a client of the store that a node has said is its own; None if it is of a process that has ended."""
    _, host, port, _ = json.loads(card)
    try:
        way_to(host, port)
        store = TCPStore(host, port, timeout=timedelta(seconds=CONNECTED), wait_for_workers=False)
        # An answer that comes late is no error: `Watch.check` says how late it may be.
        store.set_timeout(timedelta(days=1))
        return store if store.check([card]) else None
    except (OSError, RuntimeError):
        return None
