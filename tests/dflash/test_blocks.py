"""Anchors, inputs, positions, labels and weights of draft blocks."""

from __future__ import annotations

import pytest
import torch

import blocks

TOKENS = torch.arange(100, 112).unsqueeze(0)
ANSWER = torch.tensor([[False] * 4 + [True] * 8])


def generators(count: int, seed: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed + i) for i in range(count)]


def test_weights_decay_from_the_first_draft_slot_and_the_anchor_has_none() -> None:
    expected = [0, 1, 0.867, 0.751, 0.651, 0.565, 0.490, 0.424, 0.368, 0.319, 0.276, 0.240, 0.208, 0.180, 0.156, 0.135]
    assert [round(w, 3) for w in blocks.slot_weights(16, 7.0).tolist()] == expected


def test_inputs_are_the_anchor_and_masks_at_absolute_positions() -> None:
    anchors = torch.tensor([[4, 9]])
    assert blocks.input_tokens(TOKENS, anchors, 3, 1).tolist() == [[104, 1, 1, 109, 1, 1]]
    assert blocks.positions(anchors, 3).tolist() == [[4, 5, 6, 9, 10, 11]]


def test_a_slot_is_labelled_with_the_token_at_its_own_position() -> None:
    anchors, keep = torch.tensor([[4, 10]]), torch.tensor([[True, True]])
    labels, counts = blocks.labels(TOKENS, ANSWER, anchors, keep, 4)
    assert counts.tolist() == [[False, True, True, True, False, True, False, False]]
    assert labels[counts].tolist() == [105, 106, 107, 111]


def test_unsupervised_tokens_and_padding_do_not_count() -> None:
    anchors = torch.tensor([[2, 5]])
    _, counts = blocks.labels(TOKENS, ANSWER, anchors, torch.tensor([[True, False]]), 4)
    assert counts.tolist() == [[False, False, True, True, False, False, False, False]]


def test_tokens_of_the_next_document_do_not_count() -> None:
    documents = torch.tensor([[0] * 6 + [1] * 6])
    anchors, keep = torch.tensor([[4, 6]]), torch.tensor([[True, True]])
    _, counts = blocks.labels(TOKENS, ANSWER, anchors, keep, 4, documents)
    assert counts.tolist() == [[False, True, False, False, False, True, True, True]]


def test_the_teacher_is_the_hidden_state_before_the_label() -> None:
    hidden = torch.arange(12.0).view(1, 12, 1)
    rows = blocks.teacher_rows(hidden, torch.tensor([[4, 9]]), 3)
    assert rows.flatten().tolist() == [3, 4, 5, 8, 9, 10]


@pytest.mark.parametrize("seed", range(5))
def test_anchors_are_different_sorted_and_have_a_next_token_to_predict(seed: int) -> None:
    supervised = torch.tensor([[False, True, True, False, True, True, True, False]])
    anchors, keep = blocks.sample_anchors(supervised, 2, generators(1, seed))
    assert keep.all()
    first, second = anchors[0].tolist()
    assert first < second
    assert {first, second} <= {1, 4, 5}


def test_the_last_token_of_a_document_is_no_anchor() -> None:
    documents = torch.tensor([[0] * 5 + [1] * 7])
    anchors, keep = blocks.sample_anchors(ANSWER, 12, generators(1), documents)
    assert anchors[keep].tolist() == [5, 6, 7, 8, 9, 10]


def test_missing_anchors_are_padding() -> None:
    anchors, keep = blocks.sample_anchors(torch.zeros(2, 8, dtype=torch.bool), 3, generators(2))
    assert anchors.shape == (2, 3)
    assert not keep.any()


def test_every_candidate_is_drawn_about_as_often() -> None:
    drawn = torch.zeros(12)
    for seed in range(700):
        anchors, _ = blocks.sample_anchors(ANSWER, 1, generators(1, seed))
        drawn[anchors] += 1
    assert drawn.nonzero().flatten().tolist() == list(range(4, 11))
    assert drawn[4:11].min() > 60  # 100 expected; four standard deviations are 37


def test_what_is_drafted_is_all_but_the_first_slot_of_each_block() -> None:
    anchors, keep = torch.tensor([[4, 10]]), torch.tensor([[True, True]])
    labels, counts = blocks.labels(TOKENS, ANSWER, anchors, keep, 4)
    assert blocks.drafted(counts, 4).tolist() == [[True, True, True, True, False, False]]
    assert blocks.drafted(labels, 4).tolist() == [[105, 106, 107, 111, 111, 111]]
    assert blocks.drafted(labels.unsqueeze(-1), 4).shape == (1, 6, 1)
