"""Conversations are rendered with the target's template, and only answers are learned from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the example's target is a transformers model")
pytest.importorskip("rich", reason="the example's display")
pytest.importorskip("matplotlib", reason="the example's plots")

import chat
import data
import demo
import evaluate
import train
from config import ConfigError
from data import Conversations
from safecompile.testing import no_compiles
from speculative import greedy
from target import Target
from tests.dflash.small import SMALL
from tests.helpers.models import tiny_model
from work import make_work

CPU = torch.device("cpu")
PLAIN = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    "{% if enable_thinking is defined %}{{ '<think>' if enable_thinking else '<no think>' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>\n"
    "{% endgeneration %}{% else %}{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
THINKING = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}"
    "{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
ASKS = {"role": "user", "content": "2+2?"}
ANSWERS = {"role": "assistant", "content": "Four."}
ASKS_MORE = {"role": "user", "content": "Sure?"}
ANSWERS_MORE = {"role": "assistant", "content": "Yes."}
TALK = [ASKS, ANSWERS, ASKS_MORE, ANSWERS_MORE]
CONFIG = replace(
    SMALL,
    taps=(0, 2, 3),
    prompt_length=32,
    response_length=16,
    uses=2,
    steps=4,
    eval_prompts=1,
    eval_prompt_length=64,
    eval_new_tokens=8,
)


def folder_of(path: Path, template: str | None) -> Path:
    """Return the folder of an untrained target whose tokens are bytes and three marks, with a chat template."""
    tokenizers = pytest.importorskip("tokenizers", reason="comes with transformers")
    transformers = pytest.importorskip("transformers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|start|>", "<|end|>"])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")
    fast.chat_template = template
    fast.save_pretrained(path)
    tiny_model("Qwen3", vocab_size=264, head_dim=8, max_position_embeddings=256, eos_token_id=257).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Return a target with the usual template, without marks of what is generated."""
    return Target(folder_of(tmp_path_factory.mktemp("plain"), PLAIN), (0, 2, 3), CPU)


def tokenizer_of(template: str, tmp_path: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(folder_of(tmp_path, template))


def record(messages: Sequence[dict[str, Any]]) -> chat.Record:
    return chat.Record(1, list(messages), None, False)


def lines(path: Path, *conversations: Any) -> Path:
    path.write_text("".join(json.dumps({"messages": c}) + "\n" for c in conversations))
    return path


def numbered(count: int) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": f"{'?' * (i % 5)}{i}"}, ANSWERS] for i in range(count)]


def learned(tokenizer: Any, sample: data.Sample | None) -> list[str]:
    """Return the supervised pieces of a sample, as text."""
    assert sample is not None
    pieces: list[list[int]] = [[]]
    for token, supervised in zip(sample.tokens.tolist(), sample.supervised.tolist(), strict=True):
        if supervised:
            pieces[-1].append(token)
        elif pieces[-1]:
            pieces.append([])
    return [tokenizer.decode(piece) for piece in pieces if piece]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_answers_up_to_the_end_of_their_turn_are_supervised_and_nothing_else(template: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(template, tmp_path)
    sample = chat.Template(tokenizer, "default", (257,)).conversation(record(TALK), 1000)
    assert learned(tokenizer, sample) == ["Four.<|end|>", "Yes.<|end|>"]
    assert chat.Template(tokenizer, "default", (257,)).conversation(record([ASKS]), 1000) is None
    assert sample is not None
    assert tokenizer.decode(sample.tokens) == tokenizer.apply_chat_template(TALK, tokenize=False)


def test_an_earlier_answer_that_is_shown_otherwise_than_when_it_was_the_last_is_not_supervised(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(THINKING, tmp_path)
    sample = chat.Template(tokenizer, "default", (257,)).conversation(record(TALK), 1000)
    assert learned(tokenizer, sample) == ["<think></think>Yes.<|end|>"]


def test_spaces_are_supervised_where_the_tokenizer_leaves_them_out_of_the_offsets(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="comes with transformers")
    tokenizer = tokenizer_of(PLAIN.replace("assistant\n", "assistant ").replace("role }}\n", "role }} "), tmp_path)
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    code = "  if x:\n    y = 1\n    z "
    sample = chat.Template(tokenizer, "default", (257,)).conversation(
        record([ASKS, {"role": "assistant", "content": code}, {"role": "user", "content": "  ?"}]), 1000
    )
    assert learned(tokenizer, sample) == [code + "<|end|>"]


@pytest.mark.parametrize(("thinking", "ends"), [("default", "\n"), ("on", "<think>"), ("off", "<no think>")])
def test_the_template_is_told_of_thinking(thinking: str, ends: str, plain: Target) -> None:
    tokenizer = plain.language.tokenizer
    sample = chat.Template(tokenizer, thinking, (257,)).prompt(record([ASKS]), 1000)
    assert sample is not None
    assert tokenizer.decode(sample.tokens) == f"<|start|>user\n2+2?<|end|>\n<|start|>assistant\n{ends.lstrip()}"


def test_the_prompt_is_that_of_the_last_answer_it_is_short_enough_for(plain: Target) -> None:
    template = chat.Template(plain.language.tokenizer, "default", (257,))
    first, second, third = (
        plain.language.tokenizer.apply_chat_template(TALK[:turn], tokenize=False, add_generation_prompt=True)
        for turn in (1, 3, 4)
    )

    def prompt(messages: list[dict[str, str]], longest: int) -> str | None:
        sample = template.prompt(record(messages), longest)
        return sample and plain.language.tokenizer.decode(sample.tokens)

    count = {text: len(plain.language.encode(text.encode())) for text in (first, second, third)}
    assert prompt(TALK, 1000) == prompt(TALK, count[second]) == second
    assert prompt(TALK, count[second] - 1) == prompt(TALK, count[first]) == first
    assert prompt(TALK, count[first] - 1) is None
    assert prompt(TALK[:3], 1000) == second


def test_a_conversation_is_cut_at_the_length_and_left_out_without_two_tokens_of_an_answer(plain: Target) -> None:
    template = chat.Template(plain.language.tokenizer, "default", (257,))
    whole = template.conversation(record(TALK[:2]), 1000)
    assert whole is not None
    first = int(whole.supervised.nonzero()[0])
    cut = template.conversation(record(TALK[:2]), first + 2)
    assert cut is not None
    assert learned(plain.language.tokenizer, cut) == ["Fo"]
    assert template.conversation(record(TALK[:2]), first + 1) is None
    assert template.conversation(record([ASKS]), 1000) is None


def test_other_names_of_the_same_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    sharegpt = {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "Four."}]}
    specforge = {"conversations": [ASKS, ANSWERS], "id": 7}
    path.write_text("\n".join(json.dumps(c) for c in (sharegpt, specforge)) + "\n\n")
    assert [(r.line, r.messages) for r in chat.read(path)] == [(1, [ASKS, ANSWERS]), (2, [ASKS, ANSWERS])]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "no JSON"),
        ("[1]", "no JSON object"),
        ('{"text": "x"}', "no list of messages"),
        ('{"messages": []}', "no list of messages"),
        ('{"messages": ["hello"]}', "message 1 has no role"),
        ('{"messages": [{"role": "user", "content": "x"}, {"content": "y"}]}', "message 2 has no role"),
        ('{"messages": [{"role": "user", "content": [1]}]}', "message 1 has no text"),
        ('{"conversations": [{"from": 1, "value": "x"}]}', "message 1 has no role"),
        ('{"messages": [{"role": "tool", "content": "x"}]}', "refuses it: no tools here"),
    ],
)
def test_a_bad_line_is_refused_with_file_and_number(line: str, says: str, plain: Target, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": TALK}) + "\n\n" + line + "\n")
    with pytest.raises(ConfigError) as error:
        chat.load(replace(CONFIG, data=path), plain.language)
    assert str(error.value).startswith(f"{path}, line 3: ")
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt_length": 3}, "no conversation to train on has a prompt left, as prompt_length is 3"),
        ({"answers": "data", "prompt_length": 4, "response_length": 4}, "has an answer left, as length is 8"),
        ({"eval_prompt_length": 3}, "no held-out conversation has a prompt left"),
        ({"eval_prompts": 50}, "eval_prompts is 50, but only"),
    ],
)
def test_a_file_with_nothing_left_is_refused(change: dict[str, Any], says: str, plain: Target, tmp_path: Path) -> None:
    path = lines(tmp_path / "chats.jsonl", *numbered(64))
    with pytest.raises(ConfigError, match=says):
        chat.load(replace(CONFIG, data=path, **change), plain.language)


def test_a_file_that_is_too_short_or_none_is_refused(plain: Target, tmp_path: Path) -> None:
    for name, content, says in (
        ("a", b"", "0 conv"),
        ("b", b'{"messages": 1}', "line 1"),
        ("c", b"\xff", "cannot be read"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=says):
            chat.load(replace(CONFIG, data=tmp_path / name), plain.language)


def test_a_target_without_tokenizer_or_template_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    path = lines(tmp_path / "chats.jsonl", *numbered(8))
    (tmp_path / "target").mkdir()
    untold = Target(folder_of(tmp_path / "target", None), (0,), CPU)
    for target, says in ((Target(tiny_target, (0,), CPU), "with a tokenizer"), (untold, "need a chat template")):
        with pytest.raises(ConfigError, match=says):
            chat.load(replace(CONFIG, data=path), target.language)


def test_the_split_follows_from_the_lines_alone_and_both_parts_have_some(plain: Target, tmp_path: Path) -> None:
    config = replace(CONFIG, data=lines(tmp_path / "a.jsonl", *numbered(64)))
    chats = chat.load(config, plain.language)
    held_out = {tuple(s.tokens.tolist()) for s in chats.held_out.samples}
    assert len(held_out) + len(chats.train.samples) == 64
    assert 0 < len(held_out) < 16
    assert held_out.isdisjoint({tuple(s.tokens.tolist()) for s in chats.train.samples})
    turned = replace(config, data=lines(tmp_path / "b.jsonl", *reversed(numbered(64))))
    assert {tuple(s.tokens.tolist()) for s in chat.load(turned, plain.language).held_out.samples} == held_out
    few = chat.load(replace(config, data=lines(tmp_path / "c.jsonl", TALK, TALK)), plain.language)
    assert (len(few.train.samples), len(few.held_out.samples)) == (1, 1)


def test_each_conversation_comes_once_before_any_comes_again() -> None:
    source = Conversations(tuple(data.Sample(torch.tensor([i]), torch.tensor([True])) for i in range(10)))

    def turn(number: int, seed: int) -> list[int]:
        return [int(source.at(10 * number + i, seed).tokens) for i in range(10)]

    assert sorted(turn(0, 0)) == sorted(turn(1, 0)) == list(range(10))
    assert turn(0, 0) == turn(0, 0)
    assert turn(0, 0) != turn(1, 0)
    assert turn(0, 0) != turn(0, 1)


def test_the_targets_answer_to_each_prompt_is_what_it_would_say_alone(plain: Target, tmp_path: Path) -> None:
    config = replace(CONFIG, data=lines(tmp_path / "chats.jsonl", *numbered(64)))
    chats = chat.load(config, plain.language)
    work = make_work(config, chats.train, plain, 1, 1)
    prompts = [chats.train.at((1 * 2 + 1) * 4 + i, config.seed).tokens for i in range(4)]
    assert len({len(prompt) for prompt in prompts}) > 1
    with no_compiles():  # whatever the lengths
        works = [make_work(config, chats.train, plain, item, 0) for item in range(4)]
    shortest = {int(w.loss_mask.int().argmax(1).min()) for w in works}
    assert len(shortest) > 1
    assert work.tokens.shape == work.loss_mask.shape == (4, 48)
    for row, prompt in enumerate(prompts):
        start = len(prompt)
        assert torch.equal(work.tokens[row, :start], prompt.long())
        assert not work.loss_mask[row, :start].any()
        if row % 2 == 0:  # greedy
            expected = greedy(plain, prompt.long(), 48 - start)
            assert work.tokens[row, start : start + len(expected)].tolist() == expected
            assert work.loss_mask[row].sum() == len(expected)
    torch.testing.assert_close(work.features.tapped, plain.forward(work.tokens).tapped)


def test_answers_that_are_there_are_learned_from_as_they_are(plain: Target, tmp_path: Path) -> None:
    config = replace(CONFIG, answers="data", data=lines(tmp_path / "chats.jsonl", *numbered(64)))
    chats = chat.load(config, plain.language)
    work = make_work(config, chats.train, plain, 0, 0)
    for row in range(4):
        sample = chats.train.at(row, config.seed)
        count = len(sample.tokens)
        assert torch.equal(work.tokens[row, :count], sample.tokens.long())
        assert torch.equal(work.loss_mask[row, :count], sample.supervised)
        assert not work.loss_mask[row, count:].any()
        # Padding is on the right, where no token before it looks.
        alone = plain.forward(sample.tokens.long().unsqueeze(0))
        torch.testing.assert_close(work.features.normed[row, :count], alone.normed[0])


def test_a_text_is_learned_from_as_it_is_if_asked_for(plain: Target) -> None:
    text = torch.arange(200, dtype=torch.int32)
    work = make_work(replace(CONFIG, answers="data"), text, plain, 0, 0)
    assert (work.tokens.diff(dim=1) == 1).all()
    assert work.loss_mask.sum(1).tolist() == [16] * 4
    assert work.loss_mask[:, 32:].all()


def test_held_out_prompts_are_answered_alone_and_taken_once(plain: Target, tmp_path: Path) -> None:
    config = replace(CONFIG, data=lines(tmp_path / "chats.jsonl", *numbered(128)), eval_prompts=3)
    chats = chat.load(config, plain.language)
    references = evaluate.references(config, chats.held_out, plain)
    assert len({tuple(r.prompt.tolist()) for r in references}) == 3
    assert all(r.tokens == greedy(plain, r.prompt, 8) for r in references)


@pytest.mark.parametrize("answers", ["target", "data"])
def test_drafters_train_on_chats(answers: Any, plain: Target, tmp_path: Path) -> None:
    config = replace(CONFIG, answers=answers, data=lines(tmp_path / "chats.jsonl", *numbered(32)))
    chats = chat.load(config, plain.language)
    training = train.Training(config, chats.train, [plain])
    training.run(lambda step, numbers: None)
    assert len(training.losses) == 4
    assert all(loss > 0 for loss in training.losses)
    assert train.largest_difference(training.drafters) == 0.0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("--data {missing}", "that is no file"),
        ("--data {chats} --text {folder}", "name one of them"),
        ("--data {chats}", "with a tokenizer"),
        ("--answers both", "answers is 'both': use 'target' or 'data'"),
    ],
)
def test_the_program_refuses_before_any_work(
    wrong: str,
    says: str,
    tiny_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(demo, "Run", None)
    chats = lines(tmp_path / "chats.jsonl", *numbered(8))
    given = wrong.format(missing=tmp_path / "absent", chats=chats, folder=tmp_path).split()
    run = tmp_path / "run"
    assert demo.main([*given, "--target", str(tiny_target), "--taps", "0,2", "--run", str(run)]) == 2
    assert says in capsys.readouterr().err
    assert not run.exists()
