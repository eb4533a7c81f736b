"""Several conversations in one sequence are learned from as if each were alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the example's target is a transformers model")

import cache
import chat
import data
import train
from config import Config, ConfigError
from data import Conversations, Sample
from drafter import new_drafter
from replica import Replica
from target import Target
from tests.dflash.test_chat import CONFIG, PLAIN, folder_of, lines, numbered
from work import fill, make_work

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(folder_of(tmp_path_factory.mktemp("target"), PLAIN), (0, 2, 3), CPU)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    chats = lines(tmp_path / "chats.jsonl", *numbered(64))
    return replace(CONFIG, data=chats, answers="data", packing=True, prompt_length=64, response_length=36)


def sample(first: int, count: int, *, learned: bool = True) -> Sample:
    """Return a conversation of ``count`` tokens, the second half of which is an answer."""
    return Sample(
        torch.arange(first, first + count, dtype=torch.int32),
        (torch.arange(count) >= count // 2) & torch.tensor(learned),
    )


def apart(packed: Sample) -> list[list[int]]:
    assert packed.documents is not None
    return [packed.tokens[packed.documents == n].tolist() for n in range(int(packed.documents.max()) + 1)]


def test_every_conversation_is_in_one_sequence_whole() -> None:
    samples = [sample(10 * i, 3 + i % 7) for i in range(200)]
    packed = data.pack(samples, 20)
    assert all(len(p.tokens) <= 20 for p in packed)
    assert sorted(d for p in packed for d in apart(p)) == sorted(s.tokens.tolist() for s in samples)
    assert sum(int(p.supervised.sum()) for p in packed) == sum(int(s.supervised.sum()) for s in samples)
    assert len(packed) < 1.1 * sum(len(s.tokens) for s in samples) / 20 + 1
    assert [p.tokens.tolist() for p in data.pack(samples, 20)] == [p.tokens.tolist() for p in packed]


def test_sequences_are_padded_with_a_document_of_no_one() -> None:
    source = Conversations((data.pack([sample(5, 4), sample(20, 6)], 12)[0],))
    tokens, supervised, documents = data.draw_answered(source, 0, 12, [torch.Generator()], 0, 0)
    assert documents is not None
    assert documents[0, -2:].tolist() == [-1, -1]
    assert tokens[0, -2:].tolist() == [0, 0]
    assert not supervised[0, -2:].any()
    alone = Conversations((sample(5, 4),))
    assert data.draw_answered(alone, 0, 12, [torch.Generator()], 0, 0)[2] is None


def test_features_are_those_of_each_conversation_alone(config: Config, target: Target) -> None:
    chats = chat.load(config, target.language)
    work = make_work(config, chats.train, target, 0, 0)
    assert work.documents is not None
    assert work.documents.max() > 1
    for row in range(config.sequences):
        for number in range(int(work.documents[row].max()) + 1):
            there = work.documents[row] == number
            alone = target.forward(work.tokens[row, there].unsqueeze(0))
            torch.testing.assert_close(work.features.tapped[row, there], alone.tapped[0])
            torch.testing.assert_close(work.features.normed[row, there], alone.normed[0])


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_loss_in_a_packed_sequence_is_that_of_the_conversation_alone(target: Target, place: int) -> None:
    config = replace(CONFIG, answers="data", sequences=1, batch=1, uses=1, prompt_length=32, response_length=32)
    learned = sample(5, 20)
    others = [sample(100, 17, learned=False), sample(200, 13, learned=False)]
    together = [*others[:place], learned, *others[place:]]
    packed = Sample(
        torch.cat([s.tokens for s in together]),
        torch.cat([s.supervised for s in together]),
        torch.cat([torch.full((len(s.tokens),), n, dtype=torch.int32) for n, s in enumerate(together)]),
    )
    drafter = new_drafter(config, target.shape, 3, CPU)
    replica = Replica(config, 0, drafter, target.vocabulary(CPU), target.language.mask_id)
    losses = [
        replica.loss(make_work(config, Conversations((one,)), target, 0, 0), 0).loss
        for one in (learned, packed, packed._replace(documents=None))
    ]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
    if place:  # what the documents are for: without them the conversations before it are seen
        assert abs(losses[2] - losses[0]) > 1e-4


def test_drafters_train_on_packed_chats_and_a_cache_of_them_gives_the_same(
    config: Config, target: Target, tmp_path: Path
) -> None:
    chats = chat.load(config, target.language)
    training = train.Training(config, chats.train, [target])
    training.run(lambda step, numbers: None)
    config = replace(config, target=Path(target.model.config.name_or_path))
    begun = cache.begin(tmp_path / "features", config, chats.train, target.taps, 4 * 32 * 4)
    fill(config, chats.train, [target], begun)
    again = train.Training(config, chats.train, [target], cache=begun)
    again.run(lambda step, numbers: None)
    assert again.losses == training.losses
    assert all(map(torch.equal, again.drafters[0].parameters(), training.drafters[0].parameters()))


@pytest.mark.parametrize("change", [{"answers": "target"}, {"data": None}])
def test_packing_without_answers_that_are_there_is_refused(config: Config, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="packing needs"):
        replace(config, **change).validate()
