"""What one thread queues on a GPU is there before another thread's stream reads it, though no thread waits for the device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("transformers", reason="the example's target is a transformers model")

import devices
import evaluate
from config import Config
from drafter import Drafter
from evaluate import Evaluation
from evaluator import Evaluator
from monitor import Monitor
from replica import GradientExchange
from target import Features, Target
from work import Work

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


def slow_ones(rows: int = 4096) -> torch.Tensor:
    """Return ones, which the device has only after some tens of milliseconds of other work."""
    with torch.no_grad():
        x = torch.zeros(8192, 8192, device=CUDA)
        for _ in range(20):
            x = x @ x
        return x[:rows, :1] + 1


@pytest.fixture
def no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what is tested."""
    monkeypatch.setattr(devices, "wait", lambda device, events: None)


def too_early(found: Callable[[], object], right: object) -> bool:
    """Tell whether at least one of some tries finds something else: a GPU that is shared may be as late for both threads."""
    return any(found() != right for _ in range(5))


def in_threads(*bodies: Callable[[], object]) -> list[object]:
    """Run each in a thread with a stream of its own; the products' workspace and kernels are there before."""
    slow_ones()
    torch.cuda.synchronize()

    def run(body: Callable[[], object]) -> object:
        with devices.own_stream(CUDA):
            return body()

    with ThreadPoolExecutor(len(bodies)) as pool:
        return [future.result() for future in [pool.submit(run, body) for body in bodies]]


def handed_over() -> float:
    """Return the sum that another thread finds in the features of a batch of work, 4096 if all are there."""
    queued, box = threading.Event(), []

    def give() -> None:
        ones = slow_ones()
        work = Work(ones, torch.ones(1, dtype=torch.bool), Features(ones * 1, ones * 1))
        box.append(work.sent(CUDA))
        queued.set()

    def take() -> float:
        assert queued.wait(60)
        return float(box[0].received().features.normed.sum())

    return in_threads(give, take)[1]  # type: ignore[return-value]


def test_work_is_read_after_it_was_made() -> None:
    assert handed_over() == 4096


@pytest.mark.usefixtures("no_events")
def test_work_is_read_too_early_without_events() -> None:
    assert too_early(handed_over, 4096)


def averaged() -> list[float]:
    """Return the largest distance from the mean, 0.5, of what each of two replicas gets as gradient, one of them late."""
    exchange = GradientExchange(2)

    def replica(index: int) -> float:
        weight = torch.nn.Parameter(torch.zeros(4096, 1, device=CUDA))
        weight.grad = slow_ones() if index else torch.zeros(4096, 1, device=CUDA)
        exchange.average(index, [weight])
        return float((weight.grad - 0.5).abs().max())

    return in_threads(lambda: replica(0), lambda: replica(1))  # type: ignore[return-value]


def test_gradients_are_averaged_after_they_were_made() -> None:
    assert averaged() == [0.0, 0.0]


@pytest.mark.usefixtures("no_events")
def test_gradients_are_averaged_too_early_without_events() -> None:
    assert too_early(averaged, [0.0, 0.0])


def read_late() -> float:
    """Return the sum of 2**22 ones that a thread reads late, while the one that made them has memory of that size filled with zeros."""
    queued, let_go = threading.Event(), threading.Event()
    box: list[Any] = []

    def give() -> None:
        ones = torch.ones(2**22, device=CUDA)
        box.append(Work(ones, torch.ones(1, dtype=torch.bool), Features(ones * 1, ones * 1)).sent(CUDA))
        del ones
        queued.set()
        assert let_go.wait(60)
        box.append([torch.zeros(2**22, device=CUDA) for _ in range(3)])

    def take() -> float:
        assert queued.wait(60)
        work = box.pop().received()
        total = (work.features.normed * slow_ones(1)[0]).sum()
        del work
        let_go.set()
        return float(total)

    return in_threads(give, take)[1]  # type: ignore[return-value]


def test_memory_of_work_is_not_used_again_before_it_was_read() -> None:
    assert read_late() == 2**22


def test_memory_of_work_is_used_again_too_early_if_it_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "keep", lambda tensors: None)
    assert too_early(read_late, 2**22)


def evaluated(monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the sum that an evaluation finds in weights that are there late and then change, 3 * 4096 if it is the step's."""
    found: list[float] = []
    trained, measured = (torch.nn.Linear(1, 4096, bias=False, device=CUDA) for _ in range(2))

    def measure(*given: Any) -> Evaluation:
        found.append(float(measured.weight.detach().sum()))
        return Evaluation([], [], [], [])

    monkeypatch.setattr(evaluate, "measure", measure)
    target = cast("Target", SimpleNamespace(shared=lambda: SimpleNamespace(device=CUDA)))
    evaluator = Evaluator(Config(), target, cast("Drafter", measured), [], lambda kind, **values: None)
    monitor = cast("Monitor", SimpleNamespace(now=lambda state: None, count=lambda tokens: None))

    @torch.no_grad()
    def train() -> None:
        trained.weight.copy_(3 * slow_ones())
        evaluator.offer(1, cast("Drafter", trained))
        trained.weight.zero_()
        evaluator.close()

    in_threads(train, lambda: evaluator.run(monitor))
    return found[0]


def test_weights_are_evaluated_after_they_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    assert evaluated(monkeypatch) == 3 * 4096


@pytest.mark.usefixtures("no_events")
def test_weights_are_evaluated_too_early_without_events(monkeypatch: pytest.MonkeyPatch) -> None:
    assert too_early(lambda: evaluated(monkeypatch), 3 * 4096)


def read_at_once() -> tuple[list[float], bool]:
    """Return a vector's values, and whether the device has done what was queued behind them when they are there."""

    def read() -> tuple[list[float], bool]:
        values = devices.read_later(slow_ones(4).flatten())
        for _ in range(3):
            slow_ones()
        behind = devices.mark(CUDA)
        assert behind
        return values(), behind.query()

    return in_threads(read)[0]  # type: ignore[return-value]


def test_a_thread_waits_for_the_values_that_it_reads_and_for_nothing_behind_them() -> None:
    assert read_at_once() == ([1.0] * 4, False)


def test_a_thread_waits_for_all_that_it_has_queued_if_it_reads_without_a_copy_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "read_later", lambda tensor: tensor.tolist)
    assert read_at_once() == ([1.0] * 4, True)
