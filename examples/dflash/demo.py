"""Train a DFlash drafter in eight threads and measure it by real speculative decoding.

    python examples/dflash/demo.py

Five target threads answer prompts and hand their features to three drafter threads through bounded queues, all in one
process and all calling compiled functions at the same time. Exits with 1 if a check fails. See README.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

import torch

import data
import evaluate
import train
from backend import BACKEND, cpp_compiler
from config import PRESETS, Config, ConfigError
from pipeline import WorkerError
from safecompile import statistics
from speculative import DFlashProposer, NGramProposer
from target import Target, tapped_layers


class Stages:
    """Wall time of each stage, printed as it passes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started = time.monotonic()

    def done(self, stage: str) -> None:
        """End a stage that began where the one before it ended."""
        now = time.monotonic()
        self.seconds[stage] = now - self._started
        self._started = now


def options(arguments: list[str]) -> Config:
    """Read and check the command line."""
    parser = argparse.ArgumentParser(description="Train a DFlash drafter in several threads and measure it.")
    parser.add_argument("--preset", choices=PRESETS, default="demo", help="where the other options start (%(default)s)")
    for name, meaning in (
        ("steps", "training steps"),
        ("targets", "target threads"),
        ("drafters", "drafter threads"),
        ("seed", "everything random follows from it"),
    ):
        parser.add_argument(f"--{name}", type=int, help=meaning)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where the threads run")
    given = vars(parser.parse_args(arguments))
    preset = PRESETS[given.pop("preset")]
    config = replace(preset(), **{name: value for name, value in given.items() if value is not None})
    try:
        config.validate()
    except ConfigError as error:
        parser.error(str(error))
    return config


def run(config: Config) -> list[str]:
    """Run everything; return the checks that failed."""
    stages = Stages()
    torch.set_num_threads(
        1
    )  # eight threads share few cores: operators that split up further only get in each other's way
    print(
        f"{config.targets} target and {config.drafters} drafter threads on {config.device}, torch {torch.__version__}"
    )
    print(
        f"compiler backend: {BACKEND}"
        + ("" if cpp_compiler() else " (no C++ compiler found, Inductor needs one on CPU)")
    )

    corpus = data.load_corpus()
    # One after the other in this thread: loading changes settings of the whole process, such as the default dtype.
    devices = config.devices()[: config.targets]
    taps = config.taps or tapped_layers(Target(config.target, (0,), devices[0]).shape.layers, 5)
    targets = [Target(config.target, taps, device) for device in devices]
    stages.done("load")

    judge = targets[0]
    references = evaluate.references(config, corpus.held_out, judge)
    stages.done("references")
    untrained = train.new_drafter(config, judge.shape, len(taps), judge.device)
    # A quarter of the prompts: next to no draft is accepted, so that each token costs a pass of both models.
    quarter = references[: max(1, len(references) // 4)]
    before = evaluate.evaluate(config, judge, lambda: DFlashProposer(untrained, judge, config.block_size), quarter)
    stages.done("untrained")
    ngram = evaluate.evaluate(config, judge, lambda: NGramProposer(config.block_size - 1), references)
    stages.done("n-gram")

    def report(step: int, loss: float, waiting: int) -> None:
        if step % 20 == 0 or step == config.steps - 1:
            print(f"step {step:4d}  loss {loss:6.3f}  batches of work waiting {waiting}", flush=True)

    trained = train.train(config, corpus.train, targets, report)
    stages.done("training")
    drafter = trained.drafters[0].to(judge.device)
    after = evaluate.evaluate(config, judge, lambda: DFlashProposer(drafter, judge, config.block_size), references)
    stages.done("trained")

    tenth = max(1, config.steps // 10)
    first, last = (sum(part) / tenth for part in (trained.losses[:tenth], trained.losses[-tenth:]))
    looping = sum(r.loops for r in references)
    print(f"\nloss {first:.3f} in the first tenth of the steps, {last:.3f} in the last")
    print(f"\nspeculative decoding of {len(references)} held-out prompts, {looping} of them with responses that loop")
    print(f"{'drafter':10} {'acceptance length':>18} {'without loops':>14} {'target passes':>14} {'identical':>10}")
    for name, result in (("untrained", before), ("n-gram", ngram), ("trained", after)):
        lengths = (
            f"{result.acceptance_length(with_loops=True):18.2f} {result.acceptance_length(with_loops=False):14.2f}"
        )
        print(f"{name:10} {lengths} {result.target_passes:14} {result.identical:7}/{len(result.references)}")
    print(f"\nlargest difference between replicas: {trained.largest_difference}")
    compiles = statistics()
    print(
        f"graphs compiled by all threads: {compiles.compiled}; seconds waited for each other's compiles: {compiles.lock.waited_seconds:.1f}"
    )
    print(f"context tokens per second: {trained.tokens / trained.seconds:.0f}")
    print("seconds waiting for work: " + ", ".join(f"{s:.1f}" for s in trained.waiting_seconds))
    print("seconds: " + ", ".join(f"{stage} {s:.1f}" for stage, s in stages.seconds.items()), end="")
    print(f", in all {sum(stages.seconds.values()):.1f}")

    checks = {
        "the loss did not fall": last < first,
        "the trained drafter is not accepted more than the untrained one": (
            after.acceptance_length(with_loops=True) > before.acceptance_length(with_loops=True)
        ),
        "output differs from the target's own": all(e.identical == len(e.references) for e in (before, ngram, after)),
        "too few responses do not loop: the evaluation is not valid": len(references) - looping
        >= len(references) // 2
        > 0,
        "the replicas differ": trained.largest_difference == 0.0,
    }
    return [failure for failure, passed in checks.items() if not passed]


def main() -> int:
    """Return the exit code."""
    config = options(sys.argv[1:])
    try:
        failed = run(config)
    except WorkerError as error:
        print(f"stopped: {error}", file=sys.stderr)
        raise
    for failure in failed:
        print(f"FAILED: {failure}", file=sys.stderr)
    print("failed" if failed else "all checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
