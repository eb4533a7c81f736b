"""The frozen target: loading, features of its layers, generation."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Cache,
    DynamicCache,
    GenerationConfig,
    PretrainedConfig,
)
from transformers.cache_utils import DynamicLayer
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils import logging as transformers_logging

import data
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


@dataclass(frozen=True)
class Language:
    """What a target's token ids mean.

    Attributes:
        encode: turns text into ids, int32 ``[n]``.
        eos_ids: ids that end a text, in ascending order; there may be none.
        mask_id: the id whose embedding fills draft slots: one the text never has (paper, section 4.2).
        vocab_size: rows of the embedding.
        tokenizer: the tokenizer of transformers, if there is one.
    """

    encode: Callable[[bytes], Tensor]
    eos_ids: tuple[int, ...]
    mask_id: int
    vocab_size: int
    tokenizer: Any = None

    def decode(self, tokens: Tensor) -> str:
        """Return the text of ids ``[n]``, without those that have none, such as the end of text."""
        if self.tokenizer is None:
            return data.decode(tokens).decode(errors="replace")
        return str(self.tokenizer.decode(tokens.tolist(), skip_special_tokens=True))


def read_config(folder: Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Read the model's configuration alone, which is quick; of a model for more than text, the part for text.

    Raises:
        ConfigError: if there is none that transformers can read.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
        return config.get_text_config(decoder=True)
    except Exception as error:  # whatever is wrong with the folder
        raise ConfigError(f"target is {folder}, and its configuration cannot be read: {error}") from error


def shape_of(config: PretrainedConfig) -> TargetShape:
    """Return the sizes, with the usual defaults for what a model's configuration leaves out.

    Raises:
        ConfigError: if there are no layers, heads or widths in it.
    """
    try:
        heads = config.num_attention_heads
        rope = getattr(config, "rope_parameters", None) or {}
        return TargetShape(
            hidden_size=config.hidden_size,
            intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            layers=config.num_hidden_layers,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            rope_theta=rope.get("rope_theta", 10000.0),
            rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
            initializer_range=getattr(config, "initializer_range", 0.02),
        )
    except AttributeError as error:
        raise ConfigError(f"the target is no decoder that the example knows: {error}") from error


def choose_taps(taps: tuple[int, ...] | None, shape: TargetShape) -> tuple[int, ...]:
    """Return ``taps``, or the paper's five if None.

    Raises:
        ConfigError: if the target has no such layers.
    """
    if taps is None:
        return tapped_layers(shape.layers, 5)
    if not taps or min(taps) < 0 or max(taps) >= shape.layers:
        raise ConfigError(f"taps {taps} must be layers of the target, 0 to {shape.layers - 1}")
    return taps


def language_of(
    folder: Path, config: PretrainedConfig, *, mask_id: int | None = None, trust_remote_code: bool = False
) -> Language:
    """Return the language of the target in ``folder``: its tokenizer's, or bytes if it has no tokenizer.

    With a tokenizer, the mask token is ``mask_id``, or its own, or the first id past the tokenizer, which embeddings padded to a
    round size have room for (published drafters of Qwen3 do the same). A text ends with any id that the configuration, the settings
    for generation or the tokenizer name: chat models often have the end of a turn in one of them only.

    Raises:
        ConfigError: if the settings for generation cannot be read, there is no room for the mask token, or no tokenizer and too few ids for bytes.
    """
    if mask_id is not None and mask_id >= config.vocab_size:
        raise ConfigError(f"mask_token_id is {mask_id}, but the target's ids end at {config.vocab_size - 1}")
    named = [getattr(config, "eos_token_id", None), _generation_eos(folder)]
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        if config.vocab_size < data.VOCAB_SIZE:
            raise ConfigError(
                f"target is {folder}: without a tokenizer a byte is a token, which takes {data.VOCAB_SIZE} ids, "
                f"but the model has {config.vocab_size}"
            )
        mask_id = data.MASK_ID if mask_id is None else mask_id
        return Language(data.encode, _eos_ids(named), mask_id, config.vocab_size)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)

    def encode(text: bytes) -> Tensor:
        ids = tokenizer(text.decode(errors="replace"), add_special_tokens=False, verbose=False)["input_ids"]
        return torch.tensor(ids, dtype=torch.int32)

    if mask_id is None:
        mask_id = len(tokenizer) if tokenizer.mask_token_id is None else tokenizer.mask_token_id
    if mask_id >= config.vocab_size:
        raise ConfigError(
            f"target is {folder}: all {config.vocab_size} ids are taken, there is none for the mask token"
        )
    named.append(tokenizer.eos_token_id)
    return Language(encode, _eos_ids(named), mask_id, config.vocab_size, tokenizer)


def _generation_eos(folder: Path) -> Any:
    """Return the end of text that the target's settings for generation name, or None."""
    if not (folder / GENERATION_CONFIG_NAME).exists():
        return None
    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    except (OSError, ValueError) as error:
        raise ConfigError(f"target is {folder}, and its {GENERATION_CONFIG_NAME} cannot be read: {error}") from error


def _eos_ids(named: list[Any]) -> tuple[int, ...]:
    """Return all ids of several places, each of which names none, one or a list, in ascending order."""
    found: set[int] = set()
    for ids in named:
        found.update(ids if isinstance(ids, list) else () if ids is None else (ids,))
    return tuple(sorted(found))


def _nothing() -> None:
    pass


_PROBE = 8
"""Tokens that a target is tried with."""


def _differ(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Return whether the distance is more than a share of the size: ``tolerance``, or what rounding makes of it in low precision."""
    tolerance = max(tolerance, 4 * torch.finfo(found.dtype).eps)
    expected = expected.float()
    return bool((found.float() - expected).norm() > tolerance * expected.norm())


class Outputs(threading.local):
    """What the tapped layers gave in the calling thread's pass: several threads may be inside one model.

    Attributes:
        by_tap: outputs of the pass that goes on, by the layer's number; each thread has its own.
    """

    def __init__(self) -> None:
        self.by_tap: dict[int, Tensor] = {}


def check_shareable(config: PretrainedConfig) -> None:
    """Refuse a model that several threads cannot use at once, because a pass writes into it.

    Rotary embeddings of the kinds "dynamic" and "longrope" keep frequencies in the model that follow from the length of what it
    reads (transformers, ``dynamic_rope_update``): one thread would read with those of another.

    Raises:
        ConfigError: if it is such a model.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    # A model with several kinds of layers has an entry for each kind.
    for kind in (part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)):
        if kind is not None and ("dynamic" in kind or kind == "longrope"):
            raise ConfigError(
                f"the target's rotary embedding is {kind!r}, whose frequencies change with what is read, so that only one thread at a "
                "time can use it: set eval_every to 0"
            )


class Target:
    """A frozen causal language model of the Hugging Face kind, in evaluation mode.

    One object is used by one thread at a time, as it counts that thread's passes; `shared` gives another thread an object of its own
    that uses the same weights, at the same time.

    Attributes:
        passes: forward passes made so far.
        croppable: whether the last tokens of its cache can be taken back.
    """

    def __init__(
        self,
        folder: Path,
        taps: tuple[int, ...] | None,
        device: torch.device,
        *,
        trust_remote_code: bool = False,
        language: Language | None = None,
        dtype: torch.dtype = torch.float32,
        compiled: bool = False,
        model: Any = None,
    ) -> None:
        """Load the model from ``folder``, which must hold safetensors; nothing is downloaded.

        Args:
            folder: in Hugging Face's layout.
            taps: see `choose_taps`.
            device: where it runs.
            trust_remote_code: run Python files of that folder, if it has any.
            language: of a target loaded before from the same folder: a tokenizer need not be read again.
            dtype: precision of weights and features.
            compiled: compile the layers for passes without a cache, one graph for each kind of layer and shape of ``tokens``. Passes
                with a cache, whose shapes grow with each, stay as they are.
            model: of the configuration in ``folder``, to be used in place of weights from there.

        Raises:
            ConfigError: if a tap is not a layer of the model, or the model is of an unknown kind, such as one that does more than
                multiply by a matrix to get its logits.
        """
        config = read_config(folder, trust_remote_code=trust_remote_code)
        self.device = device
        self.shape = shape_of(config)
        self.taps = choose_taps(taps, self.shape)
        self.language = language or language_of(folder, config, trust_remote_code=trust_remote_code)
        self.passes = 0
        self.model = model or AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            dtype=dtype,
        )
        self.model.to(device).eval().requires_grad_(False)
        self._decoder: nn.Module = self.model.get_decoder()
        layers = getattr(self._decoder, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise ConfigError(f"target is {folder}: a {type(self.model).__name__} has no list of layers to tap")
        # The name that transformers gives the cache changed within version 5, and an unknown name is ignored in silence.
        names = inspect.signature(self._decoder.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        # A hook on a few layers keeps only these outputs; asking the model for its hidden states keeps those of all layers.
        self._outputs = Outputs()
        for tap in self.taps:
            layers[tap].register_forward_hook(self._keeper(tap))
        # A recurrent state cannot be turned back, and a window has dropped what was before it.
        self.croppable = all(type(layer) is DynamicLayer for layer in self.new_cache().layers)
        self._check_head(folder)
        if not self.croppable:
            self._check_cache(folder)
        if compiled:
            for layer in layers:
                forward = type(layer).forward
                layer.forward = partial(_run_layer, forward, _compiled(forward), layer)

    def shared(self) -> Target:
        """Return a target for another thread: with the same weights, which take no more memory, and passes of its own to count.

        Both may be used at once. Code that comes with a target (``trust_remote_code``) must not write into the model in a pass.

        Raises:
            ConfigError: see `check_shareable`.
        """
        check_shareable(self.model.config.get_text_config(decoder=True))
        view = copy.copy(self)
        view.passes = 0
        return view

    def vocabulary(self, device: torch.device) -> Vocabulary:
        """Return the embedding and the head on ``device``, which the drafter shares (paper, section 4.2)."""
        embedding = self.model.get_input_embeddings().weight
        head = self.model.get_output_embeddings().weight
        copied = embedding.detach().to(device)
        return Vocabulary(copied, copied if head is embedding else head.detach().to(device))

    @torch.no_grad()
    def _check_head(self, folder: Path) -> None:
        """Refuse a model whose logits are not those of its head alone, which are the drafter's, too, and the loss's."""
        head = getattr(self.model.get_output_embeddings(), "weight", None)
        if head is None:
            raise ConfigError(f"target is {folder}: a {type(self.model).__name__} has no matrix as its head")
        tokens = torch.arange(_PROBE, device=self.device).unsqueeze(0)
        own = self.model(input_ids=tokens, use_cache=False).logits
        if _differ(nn.functional.linear(self.forward(tokens).normed, head), own, 1e-5):
            raise ConfigError(
                f"target is {folder}: a {type(self.model).__name__} does more to its logits than its head's matrix does, such as a "
                "bias, a scale or a soft cap, which the drafter's loss does not: take another target"
            )
        self.passes = 0

    @torch.no_grad()
    def _check_cache(self, folder: Path) -> None:
        """Refuse a model that goes on from its cache one token at a time only: in some versions of transformers, recurrent layers do."""
        tokens = torch.arange(_PROBE, device=self.device).unsqueeze(0)
        whole = self.forward(tokens).normed[:, _PROBE // 2 :]
        cache = self.new_cache()
        first, second = tokens.chunk(2, dim=1)
        self.forward(first, cache)
        if _differ(self.forward(second, cache).normed, whole, 1e-3):
            raise ConfigError(
                f"target is {folder}: a {type(self.model).__name__} of transformers {transformers.__version__} does not read a block "
                "after its cache as it reads the whole, so that drafts cannot be checked: take a newer transformers or another target"
            )
        self.passes = 0

    # no_grad and not inference_mode: another thread saves these tensors for its backward, which inference tensors refuse.
    @torch.no_grad()
    def forward(self, tokens: Tensor, cache: DynamicCache | None = None) -> Features:
        """Run the model on ``[batch, tokens]``, after what is in ``cache`` (which grows)."""
        self.passes += 1
        caching = {self._cache_name: cache, "use_cache": cache is not None}
        normed = self._decoder(input_ids=tokens, **caching).last_hidden_state
        tapped = torch.cat([self._outputs.by_tap.pop(tap) for tap in self.taps], dim=-1)
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
    def respond(
        self,
        prompts: Tensor,
        temperatures: Tensor,
        noise: Tensor,
        check: Callable[[], None] = _nothing,
        *,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Continue each prompt with the target's own choice of tokens.

        Prompts of several lengths go from the shortest one on together: a longer one takes its own next token instead of a choice,
        so that no row needs padding before or inside what the target reads.

        Args:
            prompts: int64 ``[batch, P]``, shorter ones filled up on the right with anything.
            temperatures: float32 ``[batch]``; 0 is greedy.
            noise: float32 ``[batch, R]``, uniform in [0, 1): the only randomness there is.
            check: called before each token; may raise to give up.
            lengths: int64 ``[batch]``, of the prompts; all are ``P`` if None.

        Returns:
            Prompts and responses, int64 ``[batch, shortest prompt + R]``.
        """
        cache = self.new_cache()
        longest = prompts.shape[1]
        shortest = longest if lengths is None else int(lengths.min())
        step = prompts[:, :shortest]
        pieces = [step]
        # Columns of a matrix of another width have another stride, for which `choose` would be compiled again.
        for position, column in enumerate(noise.T.contiguous(), shortest):
            check()
            logits = self.logits(self.forward(step, cache).normed[:, -1])
            chosen = choose(logits, temperatures, column)
            if lengths is not None and position < longest:
                chosen = torch.where(position < lengths, prompts[:, position], chosen)
            step = chosen.unsqueeze(1)
            pieces.append(step)
        return torch.cat(pieces, dim=1)

    def _keeper(self, tap: int) -> Callable[[nn.Module, object, Tensor | tuple[Tensor, ...]], None]:
        def keep(module: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
            self._outputs.by_tap[tap] = output if isinstance(output, Tensor) else output[0]

        return keep


def _run_layer(
    eager: Callable[..., Any], compiled: Callable[..., Any], layer: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    cached = any(isinstance(value, Cache) for value in (*args, *kwargs.values()))
    return (eager if cached else compiled)(layer, *args, **kwargs)


@lru_cache
def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return one guarded callable for all layers of a class, of all targets. Python alone took 1 ms for a layer of a small model on a GPU."""
    return thread_safe_compile(forward, backend=BACKEND, dynamic=False)


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
