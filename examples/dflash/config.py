"""All options of a run, checked before any work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from optimizer import OptimizerName

BUNDLED_TARGET = Path(__file__).parent / "assets" / "target"


class ConfigError(ValueError):
    """An option, or a combination of options, that cannot work."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of a run; the defaults are the demo's, made for two CPU cores and a few minutes.

    Attributes:
        seed: everything random follows from it.
        device: ``auto`` for all GPUs there are, or the CPU if there is none; ``cpu``; ``cuda`` for all GPUs; or a map, the names of
            devices separated by commas: threads, targets first, go onto them in turn.
        target: folder of the target, in Hugging Face's layout.
        trust_remote_code: run Python code that comes with the target.
        text: folder of text; None for the standard library's sources.
        targets, drafters: number of target and drafter threads.
        layers: draft layers (paper: 5).
        draft_heads, draft_kv_heads, draft_head_dim, draft_intermediate_size: the drafter's own sizes; None for the target's.
        layer_types: ``full_attention`` or ``sliding_attention`` for each draft layer; empty for full layers only (the paper's).
        sliding_window: tokens that sliding layers look back.
        block_size: ``B``, anchor included (paper: 16).
        taps: target layers whose outputs are the features; None for the paper's choice, which needs a deep target.
        prompt_length, response_length: tokens of a training sequence, text and target's answer.
        temperature: of every second answer; the others are greedy.
        sequences: sequences in one batch of work, generated together.
        uses: training steps made with one batch of work before the next, each with other anchors.
        batch: sequences in one training step of one replica.
        anchors: ``N``, blocks a sequence (paper: 512).
        gamma: decay of the position weights (paper: 7 for blocks of 16, 4 for blocks of 8).
        kl_weight: share of the soft-label divergence in the loss; the rest is cross entropy.
        chunk_rows: rows of a sequence whose logits exist at once.
        steps: training steps.
        optimizer: ``adamw`` as in the paper, or ``muon``, which gets further in a short run.
        lr, muon_lr: peak learning rates of AdamW and of Muon.
        warmup_ratio, clip: share of steps that warm up, and the largest gradient norm (paper, A.1).
        autocast: compute forward passes in bfloat16; weights and optimizer stay in float32.
        save_every: steps between two savings of the drafter.
        queue_depth: batches of work that wait for one replica at most.
        tau: acceptance length, on references that do not loop, that the trained drafter must reach.
        eval_prompts, eval_prompt_length, eval_new_tokens: held-out prompts for speculative decoding.
    """

    seed: int = 0
    device: str = "auto"
    target: Path = BUNDLED_TARGET
    trust_remote_code: bool = False
    text: Path | None = None
    targets: int = 5
    drafters: int = 3

    layers: int = 2
    draft_heads: int | None = None
    draft_kv_heads: int | None = None
    draft_head_dim: int | None = None
    draft_intermediate_size: int | None = None
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    block_size: int = 8
    taps: tuple[int, ...] | None = (0, 1, 2)

    prompt_length: int = 128
    response_length: int = 128
    temperature: float = 0.6
    sequences: int = 16
    uses: int = 20
    batch: int = 4
    anchors: int = 16

    gamma: float = 4.0
    kl_weight: float = 0.5
    chunk_rows: int = 64

    steps: int = 180
    optimizer: OptimizerName = "muon"
    lr: float = 3e-3
    muon_lr: float = 4e-2
    warmup_ratio: float = 0.04
    clip: float = 1.0
    autocast: bool = False

    save_every: int = 45
    queue_depth: int = 2

    tau: float = 2.5
    eval_prompts: int = 16
    eval_prompt_length: int = 128
    eval_new_tokens: int = 96

    @property
    def length(self) -> int:
        """Tokens of a training sequence, ``S``."""
        return self.prompt_length + self.response_length

    def validate(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigError: with one sentence that says what to change.
        """
        at_least_one = (
            "targets drafters layers response_length prompt_length sequences uses batch anchors chunk_rows steps "
            "queue_depth save_every eval_prompts eval_prompt_length eval_new_tokens"
        )
        for name in at_least_one.split():
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.block_size < 2:
            raise ConfigError(f"block_size is {self.block_size}: an anchor and at least one draft slot make 2")
        if self.response_length < 2:
            raise ConfigError("response_length must be at least 2: an anchor and the token after it")
        if self.batch > self.sequences:
            raise ConfigError(f"batch is {self.batch}, but one batch of work holds only {self.sequences} sequences")
        if self.anchors * self.block_size % self.chunk_rows:
            raise ConfigError(
                f"chunk_rows ({self.chunk_rows}) must divide anchors * block_size ({self.anchors * self.block_size}), "
                "or the last chunk has a shape of its own and is compiled again"
            )
        if not 0 <= self.kl_weight <= 1:
            raise ConfigError(f"kl_weight is {self.kl_weight}, it must lie between 0 and 1")
        for name in ("gamma", "lr", "muon_lr", "clip", "temperature"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be above 0")
        if not 0 <= self.warmup_ratio < 1:
            raise ConfigError(f"warmup_ratio is {self.warmup_ratio}, it must lie between 0 and 1")
        if self.optimizer not in ("adamw", "muon"):
            raise ConfigError(f"optimizer is {self.optimizer!r}: use 'adamw' or 'muon'")
        if self.taps is not None and len(set(self.taps)) < len(self.taps):
            raise ConfigError(f"taps are {self.taps}, each layer can be tapped once")
        self.devices()
        if not (self.target / "config.json").is_file():
            raise ConfigError(f"target is {self.target}: no config.json there, it must be a Hugging Face model folder")
        if self.text is not None and not self.text.is_dir():
            raise ConfigError(f"text is {self.text}, and that is no folder")

    def devices(self) -> list[torch.device]:
        """Return the device of each thread, targets first; these logical devices wrap around onto those that exist.

        Raises:
            ConfigError: if a device does not exist.
        """
        gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        named = {"auto": gpus or ["cpu"], "cuda": gpus or ["cuda"], "cpu": ["cpu"]}.get(
            self.device, self.device.split(",")
        )
        for name in named:
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


def paper() -> Config:
    """Return the paper's recipe (section 5 and A.1) on the demo's target: 5 layers, blocks of 16, AdamW, cross entropy alone."""
    return Config(
        layers=5, block_size=16, temperature=1.0, optimizer="adamw", lr=6e-4, gamma=7.0, kl_weight=0.0, tau=1.0
    )


PRESETS: dict[str, Callable[[], Config]] = {"demo": Config, "paper": paper}
"""Complete sets of options by name; ``demo`` learns fastest, ``paper`` shows the published recipe."""
