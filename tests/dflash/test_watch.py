"""Who has died is known from the dead node itself: in whatever order the others hear of it, and of each other's ends."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed import DistNetworkError, HashStore, TCPStore  # type: ignore[attr-defined]  # torch has no list of what it exports there
from torch.distributed.distributed_c10d import Store

import watch
from nodes import INTERRUPTED
from tests.dflash.conftest import EXAMPLE
from tests.helpers.subprocess_run import run_forked
from watch import NodeError, Watch

SILENCE = 20.0


def make(rank: int, count: int = 3, silence: float = SILENCE, *, runs: bool = False, **changes: Any) -> Watch:
    """Return a node's watch, which looks when it is told to unless it ``runs``."""
    made = Watch(rank, count, lambda: {"doing": f"trains {rank}", **changes}, lambda: None, silence)
    if not runs:
        made.leave()
    return made


def meet(watches: list[Watch], store: Any) -> list[str]:
    names = [""] * len(watches)

    def come(rank: int) -> None:
        names[rank] = watches[rank].meet(store, "127.0.0.1")

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(len(watches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return names


def blamed(node: Watch) -> list[int]:
    """Return the nodes that the error is about."""
    return [int(rank) for rank in re.findall(r"node (\d+) \(.*?\) has", node.failure or "")]


class Client:
    """A client of another node's store, which goes with that node's process."""

    def __init__(self, node: Watch) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node._own, name)


class Gone:
    """The store of a process that has ended, without a word of its own."""

    def __getattr__(self, name: str) -> Any:
        raise DistNetworkError("Connection closed by peer")


def die(node: Watch) -> None:
    node._own = Gone()  # type: ignore[assignment]


@pytest.fixture
def three() -> list[Watch]:
    """Return the watches of three nodes that have met, and have looked once."""
    made = [make(rank) for rank in range(3)]
    for each in made:
        each._own = HashStore()
        each._own.set("sign", json.dumps(each._sign()))
    for each in made:
        each.names = {rank: f"node {rank} (there, process {rank})" for rank in range(3)}
        each._others = {rank: Client(node) for rank, node in enumerate(made) if node is not each}  # type: ignore[misc]
        each.look()
    return made


def test_nodes_that_live_hear_of_each_other_and_find_nothing_wrong(three: list[Watch]) -> None:
    for each in three:
        each.look()
        each.check()
    assert three[0].said == {1: {"doing": "trains 1"}, 2: {"doing": "trains 2"}}


def test_a_node_that_cannot_watch_says_so_and_ends() -> None:
    """A look that fails is one, too: the end of a node waits for looks."""
    node = make(0, 1, runs=True)
    node.meet(HashStore(), "127.0.0.1")
    node._sign = {"doing": "sleeps"}.popitem  # type: ignore[assignment]  # which cannot be made twice
    node.end("it has failed")
    with pytest.raises(NodeError, match=r"^node 0 cannot watch the others: KeyError"):
        node.check()
    node.leave()


KILLED = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from torch.distributed import TCPStore
from watch import Watch

Watch(1, 2, lambda: {"doing": "sleeps"}, lambda: None, 20.0).meet(TCPStore("127.0.0.1", int(sys.argv[2])), "127.0.0.1")
print("met", flush=True)
threading.Event().wait()
"""


def test_a_process_that_is_killed_is_named_with_the_last_that_it_said() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-c", KILLED, str(EXAMPLE), f"{store.port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        node = make(0, 2, 60.0)
        node.meet(store, "127.0.0.1")
        assert process.stdout
        assert process.stdout.readline() == "met\n"
        node.look()
        node.check()
        process.send_signal(signal.SIGKILL)
        process.wait()
    node.look()
    died = rf"^node 1 \(.*, process {process.pid}\) has died: its process was killed or crashed; .* said was: sleeps$"
    with pytest.raises(NodeError, match=died):
        node.check()


@pytest.mark.parametrize("said", [True, False])
def test_a_node_that_ends_because_another_died_is_not_blamed_if_it_says_so(three: list[Watch], said: bool) -> None:
    """However late the third one looks: both have ended by then."""
    die(three[1])
    three[2].look()
    assert blamed(three[2]) == [1]
    if said:
        three[2].look()
    die(three[2])
    three[0].look()
    assert blamed(three[0]) == ([1] if said else [1, 2])


def test_the_death_that_another_nodes_end_follows_from_is_found_before_that_end(three: list[Watch]) -> None:
    """The other node is still there, and says only that it was interrupted, as by a torchrun which has lost that of the dead one."""
    die(three[1])
    three[2]._ended = f"node 2 () has ended: {INTERRUPTED}"
    three[2].look()
    three[0].look()
    assert blamed(three[0]) == [1]


def test_a_death_that_comes_during_a_look_is_found_before_the_end_that_follows_from_it(three: list[Watch]) -> None:
    """The dead node has been asked in that look, the other not yet."""

    def get(key: str) -> bytes:
        three[0]._others[2] = after
        die(three[1])
        three[2].end(INTERRUPTED)
        three[2].look()
        return after.get(key)

    after = three[0]._others[2]
    three[0]._others[2] = cast(Store, SimpleNamespace(get=get))
    three[0].look()
    three[0].look()
    assert blamed(three[0]) == [1]


@pytest.mark.parametrize("why", ["the disk is full", INTERRUPTED, ""])
def test_a_node_that_ends_in_order_ends_the_others_unless_all_is_done(three: list[Watch], why: str) -> None:
    three[1].end(why)
    three[1].look()
    three[0].look()
    die(three[1])
    three[0].look()
    assert blamed(three[0]) == ([1] if why else [])
    assert why in (three[0].failure or "")


def test_a_node_that_ends_before_this_one_has_met_it_is_heard() -> None:
    """It may have given up a third one; its torchrun, and with node 0's the store of all, may be gone next."""
    made = make(2)
    made._own = HashStore()
    made._own.set("ended/0", "node 0 has waited 30 s, without node 1")
    made.look()
    assert made.failure == "node 0 has waited 30 s, without node 1"


@pytest.fixture
def running() -> Iterator[list[Watch]]:
    """Return the watches of two nodes that have met, with their threads."""
    made = [make(rank, 2, runs=True) for rank in range(2)]
    meet(made, HashStore())
    yield made
    for each in made:
        each.leave()


def test_what_came_before_an_interrupt_is_its_reason_and_what_comes_after_it_is_not(running: list[Watch]) -> None:
    running[1].end(INTERRUPTED)
    running[0].end(INTERRUPTED)
    assert running[1].failure is None
    assert blamed(running[0]) == [1]


class Unheard:
    """A client of a store whose machine does not answer until `answer`."""

    def __init__(self) -> None:
        self.asked, self.answered = threading.Event(), threading.Event()

    def set(self, key: str, value: str) -> None:
        pass

    def get(self, key: str) -> str:
        self.asked.set()
        self.answered.wait()
        return json.dumps({"doing": "trains"})


@pytest.mark.parametrize("stopped", [False, True])
def test_a_node_that_does_not_answer_is_given_up_after_a_silence_unless_this_one_was_stopped(
    three: list[Watch], monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    now, unheard = time.monotonic(), Unheard()
    looks = threading.Thread(target=three[0].look)

    def answered(seconds: float) -> None:
        if stopped:
            unheard.answered.set()
            looks.join()

    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: now, sleep=answered))
    three[0]._others[1] = unheard  # type: ignore[assignment]
    looks.start()
    unheard.asked.wait()
    now += SILENCE - 1
    three[0].give_up_silent()
    three[0].check()
    now += 2
    three[0].give_up_silent()
    try:
        if stopped:
            three[0].check()
        else:
            with pytest.raises(NodeError, match=r"^node 1 \(.*\) has not answered for 20 s.* said was: trains 1$"):
                three[0].check()
    finally:
        unheard.answered.set()
        looks.join()


def test_a_node_that_stops_answering_ends_a_process_whose_main_thread_waits_for_something_else() -> None:
    """As inside an evaluation, or inside the connections of torch.distributed."""
    result = run_forked(BUSY, [str(EXAMPLE)])
    assert (result.rc, result.stdout) == (1, "met\n")
    assert re.search(r"^node 0: stopped: node 1 \(.*\) has not answered for 2 s", result.stderr, re.MULTILINE)


BUSY = """
import sys, threading, time
sys.path.insert(0, sys.argv[1])
from torch.distributed import HashStore
import watch

watch.GRACE = 0.1
two = [watch.Watch(rank, 2, lambda: {"doing": "sleeps"}, lambda: None, 2.0) for rank in range(2)]
store = HashStore()
threads = [threading.Thread(target=each.meet, args=(store, "127.0.0.1")) for each in two]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
two[1].leave()

class Silent:
    set = get = lambda *_: threading.Event().wait()

two[0]._others[1] = Silent()
print("met", flush=True)
time.sleep(60)
print("went on")
"""


def test_a_node_that_stops_before_it_has_said_who_it_is_is_missed() -> None:
    """Its machine accepts the connection, and no answer comes."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        store = HashStore()
        store.set("here/1", json.dumps(["name", "127.0.0.1", deaf.getsockname()[1], "node 1 (there, process 7)"]))
        node = make(0, 2, silence=1.0)
        node._left.clear()
        node._heard = True

        def meeting() -> None:
            with pytest.raises(NodeError):
                node.meet(store, "127.0.0.1")

        thread = threading.Thread(target=meeting)
        thread.start()
        while node.failure is None and thread.is_alive():
            time.sleep(0.01)
    node.leave()
    thread.join()
    assert re.match("node 1 has not answered for 1 s", node.failure or "")


def test_others_hear_of_a_silence_from_the_node_that_gives_up(three: list[Watch]) -> None:
    """Its asking thread waits for the silent one, and asks nobody else."""
    unheard = Unheard()
    three[0]._others = {1: unheard, 2: three[0]._others[2]}  # type: ignore[dict-item]
    three[0]._silence, three[0]._heard = 0.0, True
    looks = threading.Thread(target=three[0].look)
    looks.start()
    unheard.asked.wait()
    three[0].give_up_silent()
    assert blamed(three[0]) == [1]
    three[2]._others = {}
    three[2].look()
    assert blamed(three[2]) == [1]
    unheard.answered.set()
    looks.join()


def test_who_is_interrupted_before_all_have_met_says_who_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "INTERRUPTED_WAITS", 0.1)
    store = HashStore()
    missing = "^node 0 has waited 0 s for all 2 nodes to start, without node 1: this one was interrupted meanwhile"
    with pytest.raises(NodeError, match=missing):
        make(0, 2).meet(store, "127.0.0.1", lambda: True)


def test_who_is_interrupted_before_all_have_met_still_meets_those_who_come() -> None:
    store = HashStore()
    two = [make(rank, 2) for rank in range(2)]
    late = threading.Timer(0.2, two[1].meet, (store, "127.0.0.1"))
    late.start()
    assert two[0].meet(store, "127.0.0.1", lambda: True)
    late.join()


def test_a_node_that_cannot_listen_blames_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise DistNetworkError("too many open files")

    monkeypatch.setattr(watch, "TCPStore", full)
    with pytest.raises(NodeError, match=r"^node 0 cannot listen to the others: too many open files$"):
        make(0).meet(HashStore(), "127.0.0.1")


def test_processes_that_are_started_again_find_each_other_in_the_old_store_and_not_those_before() -> None:
    store = HashStore()
    names = []
    for _ in range(2):
        made = [make(rank) for rank in range(3)]
        names.append(set(meet(made, store)))
        for each in made:
            del each._own  # as it goes with its process
    assert [len(found) for found in names] == [1, 1]
    assert names[0] != names[1]
    # With the keys of those before in the store, one that does not come is still missed.
    with pytest.raises(NodeError, match=r"for all 3 nodes to start, without node 1 and 2"):
        make(0, silence=0.2).meet(store, "127.0.0.1")


def test_another_store_at_the_address_of_a_dead_nodes_is_not_taken_for_it() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    card = json.dumps(["name", "127.0.0.1", store.port, "node 1"])
    assert watch._client(card) is None
    store.set(card, "")
    assert watch._client(card)


def test_an_error_of_the_watch_itself_ends_the_node(three: list[Watch]) -> None:
    def wrong() -> dict[str, Any]:
        three[0].leave()  # after this look
        raise ValueError("no such thread")

    three[0]._sign = wrong
    three[0]._left.clear()
    three[0]._run()
    with pytest.raises(NodeError, match=r"node 0 cannot watch the others: ValueError\('no such thread'\)"):
        three[0].check()


DEAF = """
import sys, time
sys.path.insert(0, sys.argv[1])
import watch

watch.GRACE = 0.1
made = watch.Watch(0, 1, dict, lambda: None, 20.0)
made._heard = sys.argv[2] == "heard"
made._fail("node 1 has died")
time.sleep(1 if made._heard else 60)
print("went on")
"""


@pytest.mark.parametrize(
    ("hears", "code", "out", "error"),
    [("heard", 0, "went on\n", ""), ("deaf", 1, "", "node 0: stopped: node 1 has died\n")],
)
def test_a_main_thread_that_does_not_hear_of_it_does_not_keep_the_process(
    hears: str, code: int, out: str, error: str
) -> None:
    result = run_forked(DEAF, [str(EXAMPLE), hears])
    assert (result.rc, result.stdout, result.stderr) == (code, out, error)
