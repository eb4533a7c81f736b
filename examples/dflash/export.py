"""The drafter on disk, in the layout of published DFlash checkpoints: ``config.json`` and ``model.safetensors``.

    python examples/dflash/export.py --run runs/dflash-demo --to my-drafter --dtype bfloat16 --check

writes the drafter of a run for vLLM or SGLang, and checks what was written. Exits with 0, or with 2 if something is wrong with
the options or with the export.

Names of weights are those of `Drafter`'s parameters, without a prefix; embedding and head stay with the target. What the servers
make of the folder is in `serving`.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

import data
import serving
from attention import SLIDING
from config import Config, ConfigError
from drafter import Drafter
from run_folder import DRAFTER, OPTIONS, write_json, write_tensors
from speculative import DFlashProposer
from target import Target, language_of, read_config

CONFIG, WEIGHTS = serving.CONFIG, serving.WEIGHTS

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

CHECK_PROMPTS = 4
CHECK_CYCLES = 3


@dataclass(frozen=True)
class Exported:
    """A drafter read from disk, in float32, and what drafting with it takes.

    Attributes:
        drafter: the model.
        block_size: ``B``.
        taps: tapped layers of its target.
        mask_id: the target's mask token.
        step: training steps behind the weights.
    """

    drafter: Drafter
    block_size: int
    taps: tuple[int, ...]
    mask_id: int
    step: int


def checkpoint_config(
    drafter: Drafter, target: Target, block_size: int, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Return the ``config.json`` of a published checkpoint, for this drafter.

    ``block_size`` and the base of the rotary embedding stand in two places: older readers look at the top, newer ones inside.
    """
    shape = drafter.shape
    eos = target.language.eos_ids
    sliding = SLIDING in shape.layer_types
    config = {
        "architectures": [serving.ARCHITECTURE],
        "model_type": "qwen3",
        "block_size": block_size,
        "num_target_layers": target.shape.layers,
        "dflash_config": {
            "block_size": block_size,
            "mask_token_id": target.language.mask_id,
            "target_layer_ids": list(target.taps),
        },
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "vocab_size": target.language.vocab_size,
        "layer_types": list(shape.layer_types),
        "sliding_window": shape.sliding_window,
        "use_sliding_window": sliding,
        "max_window_layers": shape.layers,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": target.shape.initializer_range,
        "dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": getattr(target.model.config, "bos_token_id", None),
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
    }
    # SGLang makes a whole number of it, which null is not.
    if isinstance(longest := getattr(target.model.config, "max_position_embeddings", None), int):
        config["max_position_embeddings"] = longest
    # The flag holds for all layers, so that it cannot be there with full layers beside sliding ones; without it, vLLM and SGLang
    # take sliding layers as causal and full ones as not.
    if set(shape.layer_types) == {SLIDING}:
        config["is_causal"] = True
    return config


def save(
    folder: Path, drafter: Drafter, target: Target, block_size: int, step: int, dtype: torch.dtype = torch.float32
) -> None:
    """Write the drafter; an earlier one in ``folder`` stays whole until the new one takes its place.

    The configuration does not change within a run, so that the rename of the weights is the moment of change.
    """
    folder.mkdir(exist_ok=True)
    write_json(folder / CONFIG, checkpoint_config(drafter, target, block_size, dtype))
    _write_weights(folder, drafter.state_dict(), step, dtype)


def load(folder: Path, device: torch.device) -> Exported:
    """Read a drafter, of this example or a published one, by the rules of `serving` alone.

    Raises:
        ConfigError: if something is wrong with it, such as weights that are not those that the configuration asks for.
    """
    served = serving.read(folder)
    drafter = Drafter(served.shape)
    drafter.load_state_dict(serving.read_weights(folder, served))
    return Exported(drafter.to(device), served.block_size, served.taps, served.mask_id, step_of(folder))


def step_of(folder: Path) -> int:
    """Return the training steps behind the weights in ``folder``."""
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        return int((file.metadata() or {}).get("step", 0))


def convert(source: Path, to: Path, dtype: torch.dtype) -> None:
    """Write the drafter in ``source`` to ``to`` with its weights in another precision.

    Raises:
        ConfigError: if something is wrong with the source, or there is something in the folder to write to.
    """
    weights = serving.read_weights(source, serving.read(source))
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"folder to export to is {to}, and there is something in it: name another one with --to")
    to.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / CONFIG).read_text())
    write_json(to / CONFIG, config | {"dtype": str(dtype).removeprefix("torch.")})
    _write_weights(to, weights, step_of(source), dtype)


def check(folder: Path, target: Target, drafter: Drafter, block_size: int) -> float:
    """Check an export: the servers' rules hold for it, it fits its target, and what it says drafts the tokens that ``drafter`` does.

    The drafts compared are those of `CHECK_CYCLES` cycles with kept context on each of `CHECK_PROMPTS` sequences, with the
    weights in memory rounded as they were for the file: they must be equal.

    Args:
        folder: the export.
        target: the target, with the drafter's taps.
        drafter: the model in memory, on the target's device.
        block_size: ``B``.

    Returns:
        The share of the drafts that the model in memory makes without rounding, too.

    Raises:
        ConfigError: if anything is wrong.
    """
    served = serving.read(folder)
    serving.check_exported(folder)
    serving.check_target(
        folder,
        served,
        hidden_size=target.shape.hidden_size,
        layers=target.shape.layers,
        vocab_size=target.language.vocab_size,
    )
    for name, of_export, in_memory in (
        ("block_size", served.block_size, block_size),
        ("target_layer_ids", served.taps, target.taps),
        ("mask_token_id", served.mask_id, target.language.mask_id),
    ):
        if of_export != in_memory:
            raise ConfigError(
                f"drafter is {folder}: {name} in its {CONFIG} is {of_export}, in memory it is {in_memory}"
            )
    rounded = copy.deepcopy(drafter).to(served.dtype).float()
    exported = load(folder, target.device)
    drafts = [_drafts(model, target, block_size) for model in (exported.drafter, rounded, drafter)]
    if not torch.equal(drafts[0], drafts[1]):
        raise ConfigError(f"drafter is {folder}, and it drafts other tokens than the model that it was written from")
    return float((drafts[0] == drafts[2]).float().mean())


@torch.no_grad()
def _drafts(drafter: Drafter, target: Target, block_size: int) -> Tensor:
    """Return drafts ``[prompts, cycles, B - 1]`` after tokens that the target chose, from text drawn at random."""
    length, grown = 2 * block_size, block_size // 2 + 1
    rng = data.generator("export")
    ids = torch.randint(target.language.vocab_size, (CHECK_PROMPTS, length), generator=rng).to(target.device)
    greedily = torch.zeros(CHECK_PROMPTS, device=target.device)
    tokens = target.respond(ids, greedily, greedily.unsqueeze(1).repeat(1, grown * CHECK_CYCLES))
    drafts = []
    for row in tokens:
        features = target.forward(row.unsqueeze(0)).tapped
        proposer, known = DFlashProposer(drafter, target, block_size), 0
        for anchor in range(length, length + grown * CHECK_CYCLES, grown):
            drafts.append(proposer.propose(row[: anchor + 1].tolist(), features[:, known:anchor]))
            known = anchor
    return torch.stack(drafts).unflatten(0, (CHECK_PROMPTS, CHECK_CYCLES))


def _write_weights(folder: Path, weights: dict[str, Tensor], step: int, dtype: torch.dtype) -> None:
    write_tensors(
        folder / WEIGHTS,
        {name: w.detach().to(dtype) for name, w in weights.items()},
        {"format": "pt", "step": str(step)},
    )


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Write a run's drafter for vLLM or SGLang.")
    parser.add_argument("--run", type=Path, required=True, help="run folder, or a drafter's own folder")
    parser.add_argument(
        "--to", type=Path, required=True, help="folder to write to, which must be empty or not there yet"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="precision of the weights (%(default)s)")
    parser.add_argument(
        "--check", action="store_true", help="compare its drafts with the run's, which loads the target"
    )
    parser.add_argument("--target", type=Path, help="Hugging Face folder of the target (the run's), for --check")
    parser.add_argument(
        "--device", default="cpu", help="where --check computes: auto, cpu, or a GPU such as cuda:0 (%(default)s)"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the target")
    return parser.parse_args(arguments)


def _target_folder(run: Path) -> Path:
    """Return the target that a run's options name.

    Raises:
        ConfigError: if none is named there.
    """
    try:
        return Path(json.loads((run / OPTIONS).read_text())["target"])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"run folder {run} names no target: name it with --target") from error


def _target(folder: Path, served: serving.Served, device: torch.device, *, trust_remote_code: bool) -> Target:
    """Load a drafter's target in its own precision: with the drafter's mask token, which need not be the tokenizer's."""
    config = read_config(folder, trust_remote_code=trust_remote_code)
    language = language_of(folder, config, mask_id=served.mask_id, trust_remote_code=trust_remote_code)
    dtype = getattr(config, "dtype", None)
    return Target(
        folder,
        served.taps,
        device,
        trust_remote_code=trust_remote_code,
        language=language,
        dtype=dtype if isinstance(dtype, torch.dtype) else torch.float32,
    )


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    options = _options(arguments)
    source = options.run / DRAFTER if (options.run / DRAFTER).is_dir() else options.run
    try:
        # Before anything is written.
        device = Config(device=options.device).devices()[0]
        target_folder = (options.target or _target_folder(options.run)) if options.check else None
        convert(source, options.to, DTYPES[options.dtype])
        served = serving.read(options.to)
        serving.read_weights(options.to, served)
        weights = sum(torch.Size(shape).numel() for shape in serving.weight_shapes(served).values())
        print(f"{options.to}: {weights / 1e6:.2f} million weights in {options.dtype}, blocks of {served.block_size}")
        if target_folder is not None:
            target = _target(target_folder, served, device, trust_remote_code=options.trust_remote_code)
            same = check(options.to, target, load(source, device).drafter, served.block_size)
            print(f"checked; {same:.1%} of its drafts are those of the run's own weights, without rounding")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
