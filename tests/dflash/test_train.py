"""Work follows from its numbers alone, so that training gives the same weights however the threads run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the example's target is a transformers model")

import train
from config import Config
from pipeline import WorkerError
from target import Target

# Dynamo looks at `.grad` of every input. It hides the warning this causes, but not where warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

CPU = torch.device("cpu")
TEXT = torch.randint(0, 256, (4000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
CONFIG = Config(
    targets=2,
    drafters=3,
    block_size=4,
    prompt_length=8,
    response_length=16,
    sequences=4,
    uses=2,
    batch=2,
    anchors=4,
    chunk_rows=8,
    steps=5,
    queue_depth=1,
)


def targets(folder: Path, count: int) -> list[Target]:
    return [Target(folder, (0, 2, 3), CPU) for _ in range(count)]


def silent(step: int, loss: float, waiting: int) -> None:
    pass


def equal(first: train.Work, second: train.Work) -> bool:
    return (
        torch.equal(first.tokens, second.tokens)
        and torch.equal(first.loss_mask, second.loss_mask)
        and all(torch.equal(a, b) for a, b in zip(first.features, second.features, strict=True))
    )


def test_work_follows_from_seed_item_and_replica(tiny_target: Path) -> None:
    one, other = targets(tiny_target, 2)
    work = train.make_work(CONFIG, TEXT, one, 3, 1)
    train.make_work(CONFIG, TEXT, other, 0, 0)
    assert equal(work, train.make_work(CONFIG, TEXT, other, 3, 1))
    for config, item, replica in ((CONFIG, 4, 1), (CONFIG, 3, 2), (replace(CONFIG, seed=1), 3, 1)):
        assert not torch.equal(work.tokens, train.make_work(config, TEXT, one, item, replica).tokens)


def test_only_answers_are_supervised(tiny_target: Path) -> None:
    (target,) = targets(tiny_target, 1)
    work = train.make_work(CONFIG, TEXT, target, 0, 0)
    assert work.tokens.shape == (4, 24)
    assert not work.loss_mask[:, :8].any()
    assert work.loss_mask[:, 8].all()


def test_weights_are_equal_bit_for_bit_however_many_threads_make_the_work(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for count in (1, 2, 5):
        config = replace(CONFIG, targets=count)
        results.append(train.train(config, TEXT, targets(tiny_target, count), silent))

    made = train.make_work

    def late(config: Config, text: torch.Tensor, target: Target, item: int, replica: int) -> train.Work:
        time.sleep(0.05 * ((item + replica) % 3))
        return made(config, text, target, item, replica)

    monkeypatch.setattr(train, "make_work", late)
    results.append(train.train(CONFIG, TEXT, targets(tiny_target, 2), silent))

    first = results[0]
    assert len(first.losses) == CONFIG.steps
    for result in results:
        assert result.largest_difference == 0.0
        assert result.losses == first.losses
        weights = (result.drafters[0].state_dict(), first.drafters[0].state_dict())
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("worker", ["target-1", "drafter-2"])
def test_a_failing_thread_ends_training_with_its_error(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch, worker: str
) -> None:
    def breaking(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if threading.current_thread().name == worker:
                raise ArithmeticError("injected")
            return original(*args)

        return run

    monkeypatch.setattr(train, "make_work", breaking(train.make_work))
    monkeypatch.setattr(train.Replica, "loss", breaking(train.Replica.loss))
    started = time.monotonic()
    with pytest.raises(WorkerError, match=f"'{worker}' failed: ArithmeticError: injected"):
        train.train(CONFIG, TEXT, targets(tiny_target, 2), silent)
    assert time.monotonic() - started < 10
    assert not any(t.name.startswith(("target-", "drafter-")) for t in threading.enumerate())
