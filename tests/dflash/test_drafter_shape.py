"""A drafter of its own sizes, with layers of both kinds, is trained and drafts like any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the example's target is a transformers model")

import attention
import blocks
from attention import FULL, SLIDING
from config import Config, ConfigError
from drafter import DrafterShape, drafter_shape, new_drafter
from replica import Replica
from safecompile import statistics
from speculative import DFlashProposer, greedy, speculate
from target import Target
from tests.dflash.small import SMALL, TEXT
from work import make_work

CPU = torch.device("cpu")
OWN = replace(
    SMALL,
    targets=1,
    drafters=1,
    layers=3,
    layer_types=(SLIDING, FULL, SLIDING),
    sliding_window=6,
    draft_heads=6,
    draft_kv_heads=3,
    draft_head_dim=10,
    draft_intermediate_size=40,
    prompt_length=16,
    response_length=16,
    steps=4,
)


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return Target(tiny_target, (0, 2, 3), CPU)


def test_a_drafter_has_the_targets_sizes_unless_its_own_are_named(target: Target) -> None:
    shape = target.shape
    common: dict[str, Any] = {
        "hidden_size": 32,
        "layers": 3,
        "taps": 3,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": 1e-6,
    }
    assert drafter_shape(Config(layers=3), shape, 3) == DrafterShape(
        intermediate_size=shape.intermediate_size,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        layer_types=(FULL,) * 3,
        **common,
    )
    assert drafter_shape(OWN, shape, 3) == DrafterShape(
        intermediate_size=40,
        heads=6,
        kv_heads=3,
        head_dim=10,
        layer_types=(SLIDING, FULL, SLIDING),
        sliding_window=6,
        **common,
    )


@pytest.mark.parametrize(
    "changes",
    [{"draft_kv_heads": 4}, {"draft_heads": 0}, {"draft_head_dim": 5}, {"layers": 2}, {"sliding_window": None}],
    ids=str,
)
def test_sizes_that_cannot_work_are_refused(target: Target, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        drafter_shape(replace(OWN, **changes), target.shape, 3)


def test_every_weight_of_it_gets_a_gradient_and_each_graph_is_compiled_once(target: Target) -> None:
    torch.compiler.reset()
    before = statistics().compiled
    drafter = new_drafter(OWN, target.shape, 3, CPU)
    replica = Replica(OWN, 0, drafter, target.vocabulary(CPU), target.language.mask_id)
    work = make_work(OWN, TEXT, target, 0, 0)
    for step in range(3):
        drafter.zero_grad()
        replica.loss(work, step).loss.backward()
        assert all(p.grad is not None and p.grad.count_nonzero() for p in drafter.parameters())
    assert statistics().compiled - before == 3  # the drafter, the loss of a chunk, the choice of a token


def test_a_proposer_drafts_what_the_training_pass_says_at_the_same_anchors(target: Target) -> None:
    """Three cycles with kept context, longer than the window, on the features of a real target."""
    drafter = new_drafter(OWN, target.shape, 3, CPU)
    tokens = TEXT[:32].long().unsqueeze(0)
    features = target.forward(tokens).tapped
    anchors = torch.tensor([[12, 15, 16]])
    keep = torch.ones_like(anchors, dtype=torch.bool)
    inputs = blocks.input_tokens(tokens, anchors, 4, target.language.mask_id)
    with torch.no_grad():
        trained = drafter(
            features,
            torch.nn.functional.embedding(inputs, target.vocabulary(CPU).embedding),
            torch.arange(32).unsqueeze(0),
            blocks.positions(anchors, 4),
            attention.build_masks(drafter.shape.layer_types, 6, attention.Layout(anchors, keep, 32, 4), dense=True),
        )
    expected = target.logits(trained).argmax(-1).view(-1, 4)[:, 1:]
    proposer = DFlashProposer(drafter, target, 4)
    done = 0
    for anchor, drafts in zip(anchors[0].tolist(), expected, strict=True):
        known = tokens[0, : anchor + 1].tolist()
        assert torch.equal(proposer.propose(known, features[:, done:anchor]), drafts)
        done = anchor


def test_decoding_with_it_changes_nothing(target: Target) -> None:
    drafter = new_drafter(OWN, target.shape, 3, CPU)
    prompt = TEXT[:10].long()
    assert speculate(target, DFlashProposer(drafter, target, 4), prompt, 24).tokens == greedy(target, prompt, 24)
