"""Train the byte-level target that ships in ``assets/target`` (a few minutes on one CPU core).

    python examples/dflash/train_target.py

A language model of the Qwen3 architecture with 0.82 million parameters learns the standard library's sources. The result is
an ordinary Hugging Face folder: ``config.json`` and ``model.safetensors``. Only rerun this to change the target.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

import data
import optimizer

ASSETS = Path(__file__).parent / "assets" / "target"
SEQUENCE = 256
BATCH = 8
EVALUATION_BATCHES = 16


def architecture() -> Qwen3Config:
    """Return the target's shape: 4 layers of width 128, byte vocabulary, tied embeddings."""
    return Qwen3Config(
        vocab_size=data.VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        # 0.02 suits wide models; at width 128 it makes the first hundreds of steps nearly useless.
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=data.EOS_ID,
        pad_token_id=None,
    )


def batch(text: Tensor, rng: torch.Generator) -> Tensor:
    """Draw ``BATCH`` windows, int64 ``[BATCH, SEQUENCE + 1]``: inputs are all but the last column, labels all but the first."""
    return torch.stack([data.window(text, SEQUENCE + 1, rng) for _ in range(BATCH)])


def loss_of(model: Qwen3ForCausalLM, tokens: Tensor) -> Tensor:
    """Return the mean next-byte cross entropy, in nats."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: Qwen3ForCausalLM, text: Tensor) -> float:
    """Return the loss on the same held-out windows every time."""
    rng = data.generator("target", "held out")
    return sum(float(loss_of(model, batch(text, rng))) for _ in range(EVALUATION_BATCHES)) / EVALUATION_BATCHES


def main() -> None:
    """Train, report the loss on the way, and write the assets."""
    parser = argparse.ArgumentParser(description="Train the byte-level target of the example.")
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--output", type=Path, default=ASSETS)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be at least 1")

    torch.set_num_threads(1)
    torch.manual_seed(0)
    corpus = data.load_corpus()
    text, held_out = data.encode(corpus.train), data.encode(corpus.held_out)
    model = Qwen3ForCausalLM(architecture())
    steps = optimizer.build(model, "muon", lr=3e-3, muon_lr=2e-2, steps=options.steps, warmup_ratio=0.04, clip=1.0)
    rng = data.generator("target", "train")
    started = time.process_time()
    for step in range(options.steps):
        loss = loss_of(model, batch(text, rng))
        loss.backward()
        steps.step()
        if step % 100 == 0 or step == options.steps - 1:
            print(
                f"step {step:4d}  loss {loss.detach().item():.3f}  {time.process_time() - started:.0f} CPU-seconds",
                flush=True,
            )

    final = held_out_loss(model, held_out)
    cpu_seconds = round(time.process_time() - started)
    print(f"held-out loss {final:.3f} nats per byte after {cpu_seconds} CPU-seconds")
    model.save_pretrained(options.output)
    (options.output / "generation_config.json").unlink(missing_ok=True)
    training = {
        "steps": options.steps,
        "held_out_loss_nats_per_byte": round(final, 3),
        "cpu_seconds": cpu_seconds,
        "torch": torch.__version__,
        "text": "Python standard library",
    }
    (options.output / "training.json").write_text(json.dumps(training, indent=2) + "\n")


if __name__ == "__main__":
    main()
