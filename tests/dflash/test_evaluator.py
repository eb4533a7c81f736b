"""Evaluation in a thread of its own: it measures what was handed over, says what it left out, and changes nothing in training."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("transformers", reason="the example's target is a transformers model")

import evaluate
import evaluator
import train
from checkpoints import Snapshot
from config import Config
from drafter import Drafter, new_drafter
from evaluate import Evaluation, Reference
from evaluator import Evaluator
from monitor import Monitor
from pipeline import Stopped, WorkerError
from replica import Numbers
from speculative import NO_REGRET, Decoded, DFlashProposer
from target import Target
from tests.dflash.small import SMALL, TEXT

CPU = torch.device("cpu")
CONFIG = replace(SMALL, steps=8, eval_every=2, eval_prompts=3, eval_prompt_length=8, eval_new_tokens=8, queue_depth=1)

Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def targets(tiny_target: Path) -> list[Target]:
    return [Target(tiny_target, (0, 2, 3), CPU) for _ in range(2)]


@pytest.fixture(scope="module")
def references(targets: list[Target]) -> list[Reference]:
    return evaluate.references(CONFIG, TEXT, targets[0])


def untrained(targets: list[Target]) -> Drafter:
    return new_drafter(CONFIG, targets[0].shape, 3, CPU)


def prepared(
    targets: list[Target], references: list[Reference], config: Config = CONFIG, snapshot: Snapshot | None = None
) -> tuple[train.Training, Evaluator, Lines]:
    """Return training with an evaluator, and where its metrics go."""
    lines: Lines = []

    def write(kind: str, **values: Any) -> None:
        lines.append({"kind": kind, **values})

    made = Evaluator(config, targets[0], untrained(targets), references, write)
    return train.Training(config, TEXT, targets, snapshot, evaluator=made), made, lines


def nothing(step: int, numbers: Numbers) -> None:
    pass


def trained(targets: list[Target], steps: int) -> train.Training:
    """Return training of that many steps of the configuration's, without evaluations."""
    training = train.Training(CONFIG, TEXT, targets)

    def stop(step: int, numbers: Numbers) -> None:
        if step + 1 == steps:
            raise InterruptedError("enough")

    with pytest.raises(WorkerError, match="enough"):
        training.run(stop)
    assert training.replicas[0].step == steps
    return training


def measured_alone(targets: list[Target], references: list[Reference], drafter: Drafter) -> dict[str, Any]:
    found = evaluate.measure(
        CONFIG, targets[0], lambda: DFlashProposer(drafter, targets[0], 4), references, lambda: None
    )
    return without_time(evaluate.metrics(found, 3, 1.0))


def without_time(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in ("kind", "step", "seconds")}


class Gate:
    """Lets evaluations begin one by one: `begun` tells that one has the weights, `go` lets it measure."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Semaphore(0), threading.Semaphore(0)
        measure = evaluate.measure

        def waiting(*given: Any) -> Evaluation:
            if threading.current_thread().name == "evaluation":
                self.begun.release()
                assert self.go.acquire(timeout=60)
            return measure(*given)

        monkeypatch.setattr(evaluate, "measure", waiting)


def test_training_is_the_same_in_every_bit_with_evaluations_and_without(
    targets: list[Target], references: list[Reference]
) -> None:
    torch.compiler.reset()
    plain = train.Training(CONFIG, TEXT, targets)
    plain.run(nothing)
    torch.compiler.reset()
    training, _, lines = prepared(targets, references)
    training.run(nothing)
    assert any(line["kind"] == "evaluation" for line in lines)
    assert training.losses == plain.losses
    assert training.compiled == plain.compiled == 3
    for one, other in zip(training.replicas, plain.replicas, strict=True):
        a, b = one.snapshot(), other.snapshot()
        assert all(torch.equal(a.weights[name], b.weights[name]) for name in b.weights)
        assert all(torch.equal(a.optimizer[name], b.optimizer[name]) for name in b.optimizer)


def test_evaluations_compile_nothing_of_a_target_whose_layers_are_compiled(
    tiny_target: Path, references: list[Reference]
) -> None:
    """Each response's length would be a shape of its own."""
    config = replace(CONFIG, targets=1, compile_target=True)
    target = Target(tiny_target, (0, 2, 3), CPU, compiled=True)
    training, _, lines = prepared([target], references, config)
    torch.compiler.reset()
    training.run(nothing)
    assert any(line["kind"] == "evaluation" for line in lines)
    assert training.compiled == train.compiles_of_one_thread(config, TEXT, target) == 4


@pytest.mark.parametrize("cloned", [True, False], ids=["a copy", "the weights themselves"])
def test_what_is_measured_are_the_weights_of_that_step_while_training_goes_on(
    targets: list[Target], references: list[Reference], monkeypatch: pytest.MonkeyPatch, cloned: bool
) -> None:
    """The evaluation begins only when training is over: without a copy it finds other weights than it was given."""
    expected = trained(targets, 6).replicas[0].drafter.state_dict()
    if not cloned:
        monkeypatch.setattr(torch.Tensor, "clone", lambda self: self)
    training, made, _ = prepared(targets, references, replace(CONFIG, eval_every=6))
    over, loaded = threading.Event(), dict[str, torch.Tensor]()
    take, close = made._take, made.close

    def late() -> evaluator.Copied | None:
        assert over.wait(60)
        if copied := take():
            loaded.update(copied.weights)
        return copied

    def closing() -> None:
        close()
        over.set()

    monkeypatch.setattr(made, "_take", late)
    monkeypatch.setattr(made, "close", closing)
    training.run(nothing)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected) is cloned


def test_an_evaluation_gives_what_one_alone_gives(targets: list[Target], references: list[Reference]) -> None:
    training, _, lines = prepared(targets, references, replace(CONFIG, eval_every=5))
    training.run(nothing)
    (line,) = lines
    assert (line["kind"], line["step"]) == ("evaluation", 5)
    assert without_time(line) == measured_alone(targets, references, trained(targets, 5).drafters[0])
    assert line["identical"] == line["references"] == 3


def test_an_evaluation_on_a_cpu_waits_for_the_weights_of_a_drafter_on_a_gpu(
    targets: list[Target], references: list[Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Made:
        """An event of a GPU."""

        def synchronize(self) -> None:
            weights.fill_(1.0)

    weights = torch.zeros(3)
    measured = torch.nn.Linear(3, 1, bias=False)
    made = Evaluator(CONFIG, targets[0], cast("Drafter", measured), references, lambda kind, **values: None)
    copied = evaluator.Copied(2, {"weight": weights.view(1, 3)}, cast("torch.cuda.Event", Made()))
    monkeypatch.setattr(evaluate, "measure", lambda *given: Evaluation([], [], [], []))
    monitor = cast("Monitor", SimpleNamespace(now=lambda state: None, count=lambda tokens: None))
    monkeypatch.setattr(made, "_take", iter([copied, None]).__next__)
    made.run(monitor)
    assert measured.weight.tolist() == [[1.0, 1.0, 1.0]]


def test_a_newer_copy_takes_the_place_of_one_that_waits_and_the_last_is_measured(
    targets: list[Target], references: list[Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    training, made, lines = prepared(targets, references)
    close = made.close

    def report(step: int, numbers: Numbers) -> None:
        if step == 2:  # before the copy of step 4 is offered
            assert gate.begun.acquire(timeout=60)

    def closing() -> None:
        close()
        gate.go.release(2)

    monkeypatch.setattr(made, "close", closing)
    training.run(report)
    assert [(line["kind"], line["step"], line.get("newer")) for line in lines] == [
        ("evaluation_skipped", 4, 6),
        ("evaluation", 2, None),
        ("evaluation", 6, None),
    ]


def test_a_stop_ends_an_evaluation_before_its_next_pass_and_says_what_was_not_measured(
    targets: list[Target], references: list[Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    passes: list[int] = []
    monkeypatch.setattr(DFlashProposer, "propose", lambda *given: passes.append(1))
    stop = Evaluator.stop

    def report(step: int, numbers: Numbers) -> None:
        if step == 2:
            assert gate.begun.acquire(timeout=60)
        if step == 4:  # the copy of step 2 is being measured, that of step 4 waits
            raise InterruptedError("enough")

    def stopping(self: Evaluator) -> None:
        stop(self)
        gate.go.release()

    monkeypatch.setattr(Evaluator, "stop", stopping)
    training, _, lines = prepared(targets, references)
    with pytest.raises(WorkerError, match="enough") as caught:
        training.run(report)
    assert caught.value.still_running == []
    assert passes == []
    assert lines == [{"kind": "evaluation_skipped", "step": step, "newer": None} for step in (2, 4)]


def test_a_copy_of_a_step_that_is_complete_only_after_the_stop_is_said_to_be_skipped(
    targets: list[Target], references: list[Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update that has begun is completed: its step may be due when the evaluation's thread has ended."""
    training, _, lines = prepared(targets, references, replace(CONFIG, eval_every=4))
    ended, run = threading.Event(), Evaluator.run

    def running(self: Evaluator, monitor: Monitor) -> None:
        try:
            run(self, monitor)
        finally:
            ended.set()

    def report(step: int, numbers: Numbers) -> None:
        if step == 3:  # just before its copy is offered
            training.crew.stop()
            assert ended.wait(60)

    monkeypatch.setattr(Evaluator, "run", running)
    training.run(report)
    assert lines == [{"kind": "evaluation_skipped", "step": 4, "newer": None}]


def test_one_that_waits_for_weights_is_stopped(targets: list[Target], references: list[Reference]) -> None:
    training, made, lines = prepared(targets, references)
    made.stop()
    training.monitor.add(threading.current_thread().name)
    with pytest.raises(Stopped):
        made.run(training.monitor)
    assert lines == []


def test_a_fault_in_the_evaluation_ends_training_with_that_error(
    targets: list[Target], references: list[Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> None:
        raise ArithmeticError("injected")

    monkeypatch.setattr(DFlashProposer, "propose", fail)
    training, made, lines = prepared(targets, references, replace(CONFIG, steps=100_000))
    with pytest.raises(WorkerError, match="'evaluation' failed: ArithmeticError: injected") as caught:
        training.run(nothing)
    assert caught.value.still_running == []
    assert {line["kind"] for line in lines} == {"evaluation_skipped"}
    # Whatever the threads' order, each step that was due has one line.
    assert sorted(line["step"] for line in lines) == list(filter(made.is_due, range(training.step + 1)))


@pytest.mark.parametrize(("every", "steps"), [(1, range(1, 8)), (3, (3, 6)), (8, ()), (0, ())])
def test_the_steps_in_between_are_due(
    targets: list[Target], references: list[Reference], every: int, steps: tuple[int, ...]
) -> None:
    """Those before the first step and after the last are measured by the program itself."""
    _, made, _ = prepared(targets, references, replace(CONFIG, eval_every=every))
    assert [step for step in range(9) if made.is_due(step)] == list(steps)


def test_a_run_that_is_resumed_where_an_evaluation_was_due_makes_it(
    targets: list[Target], references: list[Reference]
) -> None:
    before = trained(targets, 6).replicas[0]
    training, _, lines = prepared(targets, references, snapshot=before.snapshot())
    training.run(nothing)
    assert [(line["kind"], line["step"]) for line in lines] == [("evaluation", 6)]
    assert without_time(lines[0]) == measured_alone(targets, references, before.drafter)


def test_what_is_no_number_is_none_in_a_metric() -> None:
    looping = Reference(torch.arange(4), [7] * 64)
    found = evaluate.metrics(Evaluation([looping], [Decoded(looping.tokens, [3, 1], 3, 2)], [], [NO_REGRET]), 3, 1.0)
    assert (found["tau"], found["tau_not_looping"]) == (3.0, None)
    assert found["acceptance_by_position"] == [1.0, 0.5, 0.5]
