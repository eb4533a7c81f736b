"""Time one training step of a drafter at full size, on random features: ``python benchmarks/dflash_step.py`` (needs a GPU).

The step is the example's own (`Replica`): draw anchors, build the mask, forward, chunked loss, backward, clip, optimizer
with float32 masters. By default the sizes are those of the 8B drafter (5 layers, width 4096, 151,936 ids) with sequences of
3,072 tokens and 512 anchors in blocks of 16. ``--profile`` says which kinds of kernels the time went to.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "dflash"))

from config import Config
from drafter import Drafter, DrafterShape
from loss import GRADIENTS, Gradient
from replica import Replica
from target import Features, Vocabulary
from work import Work

EIGHT_B = DrafterShape(
    hidden_size=4096,
    intermediate_size=12288,
    layers=5,
    heads=32,
    kv_heads=8,
    head_dim=128,
    taps=5,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
)
VOCABULARY = 151_936
KINDS = {  # by what a kernel's name holds; the first that fits
    "optimizer": ("adam",),
    "clipping": ("norm_cleanup", "lpnorm", "multi_tensor_apply"),
    "flex attention": ("flex", "tem_fused"),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma"),
    "other compiled": ("triton",),
    "copies": ("memcpy", "memset"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    summary, _, _ = (__doc__ or "").partition(":")
    parser = argparse.ArgumentParser(description=f"{summary}.")
    parser.add_argument("--length", type=int, default=3072)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--chunk-blocks", type=int, default=256)
    parser.add_argument("--kl-weight", type=float, default=0.0)
    parser.add_argument("--gradient", choices=GRADIENTS, nargs="+", default=list(GRADIENTS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.exit(2, "a step at full size needs a GPU\n")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    for gradient in options.gradient:
        measure(options, gradient)


def measure(options: argparse.Namespace, gradient: Gradient) -> None:
    device = torch.device("cuda", 0)
    config = Config(
        prompt_length=options.length - options.length // 2,
        response_length=options.length // 2,
        block_size=options.block_size,
        anchors=options.anchors,
        sequences=1,
        batch=1,
        uses=options.steps,
        gamma=7.0,
        kl_weight=options.kl_weight,
        chunk_blocks=options.chunk_blocks,
        steps=10_000,
        optimizer="adamw",
        lr=6e-4,
        autocast=True,
        gradient=gradient,
    )
    torch.manual_seed(0)
    with device:
        drafter = Drafter(EIGHT_B)
        head = torch.randn(VOCABULARY, EIGHT_B.hidden_size, dtype=torch.bfloat16) * 0.02
        vocabulary = Vocabulary(head, head.clone())
        tapped = torch.randn(1, options.length, EIGHT_B.taps * EIGHT_B.hidden_size, dtype=torch.bfloat16)
        normed = torch.randn(1, options.length, EIGHT_B.hidden_size, dtype=torch.bfloat16)
        work = Work(
            torch.randint(VOCABULARY, (1, options.length)),
            torch.ones(1, options.length, dtype=torch.bool, device="cpu"),
            Features(tapped, normed),
        )
    drafter.initialize(0.02, torch.Generator(device).manual_seed(0))
    replica = Replica(config, 0, drafter, vocabulary, mask_id=VOCABULARY - 1)

    def steps(count: int, begin: int) -> None:
        for step in range(begin, begin + count):
            replica.make_step(work, step)

    began = time.perf_counter()
    steps(5, 0)
    torch.cuda.synchronize()
    print(f"gradient {gradient}: first five steps {time.perf_counter() - began:.1f} s, compiles included")
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    steps(options.steps, 5)
    torch.cuda.synchronize()
    took = (time.perf_counter() - began) / options.steps
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(f"  {took:.4f} s a step, {options.length / took:,.0f} context tokens a second, {peak:.1f} GiB at most")
    if options.profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            steps(5, 5 + options.steps)
            torch.cuda.synchronize()
        report(profiler, 5, took)


def report(profiler: torch.profiler.profile, steps: int, took: float) -> None:
    """Print the milliseconds of a step by kind of kernel, and the longest kernels."""
    by_kind: Counter[str] = Counter()
    by_name: Counter[str] = Counter()
    for event in profiler.events():
        if event.device_type.name != "CUDA":
            continue
        name = event.name.lower()
        kind = next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")
        milliseconds = event.device_time / 1e3 / steps
        by_kind[kind] += milliseconds
        by_name[event.name] += milliseconds
    for kind, milliseconds in by_kind.most_common():
        print(f"    {milliseconds:7.2f} ms  {kind}")
    busy = sum(by_kind.values())
    print(f"    {busy:7.2f} ms  all kernels; {took * 1e3 - busy:.2f} ms of a step without one")
    for name, milliseconds in by_name.most_common(25):
        print(f"      {milliseconds:7.3f} ms  {name[:110]}")


if __name__ == "__main__":
    main()
