"""Kill the example with SIGKILL at random moments and resume it, many times.

    PYTHONPATH=src:examples/dflash python -m tests.dflash.kill_and_resume --kills 20

Each run is a process of its own, killed at a moment drawn evenly from the time that one takes to the end of its training, and
resumed until it is complete; then the next run starts, until there have been enough kills. Fails unless each kill loses at
most the steps between two checkpoints, every checkpoint that is there can be read, and each run ends with the weights,
optimizer state and losses of one that was never killed, bit for bit. Prints a line for each kill.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

import demo
from checkpoints import MODEL, OPTIMIZER, by_step
from run_folder import CHECKPOINTS, DRAFTER, METRICS, OPTIONS, SUMMARY
from tests.dflash.conftest import write_tiny_target

SAVE_EVERY = 3
OPTIONS_GIVEN = (
    "--device cpu --taps 0,2,3 --layers 1 --block-size 4 --prompt-length 8 --response-length 8 --sequences 4 --uses 5 --batch 2 "
    f"--anchors 4 --chunk-blocks 2 --eval-prompts 1 --eval-prompt-length 8 --eval-new-tokens 8 --save-every {SAVE_EVERY}"
).split()

_forks = multiprocessing.get_context("fork")  # the program is imported once; no thread has been started here


def run_program(arguments: list[str], output: Path) -> None:
    with output.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    demo.leave(demo.main(arguments))


def step_lines(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of steps; the last line may be cut off."""
    path = folder / METRICS
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    metrics = [json.loads(line) for line in lines if line.endswith("\n")]
    return [{"step": m["step"], "loss": m["loss"]} for m in metrics if m["kind"] == "step"]


def bits(path: Path) -> dict[str, bytes]:
    """Return all tensors of a safetensors file; its header has the metadata in any order."""
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(path).items()}


def results(folder: Path, steps: int) -> dict[str, Any]:
    """Return everything that must not depend on whether a run was killed."""
    assert json.loads((folder / SUMMARY).read_text())["status"] == "complete"
    step, newest = by_step(folder / CHECKPOINTS)[-1]
    assert step == steps
    return {
        "weights": bits(newest / MODEL),
        "optimizer": bits(newest / OPTIMIZER),
        "drafter": bits(folder / DRAFTER / "model.safetensors"),
        "steps": step_lines(folder),
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20, help="how often (%(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="steps of each run (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (%(default)s)")
    given = parser.parse_args(arguments)
    rng = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        write_tiny_target(place / "target")
        (place / "text").mkdir()
        (place / "text" / "counting.txt").write_text(" ".join(str(i) for i in range(2000)))
        output = place / "output.txt"

        def start(folder: Path) -> Any:
            options = [*OPTIONS_GIVEN, "--target", f"{place}/target", "--text", f"{place}/text", "--run", str(folder)]
            options += ["--steps", str(given.steps)]
            again = ["--resume"] if (folder / OPTIONS).exists() else []
            process = _forks.Process(target=run_program, args=([*options, *again], output))
            process.start()
            return process

        start(place / "reference").join()
        expected = results(place / "reference", given.steps)
        assert [line["step"] for line in expected["steps"]] == list(range(given.steps))
        seconds = json.loads((place / "reference" / SUMMARY).read_text())["seconds"]
        until_trained = sum(seconds[stage] for stage in ("load", "references", "untrained", "n-gram", "training"))

        kills = runs = most_lost = 0
        while kills < given.kills:
            folder = place / f"run-{runs}"
            runs += 1
            while True:
                process = start(folder)
                process.join(rng.uniform(0, until_trained) if kills < given.kills else None)
                if process.exitcode is not None:
                    break
                process.kill()
                process.join()
                kills += 1
                made, saved = len(step_lines(folder)), max((s for s, _ in by_step(folder / CHECKPOINTS)), default=0)
                most_lost = max(most_lost, made - saved)
                print(f"kill {kills} in run {runs}: {made} steps made, {saved} saved", flush=True)  # noqa: T201  # what a program is for
                assert 0 <= made - saved <= SAVE_EVERY
            got = results(folder, given.steps)
            different = [what for what in expected if got[what] != expected[what]]
            assert not different, (
                f"{', '.join(different)} of {folder.name} differ from those of a run that was not killed"
            )
        assert "cannot be read" not in output.read_text()
    print(  # noqa: T201
        f"{kills} kills in {runs} runs: at most {most_lost} steps lost, of {SAVE_EVERY} between checkpoints; equal in every bit"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
