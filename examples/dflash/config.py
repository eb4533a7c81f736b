"""All options of a run, checked before any work."""

# ruff: noqa: RUF009  # what `_option` returns is a dataclass field

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import torch

from loss import Gradient
from optimizer import OptimizerName

_LEAST_NODE_TIMEOUT = 5.0

BUNDLED_TARGET = Path(__file__).parent / "assets" / "target"


class ConfigError(ValueError):
    """An option, or a combination of options, that cannot work."""


def _option(
    default: Any,
    meaning: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """Return a field of `Config` that carries its help text and what its values may be.

    Bounds that are None do not bind; choices need not be named where the type is a `Literal`.
    """
    limits = {"at least": at_least, "above": above, "at most": at_most, "below": below}
    return field(
        default=default,
        metadata={
            "help": meaning,
            "limits": {name: value for name, value in limits.items() if value is not None},
            "choices": choices,
        },
    )


_WITHIN: dict[str, Callable[[Any, float], bool]] = {
    "at least": lambda value, limit: value >= limit,
    "above": lambda value, limit: value > limit,
    "at most": lambda value, limit: value <= limit,
    "below": lambda value, limit: value < limit,
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of a run; the defaults are the demo's, made for two CPU cores and a few minutes.

    Each field is a key of configuration files and an option of the command line (see ``options.py``). Its meaning and the range of
    its values stand here alone, in the field's metadata.
    """

    seed: int = _option(0, "everything random follows from it", at_least=0)
    device: str = _option(
        "auto",
        "auto for all GPUs there are, or the CPU if there is none; cpu; cuda for all GPUs; or a map such as cuda:0,cuda:1 that "
        "the threads, targets first, are put onto in turn",
    )
    target: Path = _option(
        BUNDLED_TARGET, "folder of the target, a causal language model in Hugging Face's layout (the bundled one)"
    )
    target_dtype: Literal["float32", "bfloat16"] = _option(
        "float32", "precision of the target's weights and features; bfloat16 needs autocast"
    )
    compile_target: bool = _option(
        False, "compile the target's layers for its passes over whole sequences; takes Python's share of them away"
    )
    trust_remote_code: bool = _option(False, "run Python code that comes with the target")
    text: Path | None = _option(None, "folder of text (the standard library's sources)")
    data: Path | None = _option(
        None, "file of conversations, JSON lines with messages, in place of text; needs the target's chat template"
    )
    answers: Literal["target", "data"] = _option(
        "target", "whose answers to learn from: what the target says to the prompts (the paper's way), or what is there"
    )
    thinking: Literal["default", "on", "off"] = _option("default", "what the chat template is told of thinking")
    packing: bool = _option(
        False, "put as many conversations as fit into a sequence; none sees another; for answers that are in the data"
    )
    cache: Path | None = _option(None, "folder of features made with --make-cache, to train on without target threads")
    targets: int = _option(5, "target threads", at_least=1)
    drafters: int = _option(3, "drafter threads", at_least=1)

    layers: int = _option(2, "draft layers (paper: 5)", at_least=1)
    block_size: int = _option(8, "tokens of a block, anchor included (paper: 16)", at_least=2)
    taps: tuple[int, ...] | None = _option(
        (0, 1, 2),
        "target layers whose outputs are the features, such as 0,1,2; 'paper' for the paper's five",
        at_least=0,
    )
    draft_heads: int | None = _option(None, "attention heads of a draft layer (the target's)", at_least=1)
    draft_kv_heads: int | None = _option(None, "key/value heads of a draft layer (the target's)", at_least=1)
    draft_head_dim: int | None = _option(None, "width of a draft layer's heads (the target's)", at_least=2)
    draft_intermediate_size: int | None = _option(
        None, "width of a draft layer's feed-forward part (the target's)", at_least=1
    )
    layer_types: tuple[str, ...] | None = _option(
        None,
        "full_attention or sliding_attention for each draft layer (all full)",
        choices=("full_attention", "sliding_attention"),
    )
    sliding_window: int | None = _option(None, "tokens that a sliding draft layer looks back", at_least=1)
    mask_token_id: int | None = _option(
        None,
        "id whose embedding fills draft slots (the tokenizer's mask token, or the first id past the tokenizer)",
        at_least=0,
    )

    prompt_length: int = _option(
        128, "tokens of text that an answer is made to; of chats, the longest prompt", at_least=1
    )
    response_length: int = _option(128, "tokens of an answer: an anchor and the token after it make 2", at_least=2)
    temperature: float = _option(0.6, "of every second answer, the others are greedy", above=0)
    sequences: int = _option(16, "sequences in one batch of work, generated together", at_least=1)
    uses: int = _option(20, "training steps made with one batch of work, each with other anchors", at_least=1)
    batch: int = _option(4, "sequences in one training step of one replica", at_least=1)
    anchors: int = _option(16, "blocks a sequence (paper: 512)", at_least=1)

    position_weights: Literal["decay", "dpace"] = _option(
        "decay",
        "what a block's slots weigh in the loss: equation 4 of the paper, or what the drafter's own confidence says (D-PACE, arXiv 2605.18810)",
    )
    gamma: float = _option(4.0, "decay of the position weights (paper: 7 for blocks of 16, 4 for blocks of 8)", above=0)
    dpace_alpha: float = _option(
        0.5, "smoothing of D-PACE's confidence: at 1 it plays no role (D-PACE's paper: 0.5)", above=0, at_most=1
    )
    kl_weight: float = _option(
        0.5,
        "share of the soft-label divergence in the loss, the rest is cross entropy (paper: 0)",
        at_least=0,
        at_most=1,
    )
    chunk_blocks: int = _option(8, "blocks of a sequence whose logits exist at once", at_least=1)
    gradient: Gradient = _option(
        "recomputed", "what the backward needs of a chunk is recomputed, or made in_forward, which is faster"
    )

    steps: int = _option(180, "training steps", at_least=1)
    optimizer: OptimizerName = _option("muon", "adamw as in the paper, or muon, which gets further in a short run")
    lr: float = _option(3e-3, "peak learning rate of AdamW (paper: 6e-4)", above=0)
    muon_lr: float = _option(4e-2, "peak learning rate of Muon", above=0)
    warmup_ratio: float = _option(0.04, "share of steps that warm up", at_least=0, below=1)
    clip: float = _option(1.0, "largest norm of the gradient", above=0)
    attention: Literal["auto", "dense"] = _option(
        "auto", "auto for compiled flex attention on GPUs, or dense masks everywhere, which also hold what nobody sees"
    )
    autocast: bool = _option(
        False, "compute forward passes in bfloat16; the drafter's weights and optimizer stay in float32"
    )

    save_every: int = _option(45, "steps between two checkpoints", at_least=1)
    queue_depth: int = _option(2, "batches of work that wait for one replica at most", at_least=1)

    node_timeout: float = _option(
        30.0,
        "of several nodes: seconds to start, or without an answer, after which one is given up, and all end",
        above=0,
    )
    collective_timeout: float = _option(
        1800.0,
        "of several nodes: seconds that one that is alive is waited for at most, its compiles and checkpoints included",
        above=0,
    )

    metrics: tuple[str, ...] = _option(
        (), "where metrics go besides metrics.jsonl: tensorboard, or package.module:factory of your own"
    )

    tau: float = _option(
        2.5, "acceptance length, on references that do not loop, that the trained drafter must reach", at_least=1
    )
    eval_every: int = _option(
        0,
        "steps between two evaluations while training goes on, in a thread of their own; 0 for the end only",
        at_least=0,
    )
    eval_prompts: int = _option(16, "held-out prompts for speculative decoding", at_least=1)
    eval_prompt_length: int = _option(128, "tokens of each; of chats, the longest", at_least=1)
    eval_new_tokens: int = _option(96, "tokens of each response", at_least=1)

    @property
    def length(self) -> int:
        """Tokens of a training sequence, ``S``."""
        return self.prompt_length + self.response_length

    @property
    def chunk_rows(self) -> int:
        """Rows of a sequence whose logits exist at once: no slot 0, which predicts nothing."""
        return self.chunk_blocks * (self.block_size - 1)

    def check_ranges(self) -> None:
        """Refuse a value that no other option could make right.

        Raises:
            ConfigError: with one sentence that says what to change.
        """
        for option in fields(self):
            value = getattr(self, option.name)
            for single in value if isinstance(value, tuple) else (value,):
                choices = choices_of(option.name)
                if choices and single is not None and single not in choices:
                    raise ConfigError(f"{option.name} is {single!r}: use {' or '.join(map(repr, choices))}")
                if isinstance(single, float) and not math.isfinite(single):
                    raise ConfigError(f"{option.name} is {single}, it must be a finite number")
                for name, limit in option.metadata["limits"].items():
                    if single is not None and not _WITHIN[name](single, limit):
                        raise ConfigError(f"{option.name} is {single}, it must be {name} {limit}")
        if self.taps is not None and len(set(self.taps)) < len(self.taps):
            raise ConfigError(f"taps are {self.taps}, each layer can be tapped once")
        if self.taps == ():
            raise ConfigError("taps are empty: name at least one layer")

    def check_combinations(self) -> None:
        """Refuse values that do not go together.

        Raises:
            ConfigError: with one sentence that says what to change.
        """
        if self.batch > self.sequences:
            raise ConfigError(f"batch is {self.batch}, but one batch of work holds only {self.sequences} sequences")
        if self.uses * self.batch < self.sequences:
            raise ConfigError(
                f"uses times batch is {self.uses * self.batch}, so that some of the {self.sequences} sequences of a batch of work "
                "would never be trained on: lower sequences, or raise uses or batch"
            )
        if self.anchors % self.chunk_blocks:
            raise ConfigError(
                f"chunk_blocks ({self.chunk_blocks}) must divide anchors ({self.anchors}), "
                "or the last chunk has a shape of its own and is compiled again"
            )
        if self.position_weights != "dpace" and self.dpace_alpha != Config.dpace_alpha:
            raise ConfigError(
                f"dpace_alpha is {self.dpace_alpha}, but position_weights is {self.position_weights!r}, which has no use for it: leave it "
                "out, or set position_weights to 'dpace'"
            )
        if self.layer_types is not None and len(self.layer_types) != self.layers:
            raise ConfigError(f"layer_types names {len(self.layer_types)} layers, but layers is {self.layers}")
        if "sliding_attention" in (self.layer_types or ()) and self.sliding_window is None:
            raise ConfigError("layer_types has sliding layers, which need a sliding_window")
        if self.sliding_window is not None and "sliding_attention" not in (self.layer_types or ()):
            raise ConfigError(
                f"sliding_window is {self.sliding_window}, but no layer slides: name sliding layers with layer_types"
            )
        if self.packing and (self.data is None or self.answers != "data"):
            raise ConfigError("packing needs conversations with answers that are there: name data, and answers 'data'")
        if self.packing and self.compile_target:
            raise ConfigError(
                "compile_target would compile anew for each number and length of packed conversations: leave out one of them"
            )
        if self.node_timeout < _LEAST_NODE_TIMEOUT:
            raise ConfigError(
                f"node_timeout is {self.node_timeout}, but a busy machine takes seconds to answer: set it to "
                f"{_LEAST_NODE_TIMEOUT:g} at least"
            )
        if self.data is not None and self.text is not None:
            raise ConfigError(f"data is {self.data} and text is {self.text}: name one of them")
        if self.target_dtype == "bfloat16" and not self.autocast:
            raise ConfigError(
                "target_dtype is 'bfloat16', and float32 draft layers take its features only with autocast"
            )

    def validate(self, *, planned: bool = False) -> None:
        """Refuse what cannot work here.

        Args:
            planned: for a run elsewhere: the devices that are named need not exist.

        Raises:
            ConfigError: with one sentence that says what to change.
        """
        self.check_ranges()
        self.check_combinations()
        kinds = {device.type for device in self.devices(planned=planned)[self.targets :]}
        if len(kinds) > 1:
            raise ConfigError(
                f"device is {self.device!r}, which puts drafters onto {' and '.join(sorted(kinds))}: replicas stay equal in every "
                "bit on one kind of device only"
            )
        if not (self.target / "config.json").is_file():
            raise ConfigError(
                f"target is {self.target}: no config.json there, it must be a Hugging Face model folder; name one with --target"
            )
        if self.text is not None and not self.text.is_dir():
            raise ConfigError(f"text is {self.text}, and that is no folder")
        if self.cache is not None and not self.cache.is_dir():
            raise ConfigError(f"cache is {self.cache}, and that is no folder: make it with --make-cache {self.cache}")
        if self.data is not None and not self.data.is_file():
            raise ConfigError(f"data is {self.data}, and that is no file")

    def check_positions(self, longest: int | None) -> None:
        """Refuse sequences that are longer than the target was made for.

        Args:
            longest: positions of the target; None if it names no limit.

        Raises:
            ConfigError: with one sentence that says what to change.
        """
        for names in (("prompt_length", "response_length"), ("eval_prompt_length", "eval_new_tokens")):
            length = sum(getattr(self, name) for name in names)
            if longest is not None and length > longest:
                raise ConfigError(
                    f"{' + '.join(names)} is {length}, but the target has positions for {longest} tokens "
                    "(max_position_embeddings): lower one of them"
                )

    def devices(self, *, planned: bool = False) -> list[torch.device]:
        """Return the device of each thread, targets first; these logical devices wrap around onto those that are named.

        Args:
            planned: see `validate`.

        Raises:
            ConfigError: if a device does not exist.
        """
        gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        named = {"auto": gpus or ["cpu"], "cuda": gpus or ["cuda"], "cpu": ["cpu"]}.get(
            self.device, self.device.split(",")
        )
        for name in named:
            if planned and re.fullmatch(r"cuda(:\d+)?", name):
                continue
            if name != "cpu" and name not in gpus:
                there_are = ", ".join(["cpu", *gpus])
                raise ConfigError(f"device is {self.device!r}, but {name!r} does not exist here: there are {there_are}")
        return [torch.device(named[index % len(named)]) for index in range(self.targets + self.drafters)]

    def as_json(self) -> dict[str, Any]:
        """Return all options in JSON's types."""
        return {
            name: str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }


TYPES: dict[str, Any] = get_type_hints(Config)
"""The type of each option."""


def choices_of(name: str) -> tuple[str, ...]:
    """Return the words that an option, or each of its elements, may be; none if it is free."""
    named: tuple[str, ...] = Config.__dataclass_fields__[name].metadata["choices"]
    return named or _words(TYPES[name])


def _words(annotation: Any) -> tuple[str, ...]:
    arguments = get_args(annotation)
    if arguments and all(isinstance(argument, str) for argument in arguments):
        return arguments
    return next((words for argument in arguments if (words := _words(argument))), ())
