"""Generation prints the target's own text, greedy or sampled, whatever the drafter, and refuses a drafter of another target."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the example's target is a transformers model")

import data
import export
import generate
from config import Config
from drafter import new_drafter
from speculative import (
    Decoded,
    DFlashProposer,
    NGramProposer,
    Sampling,
    acceptance_length,
    decode,
    greedy,
    regret,
    speculate,
)
from target import Target, language_of

CPU = torch.device("cpu")
BLOCK = 4


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return Target(tiny_target, (0, 2, 3), CPU)


@pytest.fixture(scope="module")
def folder(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "drafter"
    export.save(folder, new_drafter(Config(), target.shape, 3, CPU), target, BLOCK, 0)
    return folder


def prompt_of(seed: int) -> torch.Tensor:
    return torch.randint(2, 258, (12,), generator=torch.Generator().manual_seed(seed))


def noise_of(seed: int, count: int) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_sampling_with_drafts_gives_what_the_same_noise_gives_without(
    target: Target, seed: int, temperature: float
) -> None:
    sampling = Sampling(temperature, noise_of(seed, 24))
    own = decode(target, prompt_of(seed), 24, sampling)
    assert own != greedy(target, prompt_of(seed), 24)
    drafter = new_drafter(Config(seed=seed), target.shape, 3, CPU)
    for proposer in (DFlashProposer(drafter, target, BLOCK), NGramProposer(BLOCK - 1)):
        assert speculate(target, proposer, prompt_of(seed), 24, sampling).tokens == own


class Knows:
    """Draft the tokens that are sampled, but for every third."""

    passes = 0

    def __init__(self, prompt: int, tokens: list[int]) -> None:
        self._prompt, self._tokens = prompt, tokens

    def propose(self, known: list[int], features: torch.Tensor) -> torch.Tensor:
        done = len(known) - self._prompt
        drafts = (self._tokens + [0] * BLOCK)[done : done + BLOCK - 1]
        return torch.tensor([2 + t % 256 if (done + i) % 3 == 0 else t for i, t in enumerate(drafts)])


def test_sampled_drafts_are_accepted_and_refused_as_the_sample_says(target: Target) -> None:
    sampling = Sampling(1.0, noise_of(5, 24))
    own = decode(target, prompt_of(5), 24, sampling)
    decoded = speculate(target, Knows(12, own), prompt_of(5), 24, sampling)
    assert decoded.tokens == own
    assert decoded.accepted == [2] * 7 + [1]  # the last of 25 tokens is one too many


def test_what_is_sampled_with_drafts_is_distributed_as_the_target_says(target: Target) -> None:
    """The second token after a fixed first one, for noise in equal steps: each token as often as its probability, to one step."""
    steps, temperature, prompt = 256, 0.5, prompt_of(1)
    first = decode(target, prompt, 1, Sampling(temperature, torch.tensor([0.4])))
    logits = target.logits(target.forward(torch.cat((prompt, torch.tensor(first))).unsqueeze(0)).normed[0, -1])
    expected = (logits / temperature).softmax(-1) * steps
    likeliest = int(expected.argmax())
    counts = torch.zeros(len(expected))
    accepted = 0
    for noise in (torch.arange(steps) + 0.5) / steps:
        sampling = Sampling(temperature, torch.tensor([0.4, float(noise), 0.5]))
        decoded = speculate(target, Knows(len(prompt), [*first, likeliest]), prompt, 3, sampling)
        assert decoded.tokens[0] == first[0]
        counts[decoded.tokens[1]] += 1
        accepted += decoded.accepted[0] > 0
    assert (counts - expected).abs().max() <= 1.01
    assert accepted == counts[likeliest] > 0


def test_regret_is_zero_for_the_targets_own_tokens_and_not_for_others(target: Target) -> None:
    tokens = greedy(target, prompt_of(2), 16)
    assert regret(target, prompt_of(2), tokens).largest < 1e-4
    assert regret(target, prompt_of(2), [*tokens[:7], (tokens[7] + 1) % 256, *tokens[8:]]).largest > 1e-3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_command_prints_the_targets_own_text_and_what_was_saved(
    tiny_target: Path, target: Target, folder: Path, capsys: pytest.CaptureFixture[str], temperature: float
) -> None:
    arguments = ["--target", str(tiny_target), "--drafter", str(folder), "--prompt", "def main("]
    arguments += ["--new-tokens", "20", "--device", "cpu", "--repeats", "1", "--temperature", str(temperature)]
    assert generate.main(arguments) == 0
    out = capsys.readouterr().out
    prompt = data.encode(b"def main(").long()
    sampling = Sampling(temperature, torch.rand(20, generator=data.generator(0, "generate")))
    own = decode(target, prompt, 20, sampling)
    assert out.startswith("def main(" + data.decode(torch.tensor(own)).decode(errors="replace") + "\n")
    decoded = speculate(target, DFlashProposer(export.load(folder, CPU).drafter, target, BLOCK), prompt, 20, sampling)
    assert f"{len(own)} tokens at temperature {temperature:g}, the same tokens as without drafts" in out
    assert f"acceptance length {acceptance_length(decoded.accepted):.2f}, of 4 at most" in out
    assert f"target passes: {decoded.target_passes} instead of {len(own)}" in out
    assert re.search(r"[\d.]+ times as fast", out)
    assert ("largest distance" in out) is (temperature == 0)


def test_in_bfloat16_no_token_is_far_from_the_likeliest(
    tiny_target: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The two largest logits of this target are 0.5 apart on average, near 4, where bfloat16 has steps of 0.03."""
    arguments = ["--target", str(tiny_target), "--drafter", str(folder), "--prompt", "def main(", "--new-tokens", "20"]
    assert generate.main([*arguments, "--device", "cpu", "--repeats", "1", "--dtype", "bfloat16"]) == 0
    found = re.search(r"largest distance .*: (.*)\n", capsys.readouterr().out)
    assert found
    assert float(found[1]) < 0.1


def test_a_tokenizer_turns_ids_back_into_text_without_special_ones(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers", reason="comes with transformers")
    words = {word: i for i, word in enumerate(["<unk>", "</s>", "the", "cat", "sat"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="</s>")
    fast.save_pretrained(tmp_path)
    language = language_of(tmp_path, transformers.Qwen3Config(vocab_size=8))
    assert language.decode(language.encode(b"the cat sat")) == "the cat sat"
    assert language.decode(torch.tensor([2, 3, 1])) == "the cat"


def test_the_speed_up_compares_tokens_a_second() -> None:
    generated = generate.Generated(Decoded([1] * 12, [2] * 4, 5, 4), [1] * 10, 2.0, 5.0)
    assert generated.speed_up == 3.0
    assert "OTHER tokens" in generate.report(generated, 8, 0.0, 1)[0]
    assert "6.0 with drafts, 2.0 without: 3.00 times" in generate.report(generated, 8, 0.0, 1)[2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--prompt": ""}, "prompt is empty"),
        ({"--temperature": "-1"}, "temperature"),
        ({"--temperature": "nan"}, "temperature"),
        ({"--new-tokens": "0"}, "new_tokens"),
        ({"--repeats": "0"}, "repeats"),
        ({"--device": "cuda:77"}, "does not exist"),
        ({"--target": "nowhere"}, "target is nowhere"),
        ({"--drafter": "nowhere"}, "drafter is nowhere"),
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused(
    tiny_target: Path, folder: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str], message: str
) -> None:
    options = {"--target": str(tiny_target), "--drafter": str(folder), "--prompt": "x", "--device": "cpu"} | changes
    assert generate.main([word for option in options.items() for word in option]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("num_target_layers", 6, "number of layers"), ("vocab_size", 300, "vocabulary"), ("hidden_size", 64, "width")],
)
def test_a_drafter_of_another_target_is_refused_before_anything_is_loaded(
    tiny_target: Path, folder: Path, tmp_path: Path, field: str, value: Any, message: str
) -> None:
    config = json.loads((folder / "config.json").read_text()) | {field: value}
    (tmp_path / "config.json").write_text(json.dumps(config))  # and no weights
    with pytest.raises(ValueError, match=message):
        generate.load(tiny_target, tmp_path, CPU, torch.float32, trust_remote_code=False)


def test_the_mask_token_is_the_drafters(tiny_target: Path, folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"]["mask_token_id"] = 77
    (tmp_path / "config.json").write_text(json.dumps(config))
    target, exported = generate.load(tiny_target, tmp_path, CPU, torch.float32, trust_remote_code=False)
    assert target.language.mask_id == exported.mask_id == 77
