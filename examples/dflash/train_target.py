"""Train a byte-level target: the bundled one in a few minutes on one CPU core, or a larger one on a GPU.

    python examples/dflash/train_target.py
    python examples/dflash/train_target.py --preset gpu --to h200-bytes

A language model of the Qwen3 architecture learns the standard library's sources. The result is an ordinary Hugging Face folder,
``config.json`` and ``model.safetensors``, with ``training.json`` beside them, which says what it came from. The first line makes
the model of 0.82 million parameters in ``assets/target``: only rerun it to change that one. The second makes one of 50 million
in two minutes after its compiles. Exits with 0, with 1 if training diverged, or with 2 for options that cannot work.
"""

# ruff: noqa: RUF009  # what `_option` returns is a dataclass field

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

import data
import optimizer
from backend import BACKEND
from config import BUNDLED_TARGET, Config, ConfigError
from safecompile import thread_safe_compile

transformers_logging.disable_progress_bar()  # saving takes a blink

MOST_POSITIONS = 4096
EVALUATION_BATCHES = 16
REPORT_EVERY = 100
PLACES = 10_000
"""Places on the learning rate's schedule where time, and not a number of steps, ends the training."""

Precision = Literal["float32", "bfloat16"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _option(
    default: Any, meaning: str, kind: type = int, *, at_least: float | None = None, above: float | None = None
) -> Any:
    return field(default=default, metadata={"help": meaning, "kind": kind, "at_least": at_least, "above": above})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is trained and how. The defaults are the bundled target's; each field is an option of the command line."""

    layers: int = _option(4, "decoder layers", at_least=1)
    width: int = _option(128, "width of the hidden states", at_least=1)
    intermediate: int = _option(384, "width of the feed-forward parts", at_least=1)
    heads: int = _option(4, "attention heads", at_least=1)
    kv_heads: int = _option(2, "key/value heads", at_least=1)
    head_dim: int = _option(32, "width of a head", at_least=1)
    sequence: int = _option(256, "bytes that a loss is taken on in a row", at_least=1)
    batch: int = _option(8, "sequences of a step", at_least=1)
    steps: int | None = _option(900, "training steps", at_least=1)
    minutes: float | None = _option(
        None, "time to train in place of a number of steps, after the first step", float, above=0
    )
    lr: float = _option(3e-3, "peak learning rate of AdamW, for embedding and norms", float, above=0)
    muon_lr: float = _option(2e-2, "peak learning rate of Muon, for all other matrices", float, above=0)
    weight_decay: float = _option(0.0, "of both, times the learning rate", float, at_least=0)
    evaluations: int = _option(
        0, "held-out losses on the way, the weights of the least are kept; 0: the last weights", at_least=0
    )
    device: str = _option("cpu", "cpu, or a GPU such as cuda:0", str)
    dtype: Precision = _option("float32", "what passes compute in; the weights that are stepped are float32", str)
    saved_dtype: Precision = _option("float32", "of the weights that are written", str)
    compiled: bool | None = _option(None, "compile the loss (on a GPU)", bool)

    def check(self) -> torch.device:
        """Refuse what cannot work; return the device.

        Raises:
            ConfigError: with one sentence that says what to change.
        """
        for option in fields(self):
            value, at_least, above = getattr(self, option.name), option.metadata["at_least"], option.metadata["above"]
            if None not in (value, at_least) and not at_least <= value < math.inf:
                raise ConfigError(f"{option.name} is {value}, it must be at least {at_least}")
            if None not in (value, above) and not above < value < math.inf:
                raise ConfigError(f"{option.name} is {value}, it must be above {above}")
            if option.name.endswith("dtype") and value not in DTYPES:
                raise ConfigError(f"{option.name} is {value!r}: use {' or '.join(map(repr, DTYPES))}")
        if (self.steps is None) == (self.minutes is None):
            raise ConfigError("name steps or minutes, one of them")
        if self.heads % self.kv_heads:
            raise ConfigError(f"heads is {self.heads}, it must be a multiple of kv_heads, {self.kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}, the rotary embedding needs an even number")
        if self.sequence > MOST_POSITIONS:
            raise ConfigError(f"sequence is {self.sequence}, the model has positions for {MOST_POSITIONS}")
        return Config(device=self.device).devices()[0]

    def done(self, steps: int, seconds: float) -> float:
        """Return what share of the training these steps are, which took so many seconds; 1 or more is all."""
        if self.steps is not None:
            return steps / self.steps
        assert self.minutes is not None
        return seconds / (60 * self.minutes)


PRESETS = {
    "bundled": Recipe(),
    "gpu": Recipe(
        layers=16,
        width=512,
        intermediate=1536,
        heads=8,
        kv_heads=4,
        head_dim=64,
        sequence=1024,
        batch=32,
        steps=None,
        minutes=2.0,
        weight_decay=0.1,  # the text is read about ten times
        evaluations=8,
        device="cuda:0",
        dtype="bfloat16",
        saved_dtype="bfloat16",
    ),
}


def architecture(recipe: Recipe) -> Qwen3Config:
    """Return the target's shape: byte vocabulary, tied embeddings."""
    return Qwen3Config(
        vocab_size=data.VOCAB_SIZE,
        hidden_size=recipe.width,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=MOST_POSITIONS,
        tie_word_embeddings=True,
        # Qwen3's 0.02 suits wide models; at width 128 it makes the first hundreds of steps nearly useless.
        initializer_range=0.06 * (128 / recipe.width) ** 0.5,
        bos_token_id=None,
        eos_token_id=data.EOS_ID,
        pad_token_id=None,
    )


def loss_of(model: Qwen3ForCausalLM, tokens: Tensor) -> Tensor:
    """Return the mean next-byte cross entropy, in nats, of int64 ``[batch, sequence + 1]``: all but the first column are labels."""
    # While it is traced, transformers writes the causal mask out, and flash attention takes none: no mask means causal, too.
    no_masks: Any = {"full_attention": None}
    logits = model(input_ids=tokens[:, :-1], attention_mask=no_masks, use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: Qwen3ForCausalLM, text: Tensor, recipe: Recipe) -> float:
    """Return the loss on the same held-out windows every time, in nats per byte."""
    rng = data.generator("target", "held out")
    losses = []
    for _ in range(EVALUATION_BATCHES):
        # Not compiled: a graph without a backward would take longer to compile than it saves.
        with _precision(recipe, text.device):
            losses.append(float(loss_of(model, data.windows(text, recipe.sequence + 1, recipe.batch, rng))))
    return sum(losses) / EVALUATION_BATCHES


def _precision(recipe: Recipe, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=recipe.dtype == "bfloat16")


@dataclass(frozen=True)
class Trained:
    """A model in the precision it is saved in, and what it came from, in JSON's types."""

    model: Qwen3ForCausalLM
    training: dict[str, Any]


def train(
    recipe: Recipe, device: torch.device, corpus: data.Corpus, say: Callable[[str], None] = lambda line: None
) -> Trained:
    """Train a model of the byte vocabulary.

    Windows and weights at the start follow from the recipe alone. With ``steps``, the learning rates do too; with ``minutes`` they
    follow the clock.

    Args:
        recipe: checked.
        device: where.
        corpus: what to train on and what to evaluate on.
        say: takes a line from time to time.

    Raises:
        ConfigError: if there is too little text.
        FloatingPointError: if training has diverged.
    """
    # On the device, where windows are cut without sending more than their places.
    text, held_out = (data.encode(part).to(device) for part in (corpus.train, corpus.held_out))
    if min(len(text), len(held_out)) <= recipe.sequence:
        raise ConfigError(
            f"sequence is {recipe.sequence}, but the texts to train and to evaluate on have {len(text)} and {len(held_out)} bytes"
        )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(architecture(recipe)).to(device)
    places = PLACES if recipe.steps is None else recipe.steps
    steps = optimizer.build(
        model,
        "muon",
        lr=recipe.lr,
        muon_lr=recipe.muon_lr,
        steps=places,
        warmup_ratio=0.04,
        clip=1.0,
        weight_decay=recipe.weight_decay,
    )
    compiled = device.type == "cuda" if recipe.compiled is None else recipe.compiled
    training_loss = thread_safe_compile(loss_of, backend=BACKEND, dynamic=False) if compiled else loss_of
    rng = data.generator("target", "train")
    best: tuple[float, int, dict[str, Tensor]] | None = None
    began = started = time.monotonic()
    cpu_began = time.process_time()
    step, evaluated, done = 0, 0, 0.0
    while done < 1:
        if recipe.steps is None:
            steps.move_to(int(done * places))
        with _precision(recipe, device):
            loss = training_loss(model, data.windows(text, recipe.sequence + 1, recipe.batch, rng))
        loss.backward()
        steps.step()
        if step % REPORT_EVERY == 0 or step + 1 == recipe.steps:
            value = loss.item()  # waits for the device
            if step == 0:
                started = time.monotonic()  # the first step compiles
            seconds = time.monotonic() - began
            say(f"step {step:5d}  loss {value:.3f}  {seconds:.0f} s, {time.process_time() - cpu_began:.0f} CPU-seconds")
            _check_loss(value, step)
        step += 1
        done = recipe.done(step, time.monotonic() - started)
        if int(min(done, 1.0) * recipe.evaluations) > evaluated:
            evaluated = int(min(done, 1.0) * recipe.evaluations)
            found = held_out_loss(model, held_out, recipe)
            say(f"step {step:5d}  held-out loss {found:.3f}")
            if best is None or found < best[0]:
                best = found, step, {name: weight.clone() for name, weight in model.state_dict().items()}
    if best is not None:
        model.load_state_dict(best[2])
    model.to(DTYPES[recipe.saved_dtype])
    final = held_out_loss(model, held_out, recipe)
    _check_loss(final, step)
    training = {
        "steps": step,
        "weights_of_step": step if best is None else best[1],
        "held_out_loss_nats_per_byte": round(final, 3),
        "seconds": round(time.monotonic() - began),
        "cpu_seconds": round(time.process_time() - cpu_began),
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes_seen": step * recipe.batch * recipe.sequence,
        "bytes_of_text": len(text),
        "torch": torch.__version__,
        "text": "Python standard library",
        "recipe": asdict(recipe),
    }
    return Trained(model, training)


def _check_loss(loss: float, step: int) -> None:
    if not math.isfinite(loss):
        raise FloatingPointError(f"training diverged before step {step}: the loss is {loss:g}; lower muon_lr or lr")


def save(trained: Trained, folder: Path) -> None:
    """Write the model and ``training.json``."""
    trained.model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "training.json").write_text(json.dumps(trained.training, indent=2) + "\n")


def command_line(arguments: list[str]) -> tuple[Recipe, Path]:
    """Return what to train, and the folder for it.

    Raises:
        ConfigError: if the options cannot work.
    """
    parser = argparse.ArgumentParser(description="Train a byte-level target of the Qwen3 architecture.")
    parser.add_argument(
        "--preset", choices=PRESETS, default="bundled", help="what the other options change (%(default)s)"
    )
    parser.add_argument(
        "--to", type=Path, metavar="FOLDER", help="where the model goes (assets/target, for that one only)"
    )
    for option in fields(Recipe):
        flag, meaning, kind = f"--{option.name.replace('_', '-')}", option.metadata["help"], option.metadata["kind"]
        if kind is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=meaning)
        else:
            parser.add_argument(flag, type=kind, default=argparse.SUPPRESS, metavar=kind.__name__.upper(), help=meaning)
    given = vars(parser.parse_args(arguments))
    preset, to = PRESETS[given.pop("preset")], given.pop("to")
    # Either ends the training: the preset's own does not count beside the other.
    ends = {"steps", "minutes"} & given.keys()
    recipe = replace(preset, **({"steps": None, "minutes": None} if ends else {}) | given)
    if to is None and recipe != PRESETS["bundled"]:
        raise ConfigError("another recipe than the bundled target's needs a folder of its own: name it with --to")
    return recipe, to or BUNDLED_TARGET


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    try:
        recipe, to = command_line(arguments)
        device = recipe.check()
        torch.set_num_threads(1)
        if device.type == "cuda" and recipe.dtype == "bfloat16":
            torch.set_float32_matmul_precision("high")  # Muon's products alone are in float32, and need no more
        trained = train(recipe, device, data.load_corpus(), lambda line: print(line, flush=True))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except FloatingPointError as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 1
    save(trained, to)
    found = trained.training
    epochs = found["bytes_seen"] / found["bytes_of_text"]
    print(
        f"{found['parameters'] / 1e6:.2f} million parameters, {found['bytes_seen'] / 1e6:.0f} million bytes seen, the text "
        f"{epochs:.1f} times; held-out loss {found['held_out_loss_nats_per_byte']:.3f} nats per byte, with the weights of step "
        f"{found['weights_of_step']} of {found['steps']}, after {found['seconds']} s; written to {to}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
