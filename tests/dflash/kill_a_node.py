"""Kill one of several nodes with SIGKILL at random moments: the others must say which one and end, and the run must go on.

    PYTHONPATH=src:examples/dflash python -m tests.dflash.kill_a_node --kills 10

Each node has a torchrun of its own, as on a machine of its own, and the default time-outs unless others are given. For the first half of
the kills the nodes are not started again by torchrun: the script measures how long the others take to end, looks for the error in which
each of them names the killed node, and no other, and starts all again with the same command line. For the second half ``--max-restarts``
does. A process is killed at a moment drawn evenly from the time that a whole run takes, or from its first ``--latest`` seconds, so that
it may be importing, evaluating, training or saving. With ``--stop`` it is stopped with SIGSTOP in place, as if its machine were cut off,
which no torchrun notices.

Fails unless every survivor ends within 60 seconds with that error, every checkpoint that is there can be read, none is lost, and the run
ends with the weights, optimizer state and losses of one that was never killed, bit for bit. Prints for each kill when it came, the errors,
and the steps that had to be made again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch has no list of what it exports there

from checkpoints import MODEL, OPTIMIZER, by_step
from run_folder import CHECKPOINTS, SUMMARY
from tests.dflash.conftest import write_tiny_target
from tests.dflash.kill_and_resume import OPTIONS_GIVEN, results, step_lines

WITHIN = 60.0
"""Seconds that the others may take to end."""

DEMO = Path(__file__).parents[2] / "examples" / "dflash" / "demo.py"


class Job:
    """All nodes of a run, each with its torchrun and a file of what it says."""

    def __init__(self, place: Path, folder: Path, nodes: int, restarts: int, *changes: str) -> None:
        # Not kept by one of the torchruns: when that one ended, the others would end their processes at once, before they know why.
        self.rendezvous = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        endpoint = f"127.0.0.1:{self.rendezvous.port}"
        launch = f"--nproc-per-node 1 --nnodes {nodes} --max-restarts {restarts} --rdzv-backend c10d --rdzv-endpoint {endpoint} "
        launch += "--rdzv-conf is_host=0 --rdzv-id kills --local-addr 127.0.0.1 --"
        options = f"--target {place}/target --text {place}/text --run {folder} --drafters 1 --targets 1 --resume"
        command = [sys.executable, "-m", "torch.distributed.run", *launch.split(), str(DEMO), *OPTIONS_GIVEN]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        self.outputs = [Path(tempfile.mkstemp(dir=place)[1]) for _ in range(nodes)]
        self.agents = []
        for output in self.outputs:
            with output.open("w") as file:
                self.agents.append(
                    subprocess.Popen([*command, *options.split(), *changes], stdout=file, stderr=file, env=environment)
                )

    def worker(self, place: int) -> int | None:
        """Return the process that a torchrun has started, if it has."""
        pid = self.agents[place].pid
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        commands = {int(child): Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0") for child in found}
        return next((child for child, command in commands.items() if os.fsencode(DEMO) in command), None)

    def rank(self, worker: int) -> int:
        pairs = dict(pair.split(b"=", 1) for pair in Path(f"/proc/{worker}/environ").read_bytes().split(b"\0") if pair)
        return int(pairs[b"RANK"])

    def over(self) -> bool:
        return all(agent.poll() is not None for agent in self.agents)

    def wait(self, limit: float) -> bool:
        """Wait for the end of all for at most ``limit`` seconds; return whether it has come."""
        until = time.monotonic() + limit
        while not self.over() and time.monotonic() < until:
            time.sleep(0.1)
        return self.over()

    def said(self) -> list[str]:
        """Return what each torchrun and its processes have said so far."""
        return [output.read_text(errors="replace") for output in self.outputs]


def steps_saved(folder: Path) -> list[int]:
    """Return the steps of all checkpoints, each of which must be whole."""
    for step, path in by_step(folder / CHECKPOINTS):
        for name in (MODEL, OPTIMIZER):
            with safe_open(path / name, framework="pt") as file:
                assert file.metadata()["step"] == str(step)
    return [step for step, _ in by_step(folder / CHECKPOINTS)]


def errors(said: str) -> list[str]:
    return [line for line in said.splitlines() if "stopped: " in line]


def blamed(error: str) -> set[int]:
    """Return the nodes that an error says have died, or do not answer."""
    found = re.findall(
        r"node (\d+)(?: \(\S+, process \d+\))? has (?:died|not answered)|without node (\d+):|node (\d+) has ended before all had met",
        error,
    )
    return {int(number) for numbers in found for number in numbers if number}


def made(folder: Path) -> int:
    """Return how many steps node 0 has reported."""
    return max((line["step"] + 1 for line in step_lines(folder)), default=0)


def complete(folder: Path) -> bool:
    path = folder / SUMMARY
    return path.exists() and json.loads(path.read_text())["status"] == "complete"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=10, help="how often (%(default)s)")
    parser.add_argument("--nodes", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="steps of each run (%(default)s)")
    parser.add_argument("--node-timeout", type=float, default=30.0, help="(%(default)s)")
    parser.add_argument("--stop", action="store_true", help="stop processes in place of killing them")
    parser.add_argument("--latest", type=float, help="seconds after the start within which to kill (those of a run)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (%(default)s)")
    given = parser.parse_args(arguments)
    rng = random.Random(given.seed)

    def say(text: str) -> None:
        print(text, flush=True)  # noqa: T201  # what a program is for

    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        write_tiny_target(place / "target")
        (place / "text").mkdir()
        (place / "text" / "counting.txt").write_text(" ".join(str(i) for i in range(2000)))

        def start(folder: Path, restarts: int = 0) -> Job:
            changes = ["--steps", f"{given.steps}", "--node-timeout", f"{given.node_timeout}"]
            return Job(place, folder, given.nodes, restarts, *changes)

        def workers_of(job: Job) -> list[int] | None:
            """Wait until all processes are there, and return them; None if the run is over."""
            while not job.over():
                found = [job.worker(each) for each in range(given.nodes)]
                if (workers := [each for each in found if each]) == found:
                    return workers
                time.sleep(0.05)
            return None

        reference = start(place / "reference")
        workers_of(reference)
        since = time.monotonic()
        assert reference.wait(600), "".join(reference.said())
        whole = time.monotonic() - since
        expected = results(place / "reference", given.steps)
        say(f"a run of {given.nodes} nodes takes {whole:.0f} s")
        latest = given.latest or whole

        kills, runs, slowest = 0, 0, 0.0
        without_restarts = given.kills if given.stop else given.kills // 2
        while kills < given.kills:
            folder, restarts = place / f"run-{runs}", 0 if kills < without_restarts else given.kills
            enough = given.kills if restarts else without_restarts
            runs += 1
            job = start(folder, restarts)
            before = [0] * given.nodes  # characters that each has said before the last kill
            steps = None  # made before it
            while True:
                workers_of(job)
                since = time.monotonic()
                over = job.wait(600 if kills == enough else rng.uniform(0, latest))
                after = "".join(text[start:] for text, start in zip(job.said(), before, strict=True))
                if steps is not None:
                    begun = re.findall(r"(?:resumes|begins) at step (\d+)", after)
                    lost = (
                        f"went on at step {begun[-1]}, {steps - int(begun[-1])} lost"
                        if begun
                        else "did not come to go on"
                    )
                    say(f"    {lost}")
                if over or kills == enough:
                    assert over, after
                    break
                saved = steps_saved(folder)
                if (workers := workers_of(job)) is None:
                    continue
                where = rng.randrange(given.nodes)
                rank = job.rank(workers[where])
                before = [len(text) for text in job.said()]
                os.kill(workers[where], signal.SIGSTOP if given.stop else signal.SIGKILL)
                moment, since = time.monotonic() - since, time.monotonic()
                others = [worker for number, worker in enumerate(workers) if number != where]
                while any(Path(f"/proc/{worker}").exists() for worker in others):
                    assert time.monotonic() - since <= WITHIN, "".join(job.said())
                    time.sleep(0.1)
                if given.stop:
                    os.kill(workers[where], signal.SIGKILL)
                if complete(folder):  # nobody had to miss it any more
                    job.wait(WITHIN)
                    break
                kills += 1
                took, steps = time.monotonic() - since, made(folder)
                slowest = max(slowest, took)
                assert max(steps_saved(folder), default=0) >= max(saved, default=0)
                said = [text[start:] for text, start in zip(job.said(), before, strict=True)]
                first = [errors(text) for number, text in enumerate(said) if number != where]
                say(
                    f"kill {kills} in run {runs}, restarts {restarts}: node {rank}, {moment:.1f} s after its start, after step {steps}; "
                    f"the others ended {took:.1f} s later, saved {steps_saved(folder)}"
                )
                for lines in first:
                    say(f"    {lines[0] if lines else 'no error'}")
                assert all(first), "".join(said)
                assert all(blamed(line) == {rank} for lines in first for line in lines), "".join(said)
                if restarts == 0:
                    assert job.wait(WITHIN), "".join(said)
                    job = start(folder, restarts)
                    before = [0] * given.nodes
            got = results(folder, given.steps)
            different: list[Any] = [what for what in expected if got[what] != expected[what]]
            assert not different, (
                f"{', '.join(different)} of {folder.name} differ from those of a run that was not killed"
            )
            assert "cannot be read" not in "".join(job.said())
    say(f"{kills} kills in {runs} runs: the others ended within {slowest:.1f} s; equal in every bit")


if __name__ == "__main__":
    main(sys.argv[1:])
