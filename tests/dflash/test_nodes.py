"""Several processes under torchrun train one drafter: the same bits on all, errors that name who is missing, and a way on."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
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

import nodes
from checkpoints import MODEL, OPTIMIZER, by_step
from config import Config, ConfigError
from nodes import Connected
from prepare import prepare
from run_folder import CHECKPOINTS, METRICS, METRICS_OF_NODE, SUMMARY
from safecompile import fx_trace_lock
from tests.dflash.conftest import EXAMPLE
from watch import NodeError

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
    """Processes that torchrun has started, when all are over: their run folder, what they left in another, and what they said."""

    folder: Path
    out: Path
    output: str

    def weights(self) -> list[dict[str, bytes]]:
        """Return the bits of all replicas' weights, in the order of their numbers."""
        return [bits(path) for path in sorted(self.out.glob("weights-*"))]


def bits(path: Path) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(path).items()}


Start = Callable[..., Ended]


@pytest.fixture(scope="module")
def start(tiny_target: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Return a function that runs the demo on several nodes of ``drafters`` threads each, and waits for the end of all."""

    def run(
        nodes: int, drafters: int, folder: Path, *options: str, agents: bool = False, restarts: int = 0, **faults: Any
    ) -> Ended:
        out = tmp_path_factory.mktemp("out")
        given = [*OPTIONS, "--target", f"{tiny_target}", "--text", f"{text}", "--drafters", f"{drafters}"]
        program = [f"{ROOT}/tests/dflash/node.py", f"{out}", json.dumps(faults), *given, "--run", f"{folder}", *options]
        launch = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", f"{restarts}"]
        if (
            agents
        ):  # one for each node, as on machines of their own: none sees the others' processes end, nor NCCL their GPU
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
        environment |= {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
        with (out / "output").open("w") as output:
            begun = [
                subprocess.Popen(
                    command,
                    stdout=output,
                    stderr=output,
                    env=environment | {"NCCL_HOSTID": f"machine-{number}"},
                    start_new_session=True,
                )
                for number, command in enumerate(commands)
            ]
        try:
            for process in begun:
                process.wait(LIMIT)
        finally:
            for process in begun:
                process.terminate()  # torchrun ends its processes
                process.wait()
        return Ended(folder, out, (out / "output").read_text())

    return run


Whole = Callable[[int, int], Ended]


@pytest.fixture(scope="module")
def whole(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Return a function that makes a run which nothing stops, once for each number of nodes and of drafters on each."""

    @cache
    def run(nodes: int, drafters: int) -> Ended:
        ended = start(nodes, drafters, tmp_path_factory.mktemp("whole") / "run")
        assert status(ended.folder) == "complete", ended.output
        return ended

    return run


@pytest.fixture(scope="module")
def interrupted(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Ended]:
    """Return a function that makes a run which ends because one of two nodes is interrupted in its fifth step, once for each of them."""

    @cache
    def run(ended_by: int) -> Ended:
        return start(2, 2, tmp_path_factory.mktemp("interrupted") / "run", agents=True, terminate=[ended_by, 5])

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


def exact(ended: Ended, whole: Ended) -> None:
    """Make sure that a run which was stopped and went on ends like one that nothing stopped."""
    assert status(ended.folder) == "complete", ended.output
    assert last(ended.folder) == last(whole.folder)
    assert steps(ended.folder) == steps(whole.folder)


@pytest.mark.nodes
@pytest.mark.parametrize("count", [2, 3])
def test_all_nodes_have_the_bits_of_one_another_and_nearly_those_of_one_process_with_all_replicas(
    whole: Whole, count: int
) -> None:
    several, alone = whole(count, 2), whole(1, 2 * count)
    weights = several.weights()
    assert len(weights) == 2 * count
    assert all(each == weights[0] for each in weights)
    # Gradients are added up in another order; a step moves a weight by up to 4e-2.
    assert largest_difference(several.folder, alone.folder) < 1e-4
    summary = json.loads((several.folder / SUMMARY).read_text())
    assert [node["graphs"] for node in summary["nodes"]] == [3] * count
    assert summary["graphs"] == {"compiled_by_all_threads": 3, "compiled_by_one_thread": 3}


@pytest.mark.nodes
def test_nodes_that_learn_from_the_same_or_do_not_average_are_seen(start: Start, whole: Whole, tmp_path: Path) -> None:
    start(2, 1, tmp_path / "same", no_offset=True)
    assert largest_difference(tmp_path / "same", whole(1, 2).folder) > 1e-2
    ended = start(2, 1, tmp_path / "apart", no_mean=True)
    assert "weights after step 3 are not the same on nodes 0 and 1" in ended.output
    assert not (tmp_path / "apart" / CHECKPOINTS).exists()
    unseen = start(2, 1, tmp_path / "unseen", no_mean=True, no_comparison=True).weights()
    assert len(unseen) == 2
    assert unseen[0] != unseen[1]


@pytest.mark.nodes
@pytest.mark.parametrize("ended_by", [0, 1])
def test_a_resume_is_exact_with_as_many_nodes(
    start: Start, whole: Whole, interrupted: Callable[[int], Ended], tmp_path: Path, ended_by: int
) -> None:
    """Whether node 0 is interrupted, which saves at that step, or another one, whose end node 0 hears of."""
    first = interrupted(ended_by)
    assert f"node {ended_by}: interrupted" in first.output
    said = [line for line in first.output.splitlines() if line.startswith(f"node {1 - ended_by}: stopped: ")]
    assert len(said) == 1, first.output
    assert re.findall(r"node (\d) \(\S+, process \d+\) has ended: it was interrupted$", said[0]) == [f"{ended_by}"]
    assert status(first.folder) != "complete"

    folder = shutil.copytree(first.folder, tmp_path / "run")
    exact(start(2, 2, folder, "--resume"), whole(2, 2))
    # Node 1 may have been ended before it reported a step that node 0 has saved.
    mine, there = ({line["step"]: line for line in steps(f, 1)} for f in (folder, whole(2, 2).folder))
    assert len(steps(folder, 1)) == len(mine) >= STEPS - 1
    assert mine.items() <= there.items()
    assert mine[0] != steps(folder)[0]


@pytest.mark.nodes
def test_a_resume_that_would_not_be_exact_is_refused_or_seen(
    start: Start, interrupted: Callable[[int], Ended], tmp_path: Path
) -> None:
    folder = shutil.copytree(interrupted(1).folder, tmp_path / "run")
    saved = [step for step, _ in by_step(folder / CHECKPOINTS)]
    assert 3 <= saved[-1] < STEPS
    refused = start(3, 2, folder, "--resume")
    assert "nodes are 2 there and 3 here" in refused.output
    forgot = start(2, 2, folder, "--resume", forgets_optimizer=1)
    assert "are not the same on nodes 0 and 1" in forgot.output
    assert [step for step, _ in by_step(folder / CHECKPOINTS)] == saved


@pytest.mark.nodes
@pytest.mark.parametrize("killed", [0, 1])
def test_the_others_end_and_say_which_node_was_killed_and_torchrun_goes_on_from_the_last_checkpoint(
    start: Start, whole: Whole, tmp_path: Path, killed: int
) -> None:
    ended = start(3, 1, tmp_path / "run", agents=True, kill=[killed, 5])
    for node in {0, 1, 2} - {killed}:
        said = [line for line in ended.output.splitlines() if line.startswith(f"node {node}: stopped: ")]
        assert len(said) == 1, ended.output
        died = r"node (\d) \(\S+, process \d+\) has died: its process was killed or crashed; the last it said was: "
        assert re.findall(died, said[0]) == [f"{killed}"]
    assert by_step(tmp_path / "run" / CHECKPOINTS)

    again = start(3, 1, tmp_path / "again", "--resume", restarts=2, kill=[killed, 5])
    # torchrun interrupts node 0, which then saves all its steps, unless that is the one that was killed.
    assert re.search(r"resumes at step [3-6] of 8", again.output), again.output
    exact(again, whole(3, 1))


ON_A_GPU = ("--device", "cuda:0", "--attention", "dense")


@pytest.mark.gpu
def test_nccl_gives_all_nodes_the_bits_of_one_another_and_nearly_those_of_one_process(
    start: Start, tmp_path: Path
) -> None:
    several = start(2, 2, tmp_path / "several", *ON_A_GPU, agents=True)
    assert status(several.folder) == "complete", several.output
    weights = several.weights()
    assert len(weights) == 4
    assert all(each == weights[0] for each in weights)
    alone = start(1, 4, tmp_path / "alone", *ON_A_GPU)
    assert largest_difference(several.folder, alone.folder) < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("killed", [0, 1])
def test_a_node_whose_gpu_waits_for_a_killed_one_ends_and_says_which(start: Start, tmp_path: Path, killed: int) -> None:
    ended = start(2, 2, tmp_path / "run", *ON_A_GPU, agents=True, kill=[killed, 5])
    said = [line for line in ended.output.splitlines() if line.startswith(f"node {1 - killed}: stopped: ")]
    assert len(said) == 1, ended.output
    assert re.findall(r"node (\d) \(\S+, process \d+\) has died: its process was killed", said[0]) == [f"{killed}"]


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
    """Return a node of one, in this process."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = HashStore()
    made = Connected(lambda: store, lambda: "127.0.0.1", 0, 1, 0, Config(), "gloo")
    made.meet()
    yield made
    made.leave()


def test_no_gradient_is_exchanged_inside_a_compile(alone: Connected) -> None:
    tensor = torch.ones(3)
    with fx_trace_lock, pytest.raises(RuntimeError, match="the mean would be averaged over the nodes inside a compile"):
        alone.mean_([tensor], "the mean")
    alone.mean_([tensor], "the mean")
    assert torch.equal(tensor, torch.ones(3))


def test_a_wait_names_the_nodes_that_have_not_come_to_it(alone: Connected, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(nodes, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(alone, "_waits", 0)
    alone._watch.names |= {rank: f"node {rank} (there, process 7)" for rank in (1, 2)}
    alone._watch.said = {1: {"waits": 1, "doing": "waits"}, 2: {"waits": 0, "doing": "compiles"}}
    with alone._waiting("the mean of gradients", 20):
        now += 19
        assert alone._overdue() is None
        now += 2
        assert (
            "'MainThread' of node 0 has waited 21 s for the mean of gradients, without node 2 (there, process 7), which compiles"
            in (alone._overdue() or "")
        )
        assert "node 1 (" not in (alone._overdue() or "")
    assert alone._overdue() is None


def test_a_connection_that_breaks_is_an_error_that_names_the_node_which_has_died(
    alone: Connected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alone._watch, "look_again", lambda: alone._watch._fail("node 1 has died"))
    with pytest.raises(NodeError, match=r"^node 1 has died$"), alone._waiting("the mean", 20):
        raise RuntimeError("Connection closed by peer")


def test_torchrun_starts_again_with_resume_only() -> None:
    restarted = nodes.Nodes(restarts=3)
    with pytest.raises(ConfigError, match="--restart with torchrun's --max-restarts would throw away"):
        prepare(Config(), Path("nowhere"), "restart", restarted)
