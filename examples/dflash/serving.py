"""What the servers read of a drafter's folder, vLLM and SGLang: fields of ``config.json``, names and shapes of the weights.

Neither can be asked here. The rules below were read in their sources: vLLM's ``model_executor/models/qwen3_dflash.py`` and
``v1/worker/gpu/spec_decode/eagle/eagle3_utils.py``, SGLang's ``srt/speculative/dflash_utils.py`` and ``srt/models/dflash.py``.
Both get the configuration through transformers, as a Qwen3 one. Where they pass over a fault in silence (SGLang leaves a weight
that is not in the file as it was made), the fault is refused here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig

from attention import SLIDING
from config import ConfigError
from drafter import DrafterShape

ARCHITECTURE = "DFlashDraftModel"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"

# All that a drafter of this example needs in there. Any other name asks for a part that it does not have, such as a convolution.
_DFLASH_FIELDS = {"block_size", "causal", "mask_token_id", "num_target_layers", "target_layer_ids", "use_swa"}


@dataclass(frozen=True)
class Served:
    """A drafter as a server understands its ``config.json``.

    Attributes:
        shape: sizes.
        block_size: ``B``.
        taps: ids of tapped target layers, counted from 0 (vLLM counts the layer before which it looks, and adds 1 itself).
        mask_id: the mask token.
        target_layers: layers of the target.
        vocab_size: rows of the target's embedding and head, which the server lends.
        dtype: of all weights.
    """

    shape: DrafterShape
    block_size: int
    taps: tuple[int, ...]
    mask_id: int
    target_layers: int
    vocab_size: int
    dtype: torch.dtype


def read(folder: Path) -> Served:
    """Read ``config.json`` by the servers' rules.

    Raises:
        ConfigError: if a server would refuse it, or run another drafter than it says.
    """
    try:
        return _served(folder, json.loads((folder / CONFIG).read_text()))
    except ConfigError as error:
        raise ConfigError(f"drafter is {folder}, and servers cannot run it by its {CONFIG}: {error}") from error
    except Exception as error:  # whatever else is wrong with the folder
        raise ConfigError(f"drafter is {folder}, and its {CONFIG} cannot be read: {error}") from error


def _served(folder: Path, written: dict[str, Any]) -> Served:
    if written.get("architectures") != [ARCHITECTURE] or written.get("model_type") != "qwen3":
        raise ConfigError(f"architectures must be [{ARCHITECTURE!r}] and model_type 'qwen3'")
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    special = written.get("dflash_config")
    if not isinstance(special, dict):
        raise ConfigError("there is no dflash_config")
    if unknown := sorted(special.keys() - _DFLASH_FIELDS):
        raise ConfigError(f"dflash_config has {', '.join(unknown)}, which this kind of drafter knows nothing of")
    both = {**{name: written.get(name) for name in ("block_size", "num_target_layers", "mask_token_id")}, **special}
    target_layers, vocab_size = _whole(both, "num_target_layers", 1), _whole(written, "vocab_size", 1)
    mask_id = _whole(both, "mask_token_id", 0)
    if mask_id >= vocab_size:
        raise ConfigError(f"mask_token_id is {mask_id}, and the vocabulary has {vocab_size} ids")
    taps = special.get("target_layer_ids")
    if not isinstance(taps, list) or not taps or not all(type(tap) is int and 0 <= tap < target_layers for tap in taps):
        raise ConfigError(f"target_layer_ids are {taps}: name layers from 0 to {target_layers - 1}")
    for name, only in (("hidden_act", "silu"), ("attention_bias", False), ("rope_scaling", None)):
        if written.get(name, only) != only:
            raise ConfigError(f"{name} is {written[name]!r}, these drafters have {only!r}")
    if written.get("draft_vocab_size", vocab_size) != vocab_size:
        raise ConfigError("draft_vocab_size must be vocab_size: the drafter has the target's head")
    rope = config.rope_parameters
    if (
        rope.get("rope_type", "default") != "default"
        or written.get("rope_theta", rope["rope_theta"]) != rope["rope_theta"]
    ):
        raise ConfigError("rope_parameters must be of type 'default', with the rope_theta that is written beside them")
    if not isinstance(config.dtype, torch.dtype):
        raise ConfigError("there is no dtype")
    layer_types = tuple(config.layer_types)
    # transformers forgets the window without use_sliding_window.
    sliding_window = config.sliding_window if SLIDING in layer_types else None
    if special.get("use_swa") and SLIDING not in layer_types:
        raise ConfigError("use_swa makes all layers slide, layer_types must say so too")
    for kind in layer_types:
        if _causal_in_vllm(written, kind) != (kind == SLIDING):
            raise ConfigError(
                "is_causal or dflash_config.causal holds for all layers, but only sliding ones are causal"
            )
    shape = DrafterShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        taps=len(taps),
        rope_theta=rope["rope_theta"],
        rms_norm_eps=config.rms_norm_eps,
        layer_types=layer_types,
        sliding_window=sliding_window,
    )
    return Served(shape, _whole(both, "block_size", 2), tuple(taps), mask_id, target_layers, vocab_size, config.dtype)


def _whole(fields: dict[str, Any], name: str, least: int) -> int:
    value = fields.get(name)
    if type(value) is not int or value < least:
        raise ConfigError(f"{name} is {value!r}, it must be a whole number from {least}")
    return value


def _causal_in_vllm(written: dict[str, Any], kind: str) -> bool:
    """Tell whether vLLM makes a layer causal (``_dflash_layer_causal``); SGLang goes by the kind of layer alone."""
    for named in (written.get("is_causal"), written["dflash_config"].get("causal")):
        if named is not None:
            return bool(named)
    return kind == SLIDING


def check_exported(folder: Path) -> None:
    """Check what a published checkpoint may leave out but an export of this example has, so that old and new servers read the same.

    Raises:
        ConfigError: if a field is missing where some version of a server looks for it, or says something else there.
    """
    written = json.loads((folder / CONFIG).read_text())
    for name, inside in (("block_size", "dflash_config"), ("rope_theta", "rope_parameters")):
        if name not in written or written[name] != (written.get(inside) or {}).get(name):
            raise ConfigError(
                f"drafter is {folder}: {name} must stand in its {CONFIG} and in {inside} there, for old servers and new ones"
            )
    sliding = SLIDING in written.get("layer_types", ())
    if written.get("use_sliding_window") is not sliding or (written.get("sliding_window") is not None) is not sliding:
        raise ConfigError(
            f"drafter is {folder}: use_sliding_window and sliding_window in its {CONFIG} must go with layer_types"
        )


def check_target(folder: Path, served: Served, *, hidden_size: int, layers: int, vocab_size: int) -> None:
    """Check that a drafter was made for a target of these sizes.

    Raises:
        ConfigError: if it was made for another one.
    """
    for name, of_drafter, of_target in (
        ("width", served.shape.hidden_size, hidden_size),
        ("number of layers", served.target_layers, layers),
        ("vocabulary", served.vocab_size, vocab_size),
    ):
        if of_drafter != of_target:
            raise ConfigError(
                f"drafter is {folder}, made for a target whose {name} is {of_drafter}; this target's is {of_target}: name its own"
            )


def weight_shapes(served: Served) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every weight, as published and as the servers' ``load_weights`` look for them.

    There is no prefix, and no embedding or head, which the server borrows from the target.
    """
    shape = served.shape
    width, inner = shape.hidden_size, shape.intermediate_size
    layer = {
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
        "self_attn.q_proj": (shape.heads * shape.head_dim, width),
        "self_attn.k_proj": (shape.kv_heads * shape.head_dim, width),
        "self_attn.v_proj": (shape.kv_heads * shape.head_dim, width),
        "self_attn.o_proj": (width, shape.heads * shape.head_dim),
        "self_attn.q_norm": (shape.head_dim,),
        "self_attn.k_norm": (shape.head_dim,),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, shape.taps * width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    return shapes | {f"layers.{i}.{name}.weight": size for i in range(shape.layers) for name, size in layer.items()}


def read_weights(folder: Path, served: Served) -> dict[str, Tensor]:
    """Read the weights.

    Raises:
        ConfigError: if they are not exactly those that `weight_shapes` names, of the dtype in ``config.json``, all finite.
    """
    path = folder / WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"drafter is {folder}, and its {WEIGHTS} cannot be read: {error}") from error
    shapes = weight_shapes(served)
    wrong = [f"{name} is missing" for name in shapes.keys() - weights.keys()]
    wrong += [f"{name} is not known" for name in weights.keys() - shapes.keys()]
    for name in shapes.keys() & weights.keys():
        weight = weights[name]
        if tuple(weight.shape) != shapes[name] or weight.dtype != served.dtype:
            wrong.append(f"{name} is {tuple(weight.shape)} in {weight.dtype} and not {shapes[name]} in {served.dtype}")
        elif not weight.isfinite().all():
            wrong.append(f"{name} holds what is no number")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ConfigError(f"{path} does not fit {folder / CONFIG}: {'; '.join(sorted(wrong)[:3])}{more}")
    return weights
