"""Train a DFlash drafter in eight threads and measure it by real speculative decoding.

    python examples/dflash/demo.py

Five target threads answer prompts and hand their features to three drafter threads through bounded queues, all in one
process and all calling compiled functions at the same time. Everything is written to the run folder. Exits with 0 if all
checks passed, 1 if one did not or a thread failed, 2 for options that cannot work, 130 after Ctrl-C and 143 after SIGTERM, from
where ``--resume`` goes on. See README.md.
"""

from __future__ import annotations

import os

import interrupt

if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun may end this process while it imports, which takes seconds
    interrupt.keep()

import json
import platform
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from safetensors import SafetensorError

import cache
import estimate
import evaluate
import export
import metrics
import nodes
import plots
import recorder
import results
import train
from backend import BACKEND, cpp_compiler
from command import command_line
from config import Config, ConfigError
from data import Conversations
from display import Display
from drafter import new_drafter
from evaluator import Evaluator
from interrupt import Interrupted, interruptible, kept_back
from nodes import ALONE
from pipeline import WorkerError
from prepare import Prepared, checked, load_targets, prepare
from replica import Numbers, Replica
from run_folder import DRAFTER, EVALUATION, SUMMARY
from speculative import DFlashProposer, NGramProposer
from target import Target
from watch import NodeError
from work import fill

_NOT_WRITTEN = (OSError, SafetensorError)
"""What a full disk raises, which may be why a run ends: safetensors has an error of its own, which is no OSError."""


def show_estimate(config: Config, rate: float) -> None:
    """Say what a run would take, without making it.

    Raises:
        ConfigError: in one sentence that says what to change.
    """
    config.validate(planned=True)
    estimate.show(estimate.estimate(config, rate=rate), config, Console())


def make_cache(config: Config, folder: Path) -> None:
    """Let the targets make all work of a run, for runs without them.

    Raises:
        ConfigError: in one sentence that says what to change.
        WorkerError: if a thread failed.
    """
    taps, language, train_on, _ = checked(config)
    token_bytes = estimate.estimate(config).token_bytes
    begun = cache.begin(folder, config, train_on, taps, token_bytes)
    torch.set_num_threads(1)
    missing = len(begun.missing())
    print(
        f"{missing} of {begun.works} batches of work to make, {missing * cache.size_of(config, token_bytes) / 1e9:,.2f} GB"
    )
    targets = load_targets(config, taps, language, config.targets if missing else 0)
    shown = time.monotonic()

    def tick() -> None:
        nonlocal shown
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(f"{begun.works - len(begun.missing())} of {begun.works}", flush=True)

    fill(config, train_on, targets, begun, tick)
    print(f"all there; train on it with --cache {folder}")


class Run:
    """One run, from loading to the summary, which is written however the run ends."""

    def __init__(self, prepared: Prepared) -> None:
        self.config, self.folder, self.taps, self.language = prepared[:4]
        self._train_on, self._held_out, self._checkpoints, self._checkpoint, self._cache, self.nodes = prepared[4:]
        self.training: train.Training | None = None
        self.summary: dict[str, Any] = {
            "status": "running",
            "versions": {
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
            "backend": BACKEND,
            "options": self.config.as_json(),
            "seconds": {},
        }
        self._console = Console()
        self._stage_started = self._started = time.monotonic()
        self._same = True  # the weights of all nodes, as far as is known: if not, they are not saved
        self._saving = threading.RLock()
        self._saved_step = self._checkpoint.step if self._checkpoint else 0  # guarded by _saving

    def complete(self) -> list[str]:
        """Run everything; return the checks that failed.

        Raises:
            WorkerError: if a thread failed.
            NodeError: if another node ended.
        """
        config, members = self.config, self.nodes
        members.doing = lambda: "loads, or evaluates before training"
        # Eight threads share few cores: operators that split up further only get in each other's way.
        torch.set_num_threads(1)
        if checkpoint := self._checkpoint:
            self.summary["resumed"] = {"step": checkpoint.step, "notes": checkpoint.notes}
            for note in checkpoint.notes:
                print(f"{members.prefix}note: {note}", file=sys.stderr)
        self._say(f"resumes at step {checkpoint.step} of {config.steps}" if checkpoint else "begins at step 0")
        makers = f"{config.targets} target" if self._cache is None else f"{config.drafters} reader"
        here = f" on each of {members.count} nodes" if members.count > 1 else ""
        self._say(f"{makers} and {config.drafters} drafter threads{here}, torch {torch.__version__}")
        self._say(
            f"compiler backend: {BACKEND}"
            + ("" if cpp_compiler() else " (no C++ compiler found, Inductor needs one on CPU)")
        )
        if isinstance(self._train_on, Conversations) and isinstance(self._held_out, Conversations):
            train_on, held_out = len(self._train_on.samples), len(self._held_out.samples)
            self._say(
                f"{train_on} {'sequences of ' if config.packing else ''}conversations to train on, {held_out} held out, "
                f"{self._train_on.left_out} too long or without an answer"
            )
        targets = load_targets(config, self.taps, self.language, config.targets if self._cache is None else 1)
        judge = targets[0]
        self._done("load")
        if not members.writes:
            self._train(targets, None)
            self._done("training")
            # Node 0 evaluates; what comes of it is the end of all, so that torchrun starts all again or none.
            failed: list[str] = members.gather("failed checks", None)[0]
            return failed
        references = evaluate.references(config, self._held_out, judge)
        self._done("references")
        untrained = new_drafter(config, judge.shape, len(self.taps), judge.device)
        block = config.block_size
        evaluations = {
            "untrained": evaluate.evaluate(config, judge, lambda: DFlashProposer(untrained, judge, block), references)
        }
        self._done("untrained")
        evaluations["n-gram"] = evaluate.evaluate(config, judge, lambda: NGramProposer(block - 1), references)
        self._done("n-gram")

        # Built of what is there: a drafter that has been measured.
        evaluator = Evaluator(config, judge, untrained, references, self.folder.metric) if config.eval_every else None
        training = self._train(targets, evaluator)
        self._done("training")
        # From disk: what is measured is what was saved.
        trained = export.load(self.folder.path / DRAFTER, judge.device).drafter
        evaluations["trained"] = evaluate.evaluate(
            config, judge, lambda: DFlashProposer(trained, judge, block), references
        )
        self.folder.metric(
            "evaluation",
            step=config.steps,
            **evaluate.metrics(evaluations["trained"], block - 1, sum(t.seconds for t in evaluations["trained"].timed)),
        )
        self._done("trained")
        self.summary["graphs"] = {
            "compiled_by_all_threads": training.compiled,
            "compiled_by_one_thread": self._compiled_by_one_thread(training, judge),
        }
        self._done("one thread")
        self.folder.write_json(EVALUATION, evaluate.raw(evaluations))
        measured = json.loads((self.folder.path / EVALUATION).read_text())
        self.summary["evaluation"] = evaluate.summarize(measured, block - 1)
        self._plot()
        self._done("plots")
        failed = results.failed_checks(config, self.summary, self.folder.metrics("evaluation"))
        self.summary["failed_checks"] = failed
        for line in results.shown(config, self.summary):
            self._say(line)
        members.gather("failed checks", failed)
        return failed

    def end(self, status: str) -> bool:
        """Save what there is to save, and the summary; return whether all of it could be written, and say what could not."""
        written = True
        if not self.nodes.writes:
            return written  # node 0 saves what is to be saved, and its weights are this node's
        if self.training and status != "complete" and (replica := self.training.at_rest()):
            try:
                problem: object = None if self._same else "the nodes have not been found to have the same weights"
                if self._same:
                    self._save(replica)
            except _NOT_WRITTEN as error:
                problem = error
            if problem is not None:
                written = False
                print(f"step {replica.step} could not be saved: {problem}", file=sys.stderr)
        self.summary["status"] = status
        self.summary["seconds"]["all"] = round(time.monotonic() - self._started, 1)
        self.summary["cpu_seconds"] = round(time.process_time(), 1)
        try:
            if self.training and "training" not in self.summary:
                self.summary["training"] = self._training_summary(self.training)
            self.folder.write_json(SUMMARY, self.summary)
        except OSError as error:
            written = False
            print(f"{SUMMARY} could not be written: {error}", file=sys.stderr)
        try:
            self.folder.close()
        except metrics.MetricsError as error:
            written = False
            print(error, file=sys.stderr)
        return written

    def left_behind(self) -> list[str]:
        """Return the names of threads that could not be ended."""
        return self.training.crew.running() if self.training else []

    def _train(self, targets: list[Target], evaluator: Evaluator | None) -> train.Training:
        config = self.config
        members = self.nodes
        snapshot = self._checkpoint.snapshot() if self._checkpoint and members.writes else None
        snapshot = members.spread(snapshot)
        training = train.Training(config, self._train_on, targets, snapshot, self._cache, evaluator, members)
        self._compare(training.replicas[0])
        # Not before all is loaded and decoded: what fails until here leaves the checkpoints of the run before a restart.
        if members.writes:
            self._begin()
        members.gather("folder", None, config.collective_timeout)
        if not members.writes:
            self._begin()
        self.training = training
        members.doing, members.numbers = training.doing, training.numbers
        written = recorder.Recorder(training, self.folder.metric, self._training_seconds)

        def report(step: int, numbers: Numbers) -> None:
            written.step(step, numbers)
            if (step + 1) % config.save_every == 0:
                self._compare(training.replicas[0])
                self._save(training.replicas[0])

        display = Display(training, self._console) if members.writes else None

        def tick() -> None:
            states = written.tick()
            if display:
                display.tick(states)
            members.check()

        torch.compiler.reset()  # cold for all threads at once, whatever this one has compiled so far
        try:
            training.run(report, tick)
        finally:
            if display:
                display.stop()
        tick()
        own = training.numbers() | {"graphs": training.compiled}
        of_all = members.gather("training", own)  # node 0 may still evaluate
        written.rates(of_all)
        self._compare(training.replicas[0], " at the end")
        self._save(training.replicas[0], final=True)
        if members.writes:
            self.summary["training"] = self._training_summary(training)
        if members.count > 1:
            self.summary["nodes"] = of_all
        members.doing = lambda: "has trained"
        return training

    def _compare(self, replica: Replica, when: str = "") -> None:
        """Make sure that all nodes have the same weights after the replica's last step.

        Raises:
            NodeError: if they do not.
        """
        members = self.nodes
        if members.count == 1:
            return
        what = f"weights after step {replica.step}{when}"
        # Until all are known: another node, which has found a difference, may end this one meanwhile.
        self._same = False
        of_all = members.gather(what, nodes.fingerprints(replica.drafter), self.config.collective_timeout)
        for rank, found in enumerate(of_all):
            if other := [name for name in found if found[name] != of_all[0][name]]:
                raise NodeError(
                    f"{what} are not the same on nodes 0 and {rank} ({len(other)} of {len(found)} parameters, {other[0]} first), so their "
                    "machines do not compute alike, and are not saved: use machines of one kind"
                )
        self._same = True

    def _compiled_by_one_thread(self, training: train.Training, target: Target) -> int | None:
        """Return what the threads must have compiled; None where they are on several devices, each with graphs of its own."""
        if len(set(self.config.devices())) > 1:
            return None
        if not training.losses:
            return 0  # resumed at its end, there was nothing to compile
        return train.compiles_of_one_thread(self.config, self._train_on, target, self._cache)

    def _begin(self) -> None:
        """Start the run's files anew, or go on with them where the checkpoint ends."""
        self.folder.open_sinks(self._saved_step)  # first: what fails here leaves the checkpoints of the run before
        if self.nodes.writes:
            self._checkpoints.begin(self._checkpoint)
        if self._checkpoint is None:
            self.folder.begin()
        else:
            self.folder.resume(self._checkpoint.step, self._checkpoint.seconds)

    def _training_seconds(self) -> float:
        """Return the seconds of training so far, those before a resume among them."""
        assert self.training
        return (self._checkpoint.seconds if self._checkpoint else 0.0) + self.training.seconds

    def _save(self, replica: Replica, *, final: bool = False) -> None:
        """Save the state after a replica's last step, as a checkpoint and as a drafter to use, each unless one as new is there.

        A drafter of more steps, from a run before a restart, stays until the ``final`` one of this run takes its place.
        """
        assert self.training
        if not self.nodes.writes:
            return
        with self._saving:  # both by the first drafter thread and, when the run ends meanwhile, by the main thread
            step = replica.step
            if step > self._saved_step:
                self.folder.sync_metrics()  # first: a checkpoint has the metrics of all its steps
                self._checkpoints.save(replica.snapshot(), self._training_seconds())
                self._saved_step = step
            folder = self.folder.path / DRAFTER
            try:
                exported = export.step_of(folder) if (folder / export.WEIGHTS).exists() else 0
            except SafetensorError:  # cut off by a machine that went down
                exported = 0
            if final or step > exported:
                export.save(folder, replica.drafter, self.training.targets[0], self.config.block_size, step)

    def _training_summary(self, training: train.Training) -> dict[str, Any]:
        return recorder.summary(training, self.folder.metrics("step")) | {"saved_step": self._saved_step}

    def _plot(self) -> None:
        assert self.training
        plots.loss(self.folder)
        plots.threads(self.folder, self._training_seconds())
        plots.acceptance_length(self.folder)
        drafters = self.summary["evaluation"]["drafters"]
        plots.acceptance(self.folder, {name: d["acceptance_by_position_not_looping"] for name, d in drafters.items()})

    def _done(self, stage: str) -> None:
        """End a stage that began where the one before it ended."""
        now = time.monotonic()
        self.summary["seconds"][stage] = round(now - self._stage_started, 1)
        self.folder.metric("stage", stage=stage, seconds=self.summary["seconds"][stage])
        self._stage_started = now

    def _say(self, text: str) -> None:
        if self.nodes.writes:
            print(text, flush=True)


def main(arguments: list[str]) -> int:
    """Return the exit code; to be called in the main thread, which signals interrupt."""
    with interruptible():
        return _main(arguments)


def _main(arguments: list[str]) -> int:
    run: Run | None = None
    members = ALONE
    try:
        command = command_line(arguments)
        if command.estimate_for is not None:
            show_estimate(command.config, command.estimate_for)
            return 0
        members = nodes.join(command.config)
        with kept_back() as interrupted:
            members.meet(interrupted)
        if command.make_cache is not None:
            if members.count > 1:
                raise ConfigError(
                    f"--make-cache is for one process: start it without torchrun, with --drafters {members.count * command.config.drafters} "
                    f"for a run of {members.count} nodes"
                )
            make_cache(command.config, command.make_cache)
            return 0
        run = Run(prepare(command.config, command.run, command.start, members))
        try:
            failed = run.complete()
        except Interrupted as interrupt:
            print(f"\n{members.prefix}ending; once more stops at once, without saving", file=sys.stderr, flush=True)
            reason = members.ending(nodes.INTERRUPTED)
            saved = "all there is was saved" if run.end("interrupted") else "not all there is could be saved"
            print(f"{members.prefix}interrupted; {saved} to {run.folder.path}, --resume goes on", file=sys.stderr)
            if reason:
                print(f"{members.prefix}stopped: {reason}", file=sys.stderr)
            members.leave()
            return interrupt.code
        except Exception as error:
            members.ending(str(error))
            run.summary["error"] = str(error)
            run.end("failed")
            if isinstance(error, WorkerError):
                traceback.print_exception(error.__cause__)
            raise
        if not run.end("complete"):
            members.ending("not all results could be written")
            members.leave()
            return 1
    except ConfigError as error:
        print(f"{members.prefix}error: {error}", file=sys.stderr)
        members.ending(str(error))
        members.leave()
        return 2
    except (WorkerError, NodeError, metrics.MetricsError, *_NOT_WRITTEN) as error:
        print(f"{members.prefix}stopped: {error}", file=sys.stderr)
        members.ending(str(error))
        members.leave()
        return 1
    except Interrupted as interrupt:  # before there was anything to save
        print(f"\n{members.prefix}interrupted", file=sys.stderr)
        if reason := members.ending(nodes.INTERRUPTED):
            print(f"{members.prefix}stopped: {reason}", file=sys.stderr)
        members.leave()
        return interrupt.code
    finally:
        if run is not None and (left := run.left_behind()):
            print(f"{members.prefix}left behind: {', '.join(left)}", file=sys.stderr, flush=True)
    members.leave()
    if members.writes:
        for failure in failed:
            print(f"FAILED: {failure}", file=sys.stderr)
        print(f"{'failed' if failed else 'all checks passed'}; results are in {run.folder.path}")
    # torchrun would only start a run again that is complete.
    return 1 if failed and not members.restarts else 0


def leave(code: int) -> None:
    """End the process with ``code``, whatever threads still do; they are at most inside a compile."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
