"""What a run would take, for ``--dry-run``: shapes, parameters, memory and traffic, from the target's ``config.json`` alone.

Parameters are counted in the real modules, which the meta device makes without memory. Memory is an estimate, on the high side:
the allocator's and the compiler's own needs are not in it, and what two stages need one after the other is added up.
Sizes are in bytes; a GB is 10^9 of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PretrainedConfig

import cache
from config import Config, ConfigError
from drafter import Drafter, DrafterShape, drafter_shape
from optimizer import OptimizerName
from target import TargetShape, choose_taps, read_config, shape_of

T = TypeVar("T")

FLOAT32 = 4
_CHUNK_COPIES = 4
"""Float32 logits of a chunk alive at the peak of its backward: the drafter's, the target's, a product of both, a gradient."""


@dataclass(frozen=True)
class Estimate:
    """What a run would take.

    Attributes:
        shapes: what the tensors of a step are, by name.
        target_parameters: of the frozen target, embedding and head included.
        trainable_parameters: of the drafter.
        vocabulary_parameters: of the frozen embedding and head that a drafter shares with its target.
        target_memory, drafter_memory: bytes of one thread, by what they are for.
        evaluation_memory: bytes of evaluating while training goes on, by what and where; none without ``eval_every``.
        whole_logits: bytes that one float32 copy of a step's logits would take without chunks; a chunk's is in ``chunk_logits``.
        device_memory: bytes by device, of all its threads.
        token_bytes: bytes that go from a target to a drafter for each token of context.
        rate: tokens a second of one drafter that the traffic is for.
        traffic: bytes a second from all targets to all drafters at that rate.
        cache: bytes of a cache of all work of the run.
    """

    shapes: dict[str, tuple[int, ...]]
    target_parameters: int
    trainable_parameters: int
    vocabulary_parameters: int
    target_memory: dict[str, int]
    drafter_memory: dict[str, int]
    evaluation_memory: dict[str, int]
    whole_logits: int
    chunk_logits: int
    device_memory: dict[str, int]
    token_bytes: int
    rate: float
    traffic: float
    cache: int


def estimate(config: Config, *, rate: float = 2800.0) -> Estimate:
    """Estimate a run of options that have been validated; nothing is loaded but the target's configuration.

    Args:
        config: validated options.
        rate: context tokens a second of one drafter.

    Raises:
        ConfigError: if the target's configuration is none, or does not go with the options.
    """
    model_config = read_config(config.target, trust_remote_code=config.trust_remote_code)
    config.check_positions(getattr(model_config, "max_position_embeddings", None))
    target = shape_of(model_config)
    taps = choose_taps(config.taps, target)
    shape = drafter_shape(config, target, len(taps))
    if config.mask_token_id is not None and config.mask_token_id >= model_config.vocab_size:
        raise ConfigError(
            f"mask_token_id is {config.mask_token_id}, but the target's ids end at {model_config.vocab_size - 1}"
        )
    model = _on_meta(lambda: _target(config, model_config))
    embedding, head = (m.weight for m in (model.get_input_embeddings(), model.get_output_embeddings()))
    vocabulary = embedding.numel() + (0 if head is embedding else head.numel())
    vocab_size = head.shape[0]
    drafter = _on_meta(lambda: Drafter(shape))
    matrices = sum(p.numel() for p in drafter.parameters() if p.ndim == 2)
    trainable = sum(p.numel() for p in drafter.parameters())

    precision = getattr(torch, config.target_dtype).itemsize
    rows = config.anchors * config.block_size
    hidden = target.hidden_size
    token_bytes = (len(taps) + 1) * hidden * precision
    sequence_bytes = config.length * token_bytes
    chunk_logits = config.batch * config.chunk_rows * vocab_size * FLOAT32
    devices = [str(device) for device in config.devices(planned=True)]
    written_out = config.attention == "dense" or devices[config.targets] == "cpu"
    dense = config.batch * rows * (config.length + rows) if written_out else 0

    # Work waits where it is used: what the queue holds, what the drafter learns from, and what it has queued its last step on.
    waiting = config.queue_depth + 2
    target_memory = {
        "weights": sum(p.numel() for p in model.parameters()) * precision,
        "keys and values": config.sequences * cache_elements(model_config, target, config.length) * precision,
        "activations": config.sequences * config.length * _layer_elements(target) * precision,
        "features of a batch of work": config.sequences * sequence_bytes,
    }
    drafter_memory = {
        "weights, float32": trainable * FLOAT32,
        "weights, bfloat16 copies": trainable * 2 if config.autocast else 0,
        "gradients": trainable * FLOAT32,
        "gradients, mean of replicas": trainable * FLOAT32,
        "optimizer": optimizer_elements(config.optimizer, trainable, matrices) * FLOAT32,
        "embedding and head": vocabulary * precision,
        f"features of {waiting} batches of work": waiting * config.sequences * sequence_bytes,
        "features of a step": config.batch * sequence_bytes,
        "activations": config.batch
        * activation_elements(shape, config.length, rows)
        * (2 if config.autocast else FLOAT32),
        "dense mask": dense,
        "logits of a chunk": _CHUNK_COPIES * chunk_logits,
    }
    # A copy that is measured, one that waits, and one that takes its place.
    copies = {"copies of the weights, beside the first drafter": 3 * trainable * FLOAT32}
    beside_target = {
        "drafter, beside the first target": trainable * FLOAT32,
        "keys and values, beside the first target": precision
        * cache_elements(model_config, target, config.eval_prompt_length + config.eval_new_tokens),
    }
    device_memory: dict[str, int] = {}
    for index, device in enumerate(devices):
        taken = sum((target_memory if index < config.targets else drafter_memory).values())
        # A drafter beside the first target uses that one's embedding and head.
        if index >= config.targets and device == devices[0]:
            taken -= drafter_memory["embedding and head"]
        if config.eval_every and index in (0, config.targets):
            taken += sum((copies if index else beside_target).values())
        device_memory[device] = device_memory.get(device, 0) + taken
    return Estimate(
        shapes={
            "tokens": (config.batch, config.length),
            "features": (config.batch, config.length, len(taps) * hidden),
            "target's last hidden states": (config.batch, config.length, hidden),
            "blocks, rows of all anchors": (config.batch, rows, hidden),
            "logits of a chunk": (config.batch, config.chunk_rows, vocab_size),
        },
        target_parameters=sum(p.numel() for p in model.parameters()),
        trainable_parameters=trainable,
        vocabulary_parameters=vocabulary,
        target_memory=target_memory,
        drafter_memory={name: size for name, size in drafter_memory.items() if size},
        evaluation_memory=beside_target | copies if config.eval_every else {},
        # Slot 0 of a block predicts nothing, and has no logits.
        whole_logits=config.batch * (rows - config.anchors) * vocab_size * FLOAT32,
        chunk_logits=chunk_logits,
        device_memory=device_memory,
        token_bytes=token_bytes,
        rate=rate,
        traffic=rate * config.drafters * token_bytes,
        cache=cache.works_of(config) * cache.size_of(config, token_bytes),
    )


def optimizer_elements(name: OptimizerName, trainable: int, matrices: int) -> int:
    """Return the numbers that an optimizer keeps: two for each parameter; Muon, which has the matrices, one."""
    return 2 * trainable if name == "adamw" else 2 * trainable - matrices


def cache_elements(config: PretrainedConfig, shape: TargetShape, length: int) -> int:
    """Return the numbers in the target's key/value cache of one sequence of ``length`` tokens.

    Layers with a window keep that; layers of linear attention have a state of constant size, which is left out.
    """
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * shape.layers
    window = getattr(config, "sliding_window", None) or length
    kept = {"full_attention": length, "linear_attention": 0}
    tokens = sum(kept.get(kind, min(length, window)) for kind in kinds)
    return 2 * shape.kv_heads * shape.head_dim * tokens


def activation_elements(shape: DrafterShape, length: int, rows: int) -> int:
    """Return about how many numbers a drafter keeps for the backward of one sequence.

    Args:
        shape: the drafter's.
        length: ``S``, tokens of context.
        rows: ``N * B``, rows of all blocks.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # A block row: inputs and outputs of two norms; queries before and after their norm and the attention's result; what
    # comes before the keys' norm; gate, up, the gate's activation and the product.
    row = 4 * shape.hidden_size + 3 * queries + keys + 4 * shape.intermediate_size
    # A context row: what comes before the keys' norm. All rows together: keys and values, as attention takes them.
    context = keys
    layer = rows * row + length * context + 2 * (length + rows) * keys
    return shape.layers * layer + length * (shape.taps + 2) * shape.hidden_size + 2 * rows * shape.hidden_size


def show(found: Estimate, config: Config, console: Console) -> None:
    """Print the tables."""
    console.print(_shapes(found))
    console.print(_parameters(found))
    console.print(_memory("memory of a target thread", found.target_memory))
    console.print(_memory("memory of a drafter thread", found.drafter_memory))
    if found.evaluation_memory:
        console.print(_memory("memory of evaluating while training goes on", found.evaluation_memory))
    console.print(
        f"One copy of a step's logits would take {_size(found.whole_logits)} without chunks; "
        f"one of a chunk takes {_size(found.chunk_logits)}."
    )
    console.print(_devices(found, config))
    console.print(
        f"Traffic from targets to drafters: {_size(found.token_bytes)} a token; {_size(found.traffic)}/s "
        f"at {found.rate:.0f} tok/s of each of {config.drafters} drafters. A cache of all features would take {_size(found.cache)}."
    )


def _on_meta(make: Callable[[], T]) -> T:
    with torch.device("meta"):
        return make()


def _target(config: Config, model_config: PretrainedConfig) -> Any:
    try:
        return AutoModelForCausalLM.from_config(model_config, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # whatever is wrong with the folder
        raise ConfigError(
            f"target is {config.target}, and no causal language model can be made of its configuration: {error}"
        ) from error


def _layer_elements(shape: TargetShape) -> int:
    """Return the numbers alive for a token inside one layer, without a backward: the widest point is the feed-forward part."""
    return 4 * shape.hidden_size + 3 * shape.intermediate_size


def _shapes(found: Estimate) -> Table:
    table = Table("tensor", "shape", title="shapes of a step of one replica", title_justify="left")
    for name, shape in found.shapes.items():
        table.add_row(name, " x ".join(f"{size:,}" for size in shape))
    return table


def _parameters(found: Estimate) -> Table:
    table = _table("parameters", "millions")
    table.add_row("drafter, trainable", f"{found.trainable_parameters / 1e6:,.2f}")
    table.add_row("embedding and head that it shares, frozen", f"{found.vocabulary_parameters / 1e6:,.2f}")
    table.add_row("target, frozen", f"{found.target_parameters / 1e6:,.2f}")
    return table


def _memory(title: str, parts: dict[str, int]) -> Table:
    table = _table(title, "size")
    for name, size in parts.items():
        table.add_row(name, _size(size))
    table.add_section()
    table.add_row("together", _size(sum(parts.values())))
    return table


def _devices(found: Estimate, config: Config) -> Table:
    table = Table("device", "threads", title="memory of a device", title_justify="left")
    table.add_column("needed", justify="right")
    table.add_column("there is", justify="right")
    names = [f"target-{i}" for i in range(config.targets)] + [f"drafter-{i}" for i in range(config.drafters)]
    devices = [str(device) for device in config.devices(planned=True)]
    for device, needed in found.device_memory.items():
        threads = ", ".join(name for name, own in zip(names, devices, strict=True) if own == device)
        table.add_row(device, threads, _size(needed), _there_is(torch.device(device)))
    return table


def _there_is(device: torch.device) -> str:
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        return ""
    return _size(torch.cuda.get_device_properties(device).total_memory)


def _table(title: str, heading: str) -> Table:
    table = Table("", title=title, title_justify="left")
    table.add_column(heading, justify="right")
    return table


def _size(count: float) -> str:
    unit, name = next(
        (unit, name) for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")) if count >= unit or unit == 1e3
    )
    return f"{count / unit:,.2f} {name}"
