"""Several processes under torchrun train one drafter: the same bits on all, errors that name who is missing, and a way on."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch has no list of what it exports there

pytest.importorskip("transformers", reason="the example's target is a transformers model")
pytest.importorskip("rich", reason="the example's display")
pytest.importorskip("matplotlib", reason="the example's plots")

import demo
import nodes
from checkpoints import MODEL, OPTIMIZER, by_step
from config import Config, ConfigError
from nodes import Connected, NodeError
from run_folder import CHECKPOINTS, METRICS, METRICS_OF_NODE, SUMMARY
from safecompile import fx_trace_lock
from tests.dflash.conftest import EXAMPLE

pytestmark = pytest.mark.hang_timeout(1200)  # several runs of several processes each, on whatever cores are left

ROOT = Path(__file__).parents[2]
LIMIT = 300.0
"""Seconds after which a run counts as hung; the errors that are asked for come far sooner."""
STEPS, SAVE_EVERY = 8, 3
OPTIONS = (
    "--device cpu --taps 0,2,3 --layers 1 --block-size 4 --prompt-length 8 --response-length 8 --sequences 4 --uses 2 --batch 2 "
    "--anchors 4 --chunk-blocks 2 --targets 1 --eval-prompts 1 --eval-prompt-length 8 --eval-new-tokens 8 --node-timeout 20 "
    f"--steps {STEPS} --save-every {SAVE_EVERY}"
).split()


class Ended(NamedTuple):
    """Processes that torchrun has started, when all are over."""

    out: Path
    output: str

    def weights(self) -> list[dict[str, bytes]]:
        """Return the bits of all replicas' weights, in the order of their numbers."""
        return [bits(path) for path in sorted(self.out.glob("weights-*"))]


def bits(path: Path) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(path).items()}


Start = Callable[..., Ended]


@pytest.fixture
def start(tiny_target: Path, text: Path, tmp_path: Path) -> Start:
    """Return a function that runs the demo on several nodes of ``drafters`` threads each, and waits for the end of all."""

    def run(
        nodes: int, drafters: int, folder: Path, *options: str, agents: bool = False, restarts: int = 0, **faults: Any
    ) -> Ended:
        out = tmp_path / f"out-{len(list(tmp_path.glob('out-*')))}"
        out.mkdir()
        given = [*OPTIONS, "--target", f"{tiny_target}", "--text", f"{text}", "--drafters", f"{drafters}"]
        program = [f"{ROOT}/tests/dflash/node.py", f"{out}", json.dumps(faults), *given, "--run", f"{folder}", *options]
        launch = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", f"{restarts}"]
        if agents:  # one for each node, as on machines of their own: none sees the others' processes end
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                place = f"127.0.0.1:{free.getsockname()[1]}"
            meet = [
                "--rdzv-backend",
                "c10d",
                "--rdzv-endpoint",
                place,
                "--rdzv-id",
                "test",
                "--local-addr",
                "127.0.0.1",
            ]
            commands = [[*launch, "--nnodes", f"{nodes}", "--nproc-per-node", "1", *meet, "--", *program]] * nodes
        else:
            commands = [[*launch, "--standalone", "--nnodes", "1", "--nproc-per-node", f"{nodes}", "--", *program]]
        path = os.pathsep.join(filter(None, [str(ROOT), str(EXAMPLE), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        with (out / "output").open("w") as output:
            begun = [
                subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
                for command in commands
            ]
        try:
            for process in begun:
                process.wait(LIMIT)
        finally:
            for process in begun:
                process.terminate()  # torchrun ends its processes
                process.wait()
        return Ended(out, (out / "output").read_text())

    return run


def status(folder: Path) -> Any:
    return json.loads((folder / SUMMARY).read_text())["status"]


def last(folder: Path) -> dict[str, bytes]:
    step, path = by_step(folder / CHECKPOINTS)[-1]
    assert step == STEPS
    return bits(path / MODEL) | bits(path / OPTIMIZER)


def steps(folder: Path, node: int = 0) -> list[dict[str, Any]]:
    """Return what a node's metrics say of its steps, without what depends on time."""
    path = folder / (METRICS_OF_NODE.format(node) if node else METRICS)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    names = ("step", "loss", "gradient_norm", "eal")
    return [{name: line[name] for name in names} for line in lines if line["kind"] == "step"]


def largest_difference(one: Path, other: Path) -> float:
    pair = [load_file(by_step(folder / CHECKPOINTS)[-1][1] / MODEL) for folder in (one, other)]
    return max(float((pair[0][name] - pair[1][name]).abs().max()) for name in pair[0])


@pytest.mark.nodes
@pytest.mark.parametrize("count", [2, 3])
def test_all_nodes_have_the_bits_of_one_another_and_nearly_those_of_one_process_with_all_replicas(
    start: Start, tmp_path: Path, count: int
) -> None:
    ended = start(count, 2, tmp_path / "several")
    assert status(tmp_path / "several") == "complete", ended.output
    weights = ended.weights()
    assert len(weights) == 2 * count
    assert all(each == weights[0] for each in weights)

    alone = start(1, 2 * count, tmp_path / "alone")
    assert status(tmp_path / "alone") == "complete", alone.output
    # Gradients are added up in another order; a step moves a weight by up to 4e-2.
    assert largest_difference(tmp_path / "several", tmp_path / "alone") < 1e-4
    summary = json.loads((tmp_path / "several" / SUMMARY).read_text())
    assert [node["graphs"] for node in summary["nodes"]] == [3] * count
    assert summary["graphs"] == {"compiled_by_all_threads": 3, "compiled_by_one_thread": 3}


@pytest.mark.nodes
def test_nodes_that_learn_from_the_same_or_do_not_average_are_seen(start: Start, tmp_path: Path) -> None:
    start(1, 2, tmp_path / "alone")
    start(2, 1, tmp_path / "same", no_offset=True)
    assert largest_difference(tmp_path / "same", tmp_path / "alone") > 1e-2
    ended = start(2, 1, tmp_path / "apart", no_mean=True)
    assert "weights after step 3 are not the same on nodes 0 and 1" in ended.output
    assert not (tmp_path / "apart" / CHECKPOINTS).exists()
    unseen = start(2, 1, tmp_path / "unseen", no_mean=True, no_comparison=True).weights()
    assert len(unseen) == 2
    assert unseen[0] != unseen[1]


@pytest.mark.nodes
@pytest.mark.parametrize("ended_by", [0, 1])
def test_a_resume_is_exact_with_as_many_nodes_and_refused_with_others(
    start: Start, tmp_path: Path, ended_by: int
) -> None:
    """Whether node 0 is interrupted, which saves at that step, or another one, whose end node 0 hears of."""
    start(2, 2, tmp_path / "whole")
    folder = tmp_path / "run"
    first = start(2, 2, folder, agents=True, terminate=[ended_by, 5])
    assert f"node {ended_by}: interrupted" in first.output
    assert f"node {1 - ended_by}: stopped: " in first.output
    assert "has ended: it was interrupted" in first.output
    assert status(folder) != "complete"
    saved = [step for step, _ in by_step(folder / CHECKPOINTS)]
    assert 3 <= saved[-1] < STEPS

    refused = start(3, 2, folder, "--resume")
    assert "nodes are 2 there and 3 here" in refused.output
    assert [step for step, _ in by_step(folder / CHECKPOINTS)] == saved

    forgot = start(2, 2, folder, "--resume", forgets_optimizer=1)
    assert "are not the same on nodes 0 and 1" in forgot.output

    resumed = start(2, 2, folder, "--resume")
    assert status(folder) == "complete", resumed.output
    assert last(folder) == last(tmp_path / "whole")
    assert steps(folder) == steps(tmp_path / "whole")
    # Node 1 may have been ended before it reported a step that node 0 has saved.
    mine, there = ({line["step"]: line for line in steps(f, 1)} for f in (folder, tmp_path / "whole"))
    assert len(steps(folder, 1)) == len(mine) >= STEPS - 1
    assert mine.items() <= there.items()
    assert mine[0] != steps(folder)[0]


@pytest.mark.nodes
@pytest.mark.parametrize("killed", [0, 1])
def test_the_others_end_and_say_which_node_was_killed_and_torchrun_goes_on_from_the_last_checkpoint(
    start: Start, tmp_path: Path, killed: int
) -> None:
    start(3, 1, tmp_path / "whole")
    folder = tmp_path / "run"
    ended = start(3, 1, folder, agents=True, kill=[killed, 5])
    for node in {0, 1, 2} - {killed}:
        said = [line for line in ended.output.splitlines() if line.startswith(f"node {node}: stopped: ")]
        assert len(said) == 1, ended.output
        assert f"node {killed} (" in said[0]
        assert "has not been heard of" in said[0]
    assert by_step(folder / CHECKPOINTS)

    again = start(3, 1, tmp_path / "again", "--resume", restarts=2, kill=[killed, 5])
    # torchrun interrupts node 0, which then saves all its steps, unless that is the one that was killed.
    assert re.search(r"resumes at step [3-6] of 8", again.output), again.output
    assert status(tmp_path / "again") == "complete", again.output
    assert last(tmp_path / "again") == last(tmp_path / "whole")


@pytest.mark.nodes
@pytest.mark.parametrize("slow", [0, 1])
def test_nodes_that_compile_at_different_times_wait_for_each_other_and_compile_once(
    start: Start, tmp_path: Path, slow: int
) -> None:
    ended = start(2, 2, tmp_path / "run", compiles_when_others_wait=slow)
    assert (ended.out / "waits").exists()
    assert status(tmp_path / "run") == "complete", ended.output
    assert [(ended.out / f"graphs-{rank}").read_text() for rank in (0, 1)] == ["3", "3"]


@pytest.mark.nodes
def test_a_compile_that_takes_too_long_is_an_error_that_names_node_thread_and_callable(
    start: Start, tmp_path: Path
) -> None:
    # Nobody says that a node waits, so that the compile never ends.
    ended = start(2, 1, tmp_path / "run", "--collective-timeout", "20", agents=True, compiles_forever=1)
    assert "thread 'drafter-0' of node 0 has waited" in ended.output
    assert "for the mean of gradients, without node 1 (" in ended.output
    assert "; thread 'target-0' is compiling choose (" in ended.output


@pytest.mark.nodes
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"1": ["--seed", "1"]}, "node 1: error: node 1 differs from node 0: seed is 0 there and 1 here"),
        ({"1": ["--batch", "9"]}, "error: batch is 9"),
        ({"0": ["--steps", "0"]}, "error: steps is 0"),
    ],
)
def test_what_one_node_refuses_ends_all_before_any_work(
    start: Start, tmp_path: Path, options: dict[str, list[str]], says: str
) -> None:
    ended = start(2, 1, tmp_path / "run", options=options)
    assert says in ended.output
    assert not (tmp_path / "run" / SUMMARY).exists()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Connected]:
    """Return a node of one, in this process, that gives no signs of life."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = HashStore()
    made = Connected(lambda: store, 0, 1, 0, Config(), "gloo")
    made._left.set()
    yield made
    torch.distributed.destroy_process_group()


def test_no_gradient_is_exchanged_inside_a_compile(alone: Connected) -> None:
    tensor = torch.ones(3)
    with fx_trace_lock, pytest.raises(RuntimeError, match="the mean would be averaged over the nodes inside a compile"):
        alone.mean_([tensor], "the mean")
    alone.mean_([tensor], "the mean")
    assert torch.equal(tensor, torch.ones(3))


def sign(beat: int, **changes: Any) -> dict[str, Any]:
    return {
        "beat": beat,
        "who": "there, process 7",
        "doing": "trains",
        "waits": 0,
        "ended": None,
        "numbers": {},
        **changes,
    }


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time, in a list of one, that nodes go by."""
    now = [time.monotonic()]
    monkeypatch.setattr(nodes, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    return now


def test_a_node_is_dead_after_a_silence_and_not_before(alone: Connected, clock: list[float]) -> None:
    for beat in range(100):
        alone._look([sign(beat), sign(beat)])
        clock[0] += 1
    for _ in range(30):
        alone._look([sign(100), sign(99)])
        alone.check()
        clock[0] += 1
    alone._look([sign(101), sign(99)])
    with pytest.raises(
        NodeError, match=r"node 1 \(there, process 7\) has not been heard of for 31 s.* said was: trains"
    ):
        alone.check()


def test_the_silence_of_others_does_not_count_while_this_process_was_stopped(
    alone: Connected, clock: list[float]
) -> None:
    alone._look([sign(0), sign(0)])
    clock[0] += 1000
    alone._look([sign(1), sign(0)])
    alone.check()
    for _ in range(31):
        clock[0] += 1
        alone._look([sign(1), sign(0)])
    with pytest.raises(NodeError, match="node 1"):
        alone.check()


@pytest.mark.parametrize(("ended", "raised"), [("the disk is full", True), ("", False), (None, False)])
def test_a_node_that_has_ended_with_an_error_ends_the_others(alone: Connected, ended: str | None, raised: bool) -> None:
    alone._look([sign(0), sign(0, ended=ended)])
    with pytest.raises(NodeError) if raised else nullcontext() as found:
        alone.check()
    if found:
        assert "node 1 (there, process 7) has ended: the disk is full" in str(found.value)


def test_a_node_that_torchrun_ended_is_not_blamed_for_one_that_died(alone: Connected, clock: list[float]) -> None:
    for beat in range(4):
        alone._look([sign(beat), sign(0), sign(beat, ended=nodes.INTERRUPTED)])
        alone.check()
        clock[0] += 1
    alone._look([sign(4), sign(0), sign(4, ended=nodes.INTERRUPTED)])
    with pytest.raises(NodeError, match=r"^node 1 \(there, process 7\) has not been heard of for 4 s"):
        alone.check()


def test_a_node_that_was_interrupted_alone_ends_the_others(alone: Connected, clock: list[float]) -> None:
    for beat in range(7):
        alone._look([sign(beat), sign(beat), sign(beat, ended=nodes.INTERRUPTED)])
        clock[0] += 1
    with pytest.raises(NodeError, match=r"^node 2 \(there, process 7\) has ended: it was interrupted"):
        alone.check()


def test_a_wait_names_the_nodes_that_have_not_come_to_it(alone: Connected, clock: list[float]) -> None:
    alone._begin("the mean of gradients", 20)
    signs = [sign(0, waits=2), sign(0, waits=2), sign(0, waits=1, doing="compiles")]
    alone._look(signs)
    alone.check()
    clock[0] += 21
    alone._look(signs)
    with pytest.raises(
        NodeError, match=r"'MainThread' of node 0 has waited 21 s for the mean of gradients, without node 2 \("
    ) as raised:
        alone.check()
    assert "node 1 (" not in str(raised.value)


def test_processes_that_are_started_again_agree_on_a_new_name_in_the_old_store() -> None:
    store = HashStore()
    names: list[list[str]] = [[], []]
    for found in names:
        threads = [
            threading.Thread(
                target=lambda rank, found: found.append(nodes._meet(store, rank, 3, 60)), args=(rank, found)
            )
            for rank in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [len(found) for found in names] == [3, 3]
    assert [len(set(found)) for found in names] == [1, 1]
    assert names[0][0] != names[1][0]
    # With the keys of those before in the store, one that does not come is still missed.
    with pytest.raises(NodeError, match=r"for all 3 nodes to start, without node 1 and 2"):
        nodes._meet(store, 0, 3, 0.2)


def test_torchrun_starts_again_with_resume_only() -> None:
    restarted = nodes.Nodes(restarts=3)
    with pytest.raises(ConfigError, match="--restart with torchrun's --max-restarts would throw away"):
        demo.prepare(Config(), Path("nowhere"), "restart", restarted)
