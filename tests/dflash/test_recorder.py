"""What a run says of itself: the numbers of each step are those of training, threads and memory are told from time to time."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="the example's target is a transformers model")

import recorder
import train
from drafter import new_drafter
from metrics import scalars
from monitor import COMPILES, WAITS_TO_COMPILE
from optimizer import OptimizerName, schedule
from recorder import Recorder
from replica import Replica
from target import Target
from tests.dflash.small import SMALL, TEXT
from work import make_work

CPU = torch.device("cpu")
CONFIG = replace(SMALL, targets=1, steps=6, warmup_ratio=0.5, lr=0.01, muon_lr=0.02)

Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return Target(tiny_target, (0, 2, 3), CPU)


def recorded(training: train.Training, every: float = math.inf) -> tuple[Recorder, Lines]:
    lines: Lines = []

    def write(kind: str, **values: Any) -> None:
        lines.append({"kind": kind, **values})

    return Recorder(training, write, lambda: 100.0 + training.seconds, every), lines


def of_kind(lines: Lines, kind: str) -> Lines:
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.parametrize(("name", "rates"), [("muon", {"lr": 0.01, "muon_lr": 0.02}), ("adamw", {"lr": 0.01})])
def test_a_step_is_told_with_the_numbers_it_was_made_with(
    target: Target, name: OptimizerName, rates: dict[str, float]
) -> None:
    config = replace(CONFIG, optimizer=name)
    training = train.Training(config, TEXT, [target])
    made, lines = recorded(training)
    training.run(made.step)
    steps = of_kind(lines, "step")
    assert [line["step"] for line in steps] == list(range(6))
    assert [line["loss"] for line in steps] == training.replicas[0].losses
    for option, peak in rates.items():
        expected = [peak * schedule(step, steps=6, warmup_steps=3) for step in range(6)]
        assert [line[option] for line in steps] == pytest.approx(expected)
    assert ("muon_lr" in steps[0]) is ("muon_lr" in rates)

    # The first step again, by one thread: the norm is that of the replicas' mean gradient.
    gradients: list[list[torch.Tensor]] = []
    for index in range(config.drafters):
        drafter = new_drafter(config, target.shape, 3, CPU)
        replica = Replica(config, index, drafter, target.vocabulary(CPU), target.language.mask_id)
        replica.gradients(make_work(config, TEXT, target, 0, index), 0)
        gradients.append([p.grad for p in drafter.parameters() if p.grad is not None])
    norm = nn.utils.get_total_norm([sum(same) / len(same) for same in zip(*gradients, strict=True)])
    assert steps[0]["gradient_norm"] == pytest.approx(float(norm), rel=1e-5)


def test_a_step_tells_how_much_work_waits_for_each_replica(target: Target) -> None:
    training = train.Training(CONFIG, TEXT, [target])
    work = make_work(CONFIG, TEXT, target, 0, 0)
    training.queues[1].put(0, work)
    training.queues[1].put(1, work)
    made, lines = recorded(training)
    made.step(0, {"loss": 2.0, "accuracy_by_position": [0.5, 0.25]})
    (line,) = lines
    assert (line["waiting"], line["queues"]) == (2, {"drafter-0": 0, "drafter-1": 2})
    assert line["accuracy_by_position"] == [0.5, 0.25]  # whatever training tells goes along
    assert line["tokens_per_second"] == 0.0


@pytest.mark.parametrize(("every", "often"), [(0.0, True), (math.inf, False)])
def test_threads_and_memory_are_told_from_time_to_time(target: Target, every: float, often: bool) -> None:
    training = train.Training(CONFIG, TEXT, [target])
    made, lines = recorded(training, every)
    ticks: list[dict[str, str]] = []
    training.run(made.step, lambda: ticks.append(made.tick()))
    assert len(of_kind(lines, "threads")) == len(of_kind(lines, "memory")) == (len(ticks) if often else 0)
    made.rates()
    (line,), (memory,) = of_kind(lines, "threads")[-1:], of_kind(lines, "memory")[-1:]
    names = ["target-0", "drafter-0", "drafter-1"]
    assert [name for name, value in line.items() if isinstance(value, dict)] == names
    assert (line["step"], memory["step"], memory["device"]) == (6, 6, "cpu")
    assert line["seconds"] > 100.0  # those before a resume count
    for name in names:
        assert line[name]["tokens"] == training.monitor.threads[name].tokens > 0
        assert 0.0 <= line[name]["idle_share"] <= 1.0
    assert "threads/drafter-1/idle_share" in dict(scalars(line.pop("kind"), line))
    assert dict(scalars(memory.pop("kind"), memory))["memory/cpu/peak_resident"] > 1e6


def test_compiles_and_waits_for_them_are_told_apart(target: Target) -> None:
    training = train.Training(CONFIG, TEXT, [target])
    training.monitor.add("drafter-0")
    thread = training.monitor.threads["drafter-0"]
    thread.seconds = {COMPILES: 4.0, WAITS_TO_COMPILE: 3.0, "waits for work": 2.0, "trains": 1.0}
    thread.ended = thread.since + 10.0
    made, lines = recorded(training)
    made.rates()
    told = of_kind(lines, "threads")[0]["drafter-0"]
    assert (told["compile_seconds"], told["wait_for_compile_seconds"], told["idle_share"]) == (4.0, 3.0, 0.5)
    said = recorder.summary(training, [])
    assert said["threads"]["drafter-0"]["idle_share"] == 0.5
    assert said["memory"]["cpu"]["peak_resident"] > 1e6


def test_a_thread_is_told_of_when_it_does_something_else(target: Target) -> None:
    training = train.Training(CONFIG, TEXT, [target])
    training.monitor.add("target-0")
    made, lines = recorded(training)
    for state in ("answers", "answers", "waits for room"):
        training.monitor.threads["target-0"].state = state
        made.tick()
    assert [line["state"] for line in lines] == ["answers", "waits for room"]


def test_tokens_a_second_do_not_count_an_evaluation_after_the_last_step(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = train.Training(CONFIG, TEXT, [target])
    training.run(lambda step, numbers: None)
    assert training.tokens == 2 * 6 * 2 * 16
    start = training.monitor.threads["drafter-0"].since
    monkeypatch.setattr(training, "_started", start)
    for name, thread in training.monitor.threads.items():
        thread.ended = start + (4.0 if name == "drafter-1" else 2.0)
    monkeypatch.setattr(training, "_ended", start + 1000.0)
    assert training.tokens_per_second == pytest.approx(training.tokens / 4.0)
