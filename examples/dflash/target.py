"""The frozen target: loading, features of its layers, generation."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging as transformers_logging

from backend import BACKEND
from config import ConfigError
from safecompile import thread_safe_compile

# Loading takes a blink; its progress bar would stand between the lines of every program and test.
transformers_logging.disable_progress_bar()


class Features(NamedTuple):
    """What the target computes on the way to its logits.

    Attributes:
        tapped: ``[batch, tokens, taps * D]``, outputs of the tapped layers side by side.
        normed: ``[batch, tokens, D]``, output of the last norm; the head turns it into logits.
    """

    tapped: Tensor
    normed: Tensor


class Vocabulary(NamedTuple):
    """The target's frozen embedding and output head, each ``[V, D]``, which the drafter shares (paper, section 4.2)."""

    embedding: Tensor
    head: Tensor


@dataclass(frozen=True)
class TargetShape:
    """The sizes of a target that a drafter needs."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    initializer_range: float


def tapped_layers(target_layers: int, taps: int) -> tuple[int, ...]:
    """Return the ids of the tapped layers, evenly from the second to the third-to-last (paper, section 5).

    ``round(1 + i * (target_layers - 4) / (taps - 1))`` for ``i`` from 0; one tap is the middle layer. Id ``k`` is the output
    of decoder layer ``k``, counted from 0.

    Raises:
        ConfigError: if the target is too shallow for that many different layers.
    """
    if taps == 1:
        return (target_layers // 2,)
    ids = tuple(round(1 + i * (target_layers - 4) / (taps - 1)) for i in range(taps))
    if len(set(ids)) < taps or ids[0] < 0 or target_layers < 4:
        raise ConfigError(f"a target of {target_layers} layers has no {taps} layers to tap: name them with taps")
    return ids


class Target:
    """A frozen causal language model of the Hugging Face kind, in evaluation mode, used by one thread at a time."""

    def __init__(self, folder: Path, taps: tuple[int, ...], device: torch.device) -> None:
        """Load the model from ``folder``, which must hold safetensors; nothing is downloaded and no code of it is run.

        Raises:
            ConfigError: if a tap is not a layer of the model.
        """
        self.device = device
        self.taps = taps
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, trust_remote_code=False, dtype=torch.float32
        )
        self.model.to(device).eval().requires_grad_(False)
        self._decoder: nn.Module = self.model.get_decoder()
        layers = self._decoder.layers
        if not taps or min(taps) < 0 or max(taps) >= len(layers):
            raise ConfigError(f"taps {taps} must be layers of the target, 0 to {len(layers) - 1}")
        # The name that transformers gives the cache changed within version 5, and an unknown name is ignored in silence.
        names = inspect.signature(self._decoder.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        # A hook on a few layers keeps only these outputs; asking the model for its hidden states keeps those of all layers.
        self._outputs: dict[int, Tensor] = {}
        for tap in taps:
            layers[tap].register_forward_hook(self._keeper(tap))

    @property
    def shape(self) -> TargetShape:
        """The model's sizes."""
        config = self.model.config
        return TargetShape(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rope_theta=config.rope_parameters["rope_theta"],
            rms_norm_eps=config.rms_norm_eps,
            initializer_range=config.initializer_range,
        )

    def vocabulary(self, device: torch.device) -> Vocabulary:
        """Return the embedding and the head on ``device``."""
        embedding = self.model.get_input_embeddings().weight
        head = self.model.get_output_embeddings().weight
        return Vocabulary(embedding.detach().to(device), head.detach().to(device))

    # no_grad and not inference_mode: another thread saves these tensors for its backward, which inference tensors refuse.
    @torch.no_grad()
    def forward(self, tokens: Tensor, cache: DynamicCache | None = None) -> Features:
        """Run the model on ``[batch, tokens]``, after what is in ``cache`` (which grows)."""
        caching = {self._cache_name: cache, "use_cache": cache is not None}
        normed = self._decoder(input_ids=tokens, **caching).last_hidden_state
        tapped = torch.cat([self._outputs.pop(tap) for tap in self.taps], dim=-1)
        return Features(tapped, normed)

    @torch.no_grad()
    def logits(self, normed: Tensor) -> Tensor:
        """Return logits ``[..., V]`` of normed hidden states ``[..., D]``, the drafter's too."""
        logits: Tensor = self.model.get_output_embeddings()(normed)
        return logits

    def new_cache(self) -> DynamicCache:
        """Return an empty key/value cache."""
        return DynamicCache(config=self.model.config)

    @torch.no_grad()
    def respond(self, prompts: Tensor, temperatures: Tensor, noise: Tensor) -> Tensor:
        """Continue each prompt with the target's own choice of tokens.

        Args:
            prompts: int64 ``[batch, P]``.
            temperatures: float32 ``[batch]``; 0 is greedy.
            noise: float32 ``[batch, R]``, uniform in [0, 1): the only randomness there is.

        Returns:
            Prompts and responses, int64 ``[batch, P + R]``.
        """
        cache = self.new_cache()
        pieces, step = [prompts], prompts
        for column in noise.unbind(1):
            logits = self.logits(self.forward(step, cache).normed[:, -1])
            step = choose(logits, temperatures, column).unsqueeze(1)
            pieces.append(step)
        return torch.cat(pieces, dim=1)

    def _keeper(self, tap: int) -> Callable[[nn.Module, object, Tensor | tuple[Tensor, ...]], None]:
        def keep(module: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
            self._outputs[tap] = output if isinstance(output, Tensor) else output[0]

        return keep


@thread_safe_compile(backend=BACKEND, dynamic=False)
def choose(logits: Tensor, temperatures: Tensor, noise: Tensor) -> Tensor:
    """Choose one token a row, int64 ``[batch]``: the likeliest at temperature 0, otherwise by inverting the distribution.

    Args:
        logits: ``[batch, V]``.
        temperatures: float32 ``[batch]``.
        noise: float32 ``[batch]``, uniform in [0, 1).
    """
    scaled = logits.float() / temperatures.clamp(min=1e-6).unsqueeze(1)
    upper = scaled.softmax(-1).cumsum(-1)
    sampled = (upper <= noise.unsqueeze(1) * upper[:, -1:]).sum(-1)
    return torch.where(temperatures > 0, sampled, logits.argmax(-1)).clamp(max=logits.shape[-1] - 1)
