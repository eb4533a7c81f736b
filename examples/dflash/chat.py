"""Conversations from JSON lines, rendered with the target's chat template, and which of their tokens are answers.

A line is ``{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}``, and may have
``"tools"`` for the template. ``"conversations"`` in place of ``"messages"`` is read, too, with ``role`` and ``content`` or with
``from`` (system, human, gpt) and ``value``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from config import Config, ConfigError
from data import HELD_OUT_ONE_IN, Conversations, Sample, is_held_out, pack
from target import Language

ASSISTANT = "assistant"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ROLES = {"human": "user", "gpt": ASSISTANT}


class Chats(NamedTuple):
    """A file's conversations, to train on and to evaluate on.

    Attributes:
        train: whole ones with their answers, or prompts alone if the target is to answer them.
        held_out: prompts; one line in sixteen, chosen by its content.
    """

    train: Conversations
    held_out: Conversations


class Record(NamedTuple):
    """A line of the file: where it is, what it says, and the tools that the template is told of."""

    line: int
    messages: list[dict[str, Any]]
    tools: list[Any] | None
    held_out: bool


def load(config: Config, language: Language) -> Chats:
    """Read and render ``config.data``, which is not None.

    To train on answers as they are, whole conversations are rendered, and cut at ``config.length`` tokens; one with no answer left
    is left out; packing puts several into one sequence. For answers of the target, and for evaluation, a conversation gives one prompt: everything up to its last answer
    whose prompt is not too long.

    Raises:
        ConfigError: if the target has no tokenizer or no chat template, a line is wrong, or nothing is left.
    """
    path = config.data
    assert path is not None
    tokenizer = language.tokenizer
    if tokenizer is None:
        raise ConfigError(f"data is {path}: chats need a target with a tokenizer, and {config.target} has none")
    if not tokenizer.is_fast:
        raise ConfigError(
            f"data is {path}: chats need a tokenizer that knows where its tokens are in the text (tokenizer.json), "
            f"and that of {config.target} does not"
        )
    if not tokenizer.chat_template:
        raise ConfigError(f"data is {path}: chats need a chat template, and the tokenizer of {config.target} has none")
    chat = Template(tokenizer, config.thinking, language.eos_ids)
    records = list(read(path))
    if len(records) < 2:
        raise ConfigError(f"data is {path}: it has {len(records)} conversations, training and evaluation need one each")
    if len({record.held_out for record in records}) == 1:
        cut = len(records) - max(1, len(records) // HELD_OUT_ONE_IN)
        records = [record._replace(held_out=index >= cut) for index, record in enumerate(records)]
    train: list[Sample] = []
    held_out: list[Sample] = []
    for record in records:
        try:
            if record.held_out:
                sample = chat.prompt(record, config.eval_prompt_length)
            elif config.answers == "target":
                sample = chat.prompt(record, config.prompt_length)
            else:
                sample = chat.conversation(record, config.length)
        except Exception as error:  # whatever a template thinks of the messages
            raise ConfigError(f"{path}, line {record.line}: the chat template refuses it: {_line(error)}") from error
        if sample is not None:
            (held_out if record.held_out else train).append(sample)
    limit = f"length is {config.length}" if config.answers == "data" else f"prompt_length is {config.prompt_length}"
    kept = "an answer" if config.answers == "data" else "a prompt"
    if not train:
        raise ConfigError(f"data is {path}: no conversation to train on has {kept} left, as {limit}")
    if not held_out:
        raise ConfigError(
            f"data is {path}: no held-out conversation has a prompt left, as eval_prompt_length is {config.eval_prompt_length}"
        )
    if len(held_out) < config.eval_prompts:
        raise ConfigError(
            f"data is {path}: eval_prompts is {config.eval_prompts}, but only {len(held_out)} conversations are held out"
        )
    left_out = len(records) - len(train) - len(held_out)
    if config.packing:
        train = pack(train, config.length)
    return Chats(Conversations(tuple(train), left_out), Conversations(tuple(held_out), left_out))


def read(path: Path) -> Iterator[Record]:
    """Yield a file's conversations; empty lines are skipped.

    Raises:
        ConfigError: naming file and line, if a line is no conversation.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield _record(path, number, text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data is {path}, and that cannot be read: {error}") from error


class Template:
    """A tokenizer's chat template.

    Args:
        tokenizer: of transformers, fast, with a template.
        thinking: what the template is told of thinking; ``default`` is nothing.
        eos_ids: ids that end an answer.
    """

    def __init__(self, tokenizer: Any, thinking: str, eos_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._options = {} if thinking == "default" else {"enable_thinking": thinking == "on"}
        self._eos_ids = torch.tensor(eos_ids, dtype=torch.int32)
        template = tokenizer.chat_template
        self._marks_answers = bool(_GENERATION.search(template if isinstance(template, str) else json.dumps(template)))

    def prompt(self, record: Record, longest: int) -> Sample | None:
        """Return the prompt of the last answer whose prompt has at most ``longest`` tokens; None if there is none.

        A conversation that ends without an answer has one more prompt, all of it.
        """
        messages = record.messages
        turns = [index for index, message in enumerate(messages) if message["role"] == ASSISTANT and index]
        if messages[-1]["role"] != ASSISTANT:
            turns.append(len(messages))
        for turn in reversed(turns):
            tokens = self._tokens(self._render(record, messages[:turn], add_generation_prompt=True))
            if len(tokens) <= longest:
                return Sample(tokens, torch.zeros(len(tokens), dtype=torch.bool))
        return None

    def conversation(self, record: Record, longest: int) -> Sample | None:
        """Return the first ``longest`` tokens of all of it; None if they hold no answer of two tokens, an anchor and its next.

        Where the template marks what the assistant generates, that is supervised. Where it does not: what an answer adds to the
        text before it, as far as the template renders both as a beginning of the whole. Some templates show an earlier answer's
        thinking, or an empty one, only while it is the last answer; such an earlier answer is not supervised.
        """
        if self._marks_answers:
            rendered = self._tokenizer.apply_chat_template(
                record.messages,
                tools=record.tools,
                return_dict=True,
                return_assistant_tokens_mask=True,
                tokenizer_kwargs={"verbose": False},
                **self._options,
            )
            tokens = torch.tensor(rendered["input_ids"], dtype=torch.int32)
            supervised = torch.tensor(rendered["assistant_masks"], dtype=torch.bool)
        else:
            tokens, supervised = self._by_prefixes(record)
        supervised &= ~self._after_the_end(tokens, supervised)
        tokens, supervised = tokens[:longest], supervised[:longest]
        return Sample(tokens, supervised) if bool((supervised[:-1] & supervised[1:]).any()) else None

    def _by_prefixes(self, record: Record) -> tuple[Tensor, Tensor]:
        messages = record.messages
        whole = self._render(record, messages)
        encoded = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        starts, ends = torch.tensor(encoded["offset_mapping"], dtype=torch.long).reshape(-1, 2).unbind(1)
        supervised = torch.zeros(len(starts), dtype=torch.bool)
        for turn, message in enumerate(messages):
            if message["role"] == ASSISTANT and turn:
                before = self._render(record, messages[:turn], add_generation_prompt=True)
                after = self._render(record, messages[: turn + 1])
                if whole.startswith(before) and whole.startswith(after) and len(before) < len(after):
                    # Some tokenizers leave spaces out of the offsets, so that a token of spaces is empty and stands at its end.
                    supervised |= (starts >= len(before)) & (ends > len(before)) & (ends <= len(after))
        return torch.tensor(encoded["input_ids"], dtype=torch.int32), supervised

    def _after_the_end(self, tokens: Tensor, supervised: Tensor) -> Tensor:
        """Return where an answer is over, bool ``[n]``: a template's line break after the end of a turn is never generated."""
        begins = supervised & ~torch.nn.functional.pad(supervised[:-1], (1, 0))
        if not bool(begins.any()):
            return begins
        ends = (torch.isin(tokens, self._eos_ids) & supervised).long()
        before = ends.cumsum(0) - ends
        answer = (begins.cumsum(0) - 1).clamp(min=0)
        return supervised & (before > before[begins][answer])

    def _render(self, record: Record, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages,
            tools=record.tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self._options,
        )
        return text

    def _tokens(self, text: str) -> Tensor:
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return torch.tensor(ids, dtype=torch.int32)


def _record(path: Path, number: int, text: str) -> Record:
    def refuse(what: str) -> ConfigError:
        return ConfigError(f"{path}, line {number}: {what}")

    try:
        content = json.loads(text)
    except ValueError as error:
        raise refuse(f"this is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise refuse("this is no JSON object")
    messages = content.get("messages", content.get("conversations"))
    if not isinstance(messages, list) or not messages:
        raise refuse("there is no list of messages, under 'messages' or 'conversations'")
    named = [_message(message) for message in messages]
    for index, message in enumerate(named, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise refuse(f"message {index} has no role")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise refuse(f"message {index} has no text under 'content'")
    return Record(number, named, content.get("tools"), is_held_out(text.strip()))


def _message(message: Any) -> Any:
    """Return a message with the usual names for its parts."""
    if not isinstance(message, dict) or "from" not in message or "role" in message:
        return message
    role = message["from"]
    return {"role": _ROLES.get(role, role) if isinstance(role, str) else None, "content": message.get("value")}


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
