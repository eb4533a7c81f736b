"""Work follows from its numbers alone, so that training gives the same weights however the threads run."""

from __future__ import annotations

import itertools
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="the example's target is a transformers model")

import optimizer
import train
from config import Config
from drafter import new_drafter
from loss import BlockLoss
from pipeline import OrderedQueue, WorkerError
from replica import Drafted, GradientExchange, Numbers, Replica, mean_gradients
from speculative import DFlashProposer, greedy, speculate
from target import Target
from tests.dflash.small import SMALL, TEXT
from work import Work, make_work

CPU = torch.device("cpu")
CONFIG = replace(
    SMALL,
    targets=5,
    drafters=3,
    steps=20,
    queue_depth=1,
)


_loaded: list[Target] = []


def targets(folder: Path, count: int) -> list[Target]:
    """Return targets, loaded once for all tests: nothing in them changes."""
    while len(_loaded) < count:
        _loaded.append(Target(folder, (0, 2, 3), CPU))
    return _loaded[:count]


def run(folder: Path, count: int, config: Config = CONFIG) -> train.Training:
    training = train.Training(replace(config, targets=count), TEXT, targets(folder, count))
    training.run(lambda step, numbers: None)
    return training


def equal(first: Work, second: Work) -> bool:
    return (
        torch.equal(first.tokens, second.tokens)
        and torch.equal(first.loss_mask, second.loss_mask)
        and all(torch.equal(a, b) for a, b in zip(first.features, second.features, strict=True))
    )


def test_work_follows_from_seed_item_and_replica(tiny_target: Path) -> None:
    one, other = targets(tiny_target, 2)
    work = make_work(CONFIG, TEXT, one, 3, 1)
    make_work(CONFIG, TEXT, other, 0, 0)
    assert equal(work, make_work(CONFIG, TEXT, other, 3, 1))
    for config, item, replica in ((CONFIG, 4, 1), (CONFIG, 3, 2), (replace(CONFIG, seed=1), 3, 1)):
        assert not torch.equal(work.tokens, make_work(config, TEXT, one, item, replica).tokens)


def test_only_answers_are_supervised(tiny_target: Path) -> None:
    (target,) = targets(tiny_target, 1)
    work = make_work(CONFIG, TEXT, target, 0, 0)
    assert work.tokens.shape == (4, 16)
    assert not work.loss_mask[:, :8].any()
    assert work.loss_mask[:, 8].all()


@pytest.mark.parametrize("sequences", [1, 3, 4])
def test_every_second_answer_is_greedy_however_many_are_made_together(tiny_target: Path, sequences: int) -> None:
    (target,) = targets(tiny_target, 1)
    config = replace(CONFIG, sequences=sequences, drafters=2, temperature=2.0)
    rows = torch.cat([make_work(config, TEXT, target, *divmod(n, 2)).tokens for n in range(4)])
    own = [greedy(target, row[:8], 8) for row in rows]
    is_greedy = [row[8 : 8 + len(tokens)].tolist() == tokens for row, tokens in zip(rows, own, strict=True)]
    assert is_greedy == [index % 2 == 0 for index in range(4 * sequences)]


def test_a_target_thread_lets_go_of_work_before_it_makes_more(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a target's GPU would hold two batches of features beside what a pass takes."""
    made, held = list[weakref.ref[Work]](), list[int]()

    def noted(*given: Any) -> Work:
        held.append(sum(ref() is not None for ref in made))
        work = make_work(*given)
        made.append(weakref.ref(work))
        return work

    monkeypatch.setattr("work.make_work", noted)
    run(tiny_target, 1, replace(CONFIG, drafters=1))
    assert held == [0] * (CONFIG.steps // CONFIG.uses)


WORKERS = [f"target-{i}" for i in range(5)] + [f"drafter-{i}" for i in range(3)]


@pytest.fixture(scope="module")
def first(tiny_target: Path) -> train.Training:
    """Return training with one target thread and no delays, to compare with."""
    return run(tiny_target, 1)


def running_ahead(training: train.Training) -> train.Training:
    """Let replicas make the next gradients before they complete an update, as on a GPU."""
    for replica in training.replicas:
        replica._runs_ahead = True
    return training


def assert_same(training: train.Training, first: train.Training) -> None:
    assert len(training.losses) == CONFIG.steps
    assert training.losses == first.losses
    assert train.largest_difference(training.drafters) == 0.0
    weights = (training.drafters[0].state_dict(), first.drafters[0].state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("count", [2, 5])
def test_weights_after_20_steps_are_equal_bit_for_bit_however_many_threads_make_the_work(
    tiny_target: Path, first: train.Training, count: int
) -> None:
    assert_same(run(tiny_target, count), first)


def test_weights_are_equal_bit_for_bit_where_the_next_gradients_are_queued_before_a_step_is_complete(
    tiny_target: Path, first: train.Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = running_ahead(train.Training(CONFIG, TEXT, targets(tiny_target, 5)))
    events, reported = list[tuple[str, int]](), list[tuple[int, float, int]]()
    loss = Replica.loss

    def noted(self: Replica, work: Work, step: int) -> BlockLoss:
        if self.index == 0:
            events.append(("gradients", step))
        return loss(self, work, step)

    def report(step: int, numbers: Numbers) -> None:
        events.append(("complete", step))
        reported.append((step, numbers["loss"], training.replicas[0].step))

    monkeypatch.setattr(Replica, "loss", noted)
    # Where work has to be waited for, the step is complete before: here all of it is there.
    monkeypatch.setattr(OrderedQueue, "ready", lambda queue: True)
    training.run(report)
    assert_same(training, first)
    steps = range(CONFIG.steps)
    assert reported == [(step, training.replicas[0].losses[step], step + 1) for step in steps]
    assert [events.index(("complete", step)) - events.index(("gradients", step)) for step in steps[:-1]] == [
        2,
        *[3] * 18,
    ]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_threads_train_as_one_thread_does_that_waits_for_the_device(tiny_target: Path, device: str) -> None:
    config = replace(CONFIG, device=device, answers="data", attention="dense", steps=8)
    on_device = [Target(tiny_target, (0, 2, 3), torch.device(device)) for _ in range(5)]
    training, reported = train.Training(config, TEXT, on_device), list[float]()
    training.run(lambda step, numbers: reported.append(numbers["loss"]))

    replicas, losses = train.Training(config, TEXT, on_device).replicas, list[float]()
    for step in range(config.steps):
        works = [make_work(config, TEXT, on_device[0], step // config.uses, r.index) for r in replicas]
        made = [r.gradients(work, step).loss.item() for r, work in zip(replicas, works, strict=True)]
        losses.append(sum(made) / len(made))
        gradients = [[p.grad for p in r._optimizers.parameters if p.grad is not None] for r in replicas]
        for replica in replicas:
            means = mean_gradients(gradients, torch.device(device))
            for parameter, mean in zip(replica._optimizers.parameters, means, strict=True):
                parameter.grad = mean
            replica.step_optimizers()
    assert training.losses == (losses if device == "cpu" else pytest.approx(losses, rel=1e-4))
    assert reported == training.replicas[0].losses
    assert train.largest_difference(training.drafters) == 0.0


@pytest.mark.parametrize("late", WORKERS)
def test_weights_are_equal_when_a_thread_moves_only_while_all_others_wait(
    tiny_target: Path, first: train.Training, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    training = train.Training(CONFIG, TEXT, targets(tiny_target, 5))
    held_up: list[str] = []
    has_work = threading.Event()  # a target that is late from the start would find all work taken

    def delayed(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            name = threading.current_thread().name
            if late.startswith("target") and name.startswith("target") and name != late:
                assert has_work.wait(60)
            if name == late:
                has_work.set()
                held_up.append(late)
                while not all_others_wait():
                    time.sleep(1e-4)
            return original(*args)

        return call

    def all_others_wait() -> bool:
        others = [t.state for name, t in training.monitor.threads.items() if name != late]
        return len(others) == len(WORKERS) - 1 and all(s == "done" or s.startswith("waits") for s in others)

    monkeypatch.setattr("work.make_work", delayed(make_work))
    monkeypatch.setattr(Replica, "loss", delayed(Replica.loss))
    training.run(lambda step, numbers: None)
    assert len(held_up) >= (1 if late.startswith("target") else CONFIG.steps)
    assert_same(training, first)


def test_another_seed_gives_other_weights(tiny_target: Path, first: train.Training) -> None:
    assert run(tiny_target, 1, replace(CONFIG, seed=1, steps=2)).losses != first.losses[:2]


def test_all_threads_compile_the_graphs_that_one_thread_does(tiny_target: Path) -> None:
    (target,) = targets(tiny_target, 1)
    torch.compiler.reset()
    training = run(tiny_target, 5, replace(CONFIG, steps=2))
    assert training.compiled == train.compiles_of_one_thread(CONFIG, TEXT, target) == 3


def test_the_graph_of_a_compiled_optimizer_is_counted_on_both_sides(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where the optimizer's step is compiled."""
    monkeypatch.setattr(torch.optim, "AdamW", optimizer.CompiledAdamW)
    (target,) = targets(tiny_target, 1)
    torch.compiler.reset()
    training = run(tiny_target, 5, replace(CONFIG, steps=2))
    assert training.compiled == train.compiles_of_one_thread(CONFIG, TEXT, target) == 4


@pytest.mark.parametrize("change", [{}, {"position_weights": "dpace"}], ids=["decay", "dpace"])
def test_a_step_says_how_well_its_blocks_were_drafted(tiny_target: Path, change: dict[str, Any]) -> None:
    """What a run's steps report is what each of them says when a thread makes them alone."""
    config = replace(CONFIG, targets=1, drafters=1, steps=6, **change)
    (target,) = targets(tiny_target, 1)
    training, reported = train.Training(config, TEXT, [target]), list[Drafted]()

    def report(step: int, numbers: Numbers) -> None:
        drafted = training.replicas[0].drafted
        assert drafted
        reported.append(drafted)

    training.run(report)
    drafter = new_drafter(config, target.shape, 3, CPU)
    replica = Replica(config, 0, drafter, target.vocabulary(CPU), target.language.mask_id)
    assert replica.drafted is None
    for step, drafted in enumerate(reported):
        made = replica.make_step(make_work(config, TEXT, target, step // config.uses, 0), step)
        assert str(drafted.accuracy) == str(
            made.accuracy.tolist()
        )  # as text, a share that is no number is equal to itself
        assert str(drafted.acceptance) == str(made.acceptance.tolist())
        assert training.losses[step] == made.loss.item()
    assert len(reported) == 6
    assert all(len(drafted.accuracy) == len(drafted.acceptance) == config.block_size - 1 for drafted in reported)
    assert len({str(drafted) for drafted in reported}) > 1


def test_the_expected_acceptance_length_leaves_out_slots_that_no_block_counts_in() -> None:
    drafted = Drafted([0.75, 0.5, math.nan], [0.75, 0.5, math.nan])
    assert drafted.eal == 2.25
    assert drafted.as_json() == {
        "accuracy": [0.75, 0.5, None],
        "acceptance_by_position": [0.75, 0.5, None],
        "eal": 2.25,
    }


def test_threads_train_with_weights_from_confidence_as_with_those_that_decay(
    tiny_target: Path, first: train.Training
) -> None:
    config = replace(CONFIG, position_weights="dpace", steps=8)
    torch.compiler.reset()
    one, five = (run(tiny_target, count, config) for count in (1, 5))
    assert one.losses == five.losses
    assert one.losses[0] != first.losses[0]
    assert train.largest_difference(one.drafters + five.drafters) == 0.0
    assert one.compiled == train.compiles_of_one_thread(config, TEXT, five.targets[0]) == 3
    assert run(tiny_target, 1, replace(config, dpace_alpha=0.25)).losses[0] != one.losses[0]


def breaking(worker: str, call: int, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``original`` with a fault in the worker's call of that number."""
    calls = itertools.count()

    def broken(*args: Any) -> Any:
        if threading.current_thread().name == worker and next(calls) == call:
            raise ArithmeticError("injected")
        return original(*args)

    return broken


@pytest.fixture
def threads_end() -> Iterator[None]:
    yield
    assert not any(t.name in WORKERS for t in threading.enumerate())


@pytest.mark.usefixtures("threads_end")
@pytest.mark.parametrize("ahead", [False, True], ids=["cpu", "as on a gpu"])
@pytest.mark.parametrize("worker", WORKERS)
def test_a_fault_in_any_thread_ends_training_in_time_with_that_error(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch, worker: str, ahead: bool
) -> None:
    call = 0 if worker.startswith("target") else 3
    monkeypatch.setattr("work.make_work", breaking(worker, call, make_work))
    monkeypatch.setattr(Replica, "loss", breaking(worker, call, Replica.loss))
    training = train.Training(CONFIG, TEXT, targets(tiny_target, 5))
    if ahead:
        running_ahead(training)
    with pytest.raises(WorkerError, match=f"'{worker}' failed: ArithmeticError: injected") as caught:
        training.run(lambda step, numbers: None)
    assert caught.value.still_running == []
    assert all(replica.whole for replica in training.replicas)
    assert len({replica.step for replica in training.replicas}) == 1
    assert train.largest_difference(training.drafters) == 0.0


@pytest.mark.usefixtures("threads_end")
@pytest.mark.parametrize("during", ["optimizer", "report", "average"])
def test_a_fault_in_any_part_of_a_step_ends_training(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    def fail(*args: Any) -> None:
        raise ArithmeticError("injected")

    if during == "optimizer":
        monkeypatch.setattr("optimizer.Optimizers.step", fail)
    if during == "average":
        monkeypatch.setattr(GradientExchange, "average", fail)
    with pytest.raises(WorkerError, match="injected"):
        train.Training(CONFIG, TEXT, targets(tiny_target, 5)).run(
            fail if during == "report" else lambda step, numbers: None
        )


@pytest.mark.usefixtures("threads_end")
@pytest.mark.parametrize("ahead", [False, True], ids=["cpu", "as on a gpu"])
@pytest.mark.parametrize(
    ("spoil", "says", "whole"),
    [
        # Its gradient is in all replicas' mean, though the losses of the others are numbers.
        (lambda loss: loss * math.nan, "the norm of its gradient nan", [False, False, False]),
        (lambda loss: loss + math.inf, "its loss is inf", [True, False, True]),
    ],
)
def test_training_that_diverges_ends_before_anything_of_it_can_be_saved(
    tiny_target: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Tensor], Tensor],
    says: str,
    whole: list[bool],
    ahead: bool,
) -> None:
    original, calls, steps = Replica.loss, itertools.count(), list[int]()

    def loss(self: Replica, work: Work, step: int) -> BlockLoss:
        made = original(self, work, step)
        return made._replace(loss=spoil(made.loss)) if self.index == 1 and next(calls) == 3 else made

    monkeypatch.setattr(Replica, "loss", loss)
    training = train.Training(CONFIG, TEXT, targets(tiny_target, 5))
    if ahead:
        running_ahead(training)
    with pytest.raises(WorkerError, match=f"FloatingPointError: training diverged at step 3: .*{says}"):
        training.run(lambda step, numbers: steps.append(step))
    assert [replica.whole for replica in training.replicas] == whole
    assert [replica.step for replica in training.replicas] == [3 + w for w in whole]
    assert steps == list(range(3 + whole[0]))
    replica = training.at_rest()
    assert (replica is not None) is any(whole)
    if replica is not None:
        assert all(p.isfinite().all() for p in replica.drafter.parameters())


@pytest.mark.usefixtures("threads_end")
@pytest.mark.parametrize("started", range(8))
def test_an_interrupt_while_threads_are_started_ends_those_that_run(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch, started: int
) -> None:
    training = train.Training(CONFIG, TEXT, targets(tiny_target, 5))
    start, count = training.crew.start, itertools.count()

    def interrupted(name: str, work: Callable[[], None]) -> None:
        if next(count) == started:
            raise KeyboardInterrupt
        start(name, work)

    monkeypatch.setattr(training.crew, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        training.run(lambda step, numbers: None)
    assert training.crew.running() == []


@pytest.mark.usefixtures("threads_end")
def test_a_step_is_not_lost_where_the_next_gradients_take_longer_than_an_end_waits_for(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All threads are left behind, inside passes after the first update, as in long passes on a CPU."""
    loss, inside, go_on = Replica.loss, threading.Barrier(4), threading.Event()

    def long(self: Replica, work: Work, step: int) -> BlockLoss:
        if step == 1:
            inside.wait(60)
            assert go_on.wait(60)
        return loss(self, work, step)

    def interrupt() -> None:
        inside.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(Replica, "loss", long)
    training, reported = train.Training(CONFIG, TEXT, targets(tiny_target, 5)), list[int]()
    monkeypatch.setattr(training.crew, "end", partial(training.crew.end, grace=0.0))
    with pytest.raises(KeyboardInterrupt):
        training.run(lambda step, numbers: reported.append(step), interrupt)
    replica = training.at_rest()
    try:
        assert replica is not None
        assert (replica.step, reported) == (1, [0])
        saved = {name: weight.clone() for name, weight in replica.drafter.state_dict().items()}
    finally:
        go_on.set()
        for member in training.crew._members:
            member.thread.join(60)
    assert [other.step for other in training.replicas] == [1, 1, 1]
    assert all(torch.equal(saved[name], weight) for name, weight in replica.drafter.state_dict().items())


# Norms are in float32 under autocast, and torch says that this is not its fastest way.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
def test_a_target_in_bfloat16_trains_a_drafter_in_float32_and_decodes_with_it(tiny_target: Path) -> None:
    config = replace(CONFIG, target_dtype="bfloat16", autocast=True)
    target = Target(tiny_target, (0, 2, 3), CPU, dtype=torch.bfloat16)
    work = make_work(config, TEXT, target, 0, 0)
    assert work.features.tapped.dtype == work.features.normed.dtype == torch.bfloat16
    drafter = new_drafter(config, target.shape, 3, CPU)
    replica = Replica(config, 0, drafter, target.vocabulary(CPU), target.language.mask_id)
    replica.loss(work, 0).loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in drafter.parameters())
    decoded = speculate(target, DFlashProposer(drafter, target, 4), work.tokens[0, :8], 8)
    assert len(decoded.tokens) == 8 or decoded.tokens[-1] == 0
