"""Tapped layers, features and the target's own answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the example's target is a transformers model")

import checkpoints
from config import Config, ConfigError
from drafter import new_drafter
from safecompile import statistics
from speculative import DFlashProposer, greedy, speculate
from target import Features, Target, check_shareable, choose, language_of, read_config, tapped_layers
from tests.helpers.models import tiny_model
from tests.helpers.threads import gather_threads

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (36, (1, 9, 17, 25, 33)),
        (64, (1, 16, 31, 46, 61)),
        (32, (1, 8, 15, 22, 29)),
        (24, (1, 6, 11, 16, 21)),
        (28, (1, 7, 13, 19, 25)),
    ],
)
def test_five_taps_go_from_the_second_to_the_third_to_last_layer(layers: int, expected: tuple[int, ...]) -> None:
    assert tapped_layers(layers, 5) == expected


def test_one_tap_is_in_the_middle() -> None:
    assert tapped_layers(36, 1) == (18,)


def test_a_shallow_target_needs_named_taps() -> None:
    with pytest.raises(ConfigError, match="4 layers"):
        tapped_layers(4, 5)


def test_a_tap_outside_the_target_is_refused(tiny_target: Path) -> None:
    with pytest.raises(ConfigError, match="0 to 4"):
        Target(tiny_target, (1, 5), CPU)


def test_compiled_layers_are_one_graph_for_all_targets_and_shapes_of_training(tiny_target: Path) -> None:
    """Passes with a cache, whose shapes grow, compile nothing."""
    plain = Target(tiny_target, (0, 2), CPU)
    compiled = [Target(tiny_target, (0, 2), CPU, compiled=True) for _ in range(2)]
    tokens = torch.randint(2, 258, (2, 9), generator=torch.Generator().manual_seed(0))
    before = statistics().compiled
    for target in (*compiled, compiled[0]):
        for found, expected in zip(target.forward(tokens), plain.forward(tokens), strict=True):
            torch.testing.assert_close(found, expected)
    assert statistics().compiled - before == 1
    assert greedy(compiled[0], tokens[0], 8) == greedy(plain, tokens[0], 8)
    assert statistics().compiled - before == 1


def test_features_are_outputs_of_the_tapped_layers_and_the_last_norm(tiny_target: Path) -> None:
    target = Target(tiny_target, (0, 2), CPU)
    tokens = torch.randint(2, 258, (2, 9), generator=torch.Generator().manual_seed(0))
    features = target.forward(tokens)
    hidden = target.model(input_ids=tokens, output_hidden_states=True).hidden_states
    torch.testing.assert_close(features.tapped, torch.cat((hidden[1], hidden[3]), dim=-1))
    torch.testing.assert_close(features.normed, hidden[-1])


def test_features_can_be_saved_for_a_backward(tiny_target: Path) -> None:
    features = Target(tiny_target, (0,), CPU).forward(torch.tensor([[5, 6]]))
    weight = torch.ones(32, requires_grad=True)
    (features.tapped * weight).sum().backward()
    assert weight.grad is not None


def test_a_greedy_answer_in_a_batch_is_the_greedy_decoding(tiny_target: Path) -> None:
    target = Target(tiny_target, (0,), CPU)
    prompts = torch.randint(2, 258, (3, 8), generator=torch.Generator().manual_seed(0))
    noise = torch.rand(3, 12, generator=torch.Generator().manual_seed(1))
    answers = target.respond(prompts, torch.tensor([0.0, 1.0, 0.0]), noise)
    assert torch.equal(answers[:, :8], prompts)
    for row in (0, 2):
        expected = greedy(target, prompts[row], 12)
        assert answers[row, 8 : 8 + len(expected)].tolist() == expected


def test_choices_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.2])
    noise = (torch.arange(1000) + 0.5) / 1000
    drawn = choose(probabilities.log().expand(1000, 4), torch.ones(1000), noise)
    assert torch.bincount(drawn, minlength=4).tolist() == [500, 0, 300, 200]


def llama(folder: Path, vocab_size: int) -> Path:
    """Return the folder of an untrained target of another architecture, with two ends of text and no ``head_dim``."""
    tiny_model("Llama", vocab_size=vocab_size, eos_token_id=[3, 0]).save_pretrained(folder)
    return folder


def tokenizer(folder: Path, words: list[str], **special: str) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="comes with transformers")
    transformers = pytest.importorskip("transformers")
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(["<unk>", *words])}, unk_token="<unk>")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", **special).save_pretrained(folder)


def test_a_target_of_another_architecture_is_drafted_for(tmp_path: Path) -> None:
    target = Target(llama(tmp_path, 300), (0, 2), CPU)
    assert target.shape.head_dim == 8
    assert target.language.eos_ids == (0, 3)
    prompt = torch.randint(4, 258, (12,), generator=torch.Generator().manual_seed(0))
    drafter = new_drafter(Config(), target.shape, len(target.taps), CPU)
    decoded = speculate(target, DFlashProposer(drafter, target, 4), prompt, 16)
    assert decoded.tokens == greedy(target, prompt, 16)


def test_a_tokenizer_gives_the_ids_and_the_first_id_past_it_is_the_mask(tmp_path: Path) -> None:
    llama(tmp_path, 8)
    tokenizer(tmp_path, ["the", "cat", "sat"])
    target = Target(tmp_path, (0, 2), CPU)
    assert target.language.encode(b"the cat sat the dog").tolist() == [1, 2, 3, 1, 0]
    assert target.language.mask_id == 4


def test_a_vocabulary_without_room_is_refused(tmp_path: Path) -> None:
    llama(tmp_path, 4)
    with pytest.raises(ConfigError, match="a byte is a token"):
        Target(tmp_path, (0,), CPU)
    tokenizer(tmp_path, ["the", "cat", "sat"])
    with pytest.raises(ConfigError, match="none for the mask"):
        Target(tmp_path, (0,), CPU)


def test_a_text_ends_with_what_any_of_the_places_names(tmp_path: Path) -> None:
    llama(tmp_path, 12)
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [7, 3]}))
    tokenizer(tmp_path, ["the", "cat", "sat", "</s>"], eos_token="</s>")
    config = read_config(tmp_path)
    assert language_of(tmp_path, config).eos_ids == (0, 3, 4, 7)
    generation.unlink()
    config.eos_token_id = None
    assert language_of(tmp_path, config).eos_ids == (4,)
    generation.write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json cannot be read"):
        language_of(tmp_path, config)


def test_another_end_of_text_is_another_target(tmp_path: Path) -> None:
    llama(tmp_path, 12)
    found = {checkpoints.target_fingerprint(tmp_path)}
    generation = tmp_path / "generation_config.json"
    for eos_ids in ([3], [3, 5]):
        generation.write_text(json.dumps({"eos_token_id": eos_ids}))
        found.add(checkpoints.target_fingerprint(tmp_path))
    generation.unlink()
    found.add(checkpoints.target_fingerprint(tmp_path))
    assert len(found) == 4


@pytest.mark.parametrize("architecture", ["Gemma2", "Granite", "Phi"])
def test_logits_that_are_not_the_heads_alone_are_refused(architecture: str, tmp_path: Path) -> None:
    """Gemma2 has a soft cap, Granite a scale, Phi a bias."""
    options: dict[str, dict[str, Any]] = {"Gemma2": {"head_dim": 8}, "Granite": {"logits_scaling": 8.0}, "Phi": {}}
    model = tiny_model(architecture, vocab_size=258, **options[architecture])
    if architecture == "Phi":
        torch.nn.init.normal_(model.lm_head.bias)
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"{architecture}ForCausalLM does more to its logits"):
        Target(tmp_path, (0, 2), CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_the_head_alone_are_taken_in_each_precision(dtype: torch.dtype, tiny_target: Path) -> None:
    assert Target(tiny_target, (0, 2), CPU, dtype=dtype).passes == 0


def test_code_that_comes_with_a_target_is_not_run_unless_asked(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}')
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path)
    assert not (tmp_path / "ran").exists()


def features_of_two_threads_at_once(
    target: Target, tokens: list[torch.Tensor]
) -> list[tuple[Features, int] | BaseException]:
    """Return features and passes of two threads that are both behind each tapped layer before either goes on."""
    here = threading.Barrier(2, timeout=60)

    def meet(module: object, inputs: object, output: object) -> None:
        here.wait()

    handles = [target.model.model.layers[tap].register_forward_hook(meet) for tap in target.taps]

    def reading(own: Target, read: torch.Tensor) -> Callable[[], tuple[Features, int]]:
        return lambda: (own.forward(read), own.passes)

    try:
        return gather_threads([reading(target, tokens[0]), reading(target.shared(), tokens[1])])
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("apart", [True, False], ids=["each thread's own", "one dictionary for both"])
def test_two_threads_inside_one_model_get_their_own_features(tiny_target: Path, apart: bool) -> None:
    """With one dictionary for the outputs of all threads, as it was, they are mixed up or missing."""
    target = Target(tiny_target, (0, 2), CPU)
    tokens = [torch.randint(2, 258, (2, 9), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    alone = [target.forward(read) for read in tokens]
    target.passes = 0
    if not apart:
        shared: Any = SimpleNamespace(by_tap={})
        target._outputs = shared
    found = features_of_two_threads_at_once(target, tokens)
    right = [
        not isinstance(one, BaseException)
        and all(torch.equal(a, b) for a, b in zip(one[0], expected, strict=True))
        and one[1] == 1
        for one, expected in zip(found, alone, strict=True)
    ]
    assert right == [True, True] if apart else not all(right)


def test_a_shared_target_has_the_same_weights_and_counts_for_itself(tiny_target: Path) -> None:
    target = Target(tiny_target, (0, 2), CPU)
    other = target.shared()
    other.forward(torch.tensor([[5, 6]]))
    assert other.model is target.model
    assert (target.passes, other.passes) == (0, 1)


@pytest.mark.parametrize(
    ("rope", "refused"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, None),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}, None),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "'dynamic', whose frequencies change"),
    ],
)
def test_a_target_whose_passes_write_into_it_is_not_shared(
    tmp_path: Path, rope: dict[str, Any], refused: str | None
) -> None:
    options = {"vocab_size": 258, "head_dim": 8, "max_position_embeddings": 64, "rope_parameters": rope}
    tiny_model("Qwen3", **options).save_pretrained(tmp_path)
    target = Target(tmp_path, (0,), CPU)
    if refused is None:
        target.shared()
        return
    with pytest.raises(ConfigError, match=refused):
        target.shared()
    # What it is refused for: the features of one text depend on what another thread has read.
    text, longer = torch.arange(2, 102).unsqueeze(0), torch.arange(2, 202).unsqueeze(0)
    before = target.forward(text).normed
    target.forward(longer)
    assert not torch.equal(target.forward(text).normed, before)


def test_one_kind_of_layers_with_such_positions_is_enough() -> None:
    layers = {"full_attention": {"rope_type": "longrope"}, "sliding_attention": {"rope_type": "default"}}
    with pytest.raises(ConfigError, match="set eval_every to 0"):
        check_shareable(SimpleNamespace(rope_parameters=layers))
    check_shareable(SimpleNamespace(rope_parameters={"full_attention": {"rope_type": "default"}}))
