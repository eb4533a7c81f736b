"""What one thread queues on a GPU is there before another thread's stream reads it, though no thread waits for the device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import devices
from target import Features
from train import GradientExchange, Work

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
    assert handed_over() != 4096


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
    assert max(averaged()) > 0


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
    assert read_late() != 2**22
