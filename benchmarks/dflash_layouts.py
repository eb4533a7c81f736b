"""Time the example's training as threads of one process and in other layouts, on one GPU: ``python benchmarks/dflash_layouts.py``.

Five targets and three drafters, all on the GPU. A target has the sizes of Qwen3-0.6B with 32 layers (0.66 billion parameters) and
random weights; drafters have 5 layers; sequences of 2,048 random tokens, 512 anchors, blocks of 16. Each sequence is read by a
target and used for one step. The layouts:

- ``threads``: the example as it is, a thread for each target and drafter.
- ``stock``: the same program, with ``torch.compile`` in place of ``thread_safe_compile``.
- ``one-thread``: the same work, one piece after the other in one thread.
- ``processes``: a process for each target and drafter, queues between them, which hand over memory of the GPU.

Each runs in a process of its own. Rates are of the steps after ``--warm-up``, the busy share is the share of time in which the GPU
ran a kernel, as NVML reports it.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import queue
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.dflash_shared import (  # isort: skip  # before the example's modules
    VOCABULARY,
    NotingCrew,
    busy,
    config_of,
    first_line,
    graphs,
    in_a_process,
    stock,
    tokens,
)

import devices
import safecompile
import train
from config import Config
from drafter import new_drafter
from pipeline import WorkerError
from replica import Numbers, Replica, mean_gradients
from target import Features, Target, Vocabulary
from work import Work, make_work

LAYOUTS = ("threads", "stock", "one-thread", "processes")
DEVICE = torch.device("cuda", 0)
RESULT = "result.json"
PROCESSES_END = 40.0
"""Seconds of the limit that a layout's process needs before its processes begin and after they end."""


def main(arguments: Sequence[str] | None = None) -> None:
    summary, _, _ = (__doc__ or "").partition(":")
    parser = argparse.ArgumentParser(description=f"{summary}.")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warm-up", type=int, default=50, help="first steps, which rates leave out")
    parser.add_argument("--targets", type=int, default=5)
    parser.add_argument("--drafters", type=int, default=3)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--chunk-blocks", type=int, nargs="+", default=[64], help="several: one run for each")
    parser.add_argument("--attention", choices=("auto", "dense"), nargs="+", default=["auto"], help="likewise")
    parser.add_argument("--kl-weight", type=float, default=0.5)
    parser.add_argument(
        "--switch-interval",
        type=float,
        default=sys.getswitchinterval(),
        help="seconds that a thread may keep Python for",
    )
    parser.add_argument("--eager-target", action="store_true", help="do not compile the target's layers")
    parser.add_argument(
        "--count-again", action="store_true", help="also count the graphs that one thread alone compiles"
    )
    parser.add_argument("--limit", type=float, default=500, help="seconds for one run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument("--child", choices=LAYOUTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.exit(2, "the layouts are compared on a GPU\n")
    if options.child:
        sys.setswitchinterval(options.switch_interval)
        faulthandler.dump_traceback_later(options.limit - 10, exit=True)  # says where a run hangs
        measure(options)
        return
    results = []
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_target(folder)
        for layout in options.layouts:
            for attention in options.attention:
                for chunk_blocks in options.chunk_blocks:
                    results.append(run(options, folder, layout, attention, chunk_blocks))
                    print(describe(results[-1]), flush=True)
                    if options.json:
                        options.json.write_text(json.dumps(results, indent=2) + "\n")


def write_target(folder: Path) -> None:
    """Write a target of 0.66 billion random weights in bfloat16."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    with DEVICE:
        Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=VOCABULARY,
                hidden_size=1024,
                intermediate_size=3072,
                num_hidden_layers=32,
                num_attention_heads=16,
                num_key_value_heads=8,
                head_dim=128,
                max_position_embeddings=40960,
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=0,
            )
        ).to(torch.bfloat16).save_pretrained(folder)
    torch.cuda.empty_cache()


# --- the process that starts a layout's process, and watches the GPU


def run(options: argparse.Namespace, folder: Path, layout: str, attention: str, chunk_blocks: int) -> dict[str, Any]:
    """Run a layout in a process of its own and return what it measured, with what was seen of the GPU meanwhile."""
    result = folder / RESULT
    result.unlink(missing_ok=True)
    command = [sys.executable, __file__, f"--child={layout}", f"--folder={folder}", f"--attention={attention}"]
    command += [f"--chunk-blocks={chunk_blocks}"]
    command += [
        f"--{n.replace('_', '-')}={getattr(options, n)}"
        for n in (
            "limit",
            "steps",
            "warm_up",
            "targets",
            "drafters",
            "length",
            "anchors",
            "kl_weight",
            "switch_interval",
        )
    ]
    command += ["--eager-target"] * options.eager_target + ["--count-again"] * options.count_again
    outcome = in_a_process(command, folder / "output.txt", options.limit, [0])
    began, samples = outcome.began, outcome.samples[0]
    measured: dict[str, Any] = {"layout": layout, "attention": attention, "chunk_blocks": chunk_blocks}
    measured |= {"exit": outcome.exit}
    measured |= json.loads(result.read_text()) if result.exists() else {"output": outcome.output}
    times = measured.get("times", [])
    measured["seconds"] = time.time() - began
    measured["memory_of_gpu"] = max((s.memory for s in samples), default=0)
    if len(times) > options.warm_up + 1:
        first, last = times[options.warm_up], times[-1]
        rate = options.length * (len(times) - 1 - options.warm_up) / (last - first)
        measured |= {
            "seconds_to_first_step": times[0] - began,
            "tokens_per_second_of_a_drafter": rate,
            "tokens_per_second": rate * options.drafters,
            "busy": busy(samples, first, last),
        }
    return measured


def describe(measured: dict[str, Any]) -> str:
    """Return some lines about a run."""
    name = f"{measured['layout']}, attention {measured['attention']}, {measured['chunk_blocks']} blocks a chunk"
    lines = [f"{name}: {len(measured.get('times', []))} steps in {measured['seconds']:.0f} s, exit {measured['exit']}"]
    if "tokens_per_second" in measured:
        lines.append(
            f"{measured['tokens_per_second']:,.0f} tok/s, {measured['tokens_per_second_of_a_drafter']:,.0f} of each drafter; "
            f"GPU busy {measured['busy'] or 0:.0%}; first step after {measured['seconds_to_first_step']:.0f} s"
        )
    gib = 2**30
    lines.append(
        f"memory of the GPU {measured['memory_of_gpu'] / gib:.1f} GiB, allocated at most {measured.get('allocated', 0) / gib:.1f} GiB"
    )
    if "graphs" in measured:
        graphs = ", ".join(f"{count} {name}" for name, count in measured["graphs"].items())
        counts = (
            f"{measured['compiled']}, one thread alone {measured['compiled_by_one_thread']}"
            if "compiled_by_one_thread" in measured
            else ""
        )
        lines.append(f"graphs {counts}: {graphs}; losses {measured['losses'][:1]} to {measured['losses'][-1:]}")
    if "waits" in measured:
        lines.append(
            "waits, share of the warm steps: " + ", ".join(f"{n} {w:.0%}" for n, w in measured["waits"].items())
        )
    lines += [f"error in {where}: {what}" for where, what in measured.get("errors", [])]
    if measured.get("output"):
        lines.append(measured["output"][-2000:])
    return "\n  ".join(lines)


# --- a layout's process


def measure(options: argparse.Namespace) -> None:
    """Run the layout that was asked for here, and write what was measured."""
    config = config_of(
        options.length,
        device="cuda:0",
        target=options.folder,
        compile_target=not options.eager_target,
        targets=options.targets,
        drafters=options.drafters,
        block_size=16,
        anchors=options.anchors,
        chunk_blocks=options.chunk_blocks[0],
        attention=options.attention[0],
        kl_weight=options.kl_weight,
        steps=options.steps,
    )
    measured = Measured(options.warm_up, options.folder / RESULT)
    layouts: dict[str, Callable[[Config, Measured], None]] = {
        "one-thread": one_thread,
        "processes": partial(processes, limit=options.limit - PROCESSES_END),
    }
    layouts.get(options.child, partial(threads, count_again=options.count_again))(config, measured)
    measured.write()


class Measured:
    """What a layout's process measures."""

    def __init__(self, warm_up: int, result: Path) -> None:
        self.times: list[float] = []
        self.losses: list[float] = []
        self.errors: list[tuple[str, str]] = []
        self.waits: dict[str, float] = {}
        self.elsewhere: dict[str, Any] = {}
        self.warm_up = warm_up
        self.path = result

    def step(self, loss: float) -> None:
        """Take note of the end of a step."""
        self.times.append(time.time())
        self.losses.append(loss)

    def failed(self, where: str, error: BaseException) -> None:
        """Take note of an error."""
        self.errors.append((where, first_line(error)))

    def write(self) -> None:
        """Write all that is known."""
        known = {
            "times": self.times,
            "losses": self.losses,
            "errors": self.errors,
            "waits": self.waits,
            "graphs": graphs(),
            "allocated": torch.cuda.max_memory_allocated(),
        }
        self.path.write_text(json.dumps(known | self.elsewhere))


def load(config: Config, count: int) -> list[Target]:
    """Load targets onto the GPU."""
    found: list[Target] = []
    for _ in range(count):
        language = found[0].language if found else None
        found.append(
            Target(
                config.target,
                config.taps,
                DEVICE,
                language=language,
                dtype=torch.bfloat16,
                compiled=config.compile_target,
            )
        )
    return found


def threads(config: Config, measured: Measured, *, count_again: bool) -> None:
    """Run the example's own training."""
    train.Crew = partial(NotingCrew, note=measured.failed)  # type: ignore[assignment, attr-defined]
    training = train.Training(config, tokens(), load(config, config.targets))
    seen: dict[str, dict[str, float]] = {}

    def report(step: int, numbers: Numbers) -> None:
        measured.step(numbers["loss"])
        if step == measured.warm_up:
            seen.update({name: dict(thread.seconds) for name, thread in training.monitor.threads.items()})

    def tick() -> None:
        training.monitor.sample()

    with suppress(WorkerError):  # whose error has been taken note of
        training.run(report, tick)
    for name, thread in training.monitor.threads.items():
        warm = {state: s - seen.get(name, {}).get(state, 0.0) for state, s in thread.seconds.items()}
        waited = sum(s for state, s in warm.items() if state.startswith("waits"))
        measured.waits[name] = waited / max(1e-9, sum(warm.values()))
    measured.elsewhere["replicas_differ_by"] = train.largest_difference(training.drafters)
    if not measured.errors and safecompile.thread_safe_compile is not stock:
        torch.cuda.synchronize()
        measured.elsewhere["compiled"] = training.compiled
        measured.elsewhere["allocated"] = torch.cuda.max_memory_allocated()
        measured.elsewhere["graphs"] = graphs()
    if not measured.errors and count_again:
        measured.write()  # in case that the time is too short for what follows
        del training.replicas
        one = train.compiles_of_one_thread(config, tokens(), training.targets[0])
        measured.elsewhere["compiled_by_one_thread"] = one


def one_thread(config: Config, measured: Measured) -> None:
    """Do all work in turn."""
    targets = load(config, config.targets)
    training = train.Training(config, tokens(), targets)
    source = training.source
    read = None
    for step in range(config.steps):
        losses = []
        for index, replica in enumerate(training.replicas):
            target = targets[(step * config.drafters + index) % config.targets]
            losses.append(replica.gradients(make_work(config, source, target, step, index), step).loss)
        gradients = [[p.grad for p in r.drafter.parameters() if p.grad is not None] for r in training.replicas]
        means = mean_gradients(gradients, DEVICE)
        if read:
            measured.step(read()[0])
        for replica in training.replicas:
            for parameter, mean in zip(replica.drafter.parameters(), means, strict=True):
                parameter.grad = mean
            replica.step_optimizers()
        read = devices.read_later(losses[0].view(1))
    if read:
        measured.step(read()[0])


# --- a process for each role


class Ends(NamedTuple):
    """What the processes share: a queue from each target to each drafter, the way to each other, and the end."""

    work: list[list[Any]]
    gradients: list[Any]
    barrier: Any
    results: Any
    over: Any


def processes(config: Config, measured: Measured, *, limit: float) -> None:
    """Start a process for each target and drafter, and end all of them after ``limit`` seconds at most."""
    deadline = time.monotonic() + limit
    context = torch.multiprocessing.get_context("spawn")
    ends = Ends(
        [[context.Queue(config.queue_depth) for _ in range(config.drafters)] for _ in range(config.targets)],
        [context.Queue() for _ in range(config.drafters)],
        context.Barrier(config.drafters),
        context.Queue(),
        context.Event(),
    )
    members = [context.Process(target=target_process, args=(config, i, ends)) for i in range(config.targets)]
    members += [context.Process(target=drafter_process, args=(config, i, ends)) for i in range(config.drafters)]
    for member in members:
        member.start()
    results: list[dict[str, Any]] = []
    try:
        while len(results) < config.drafters:
            results.append(ends.results.get(timeout=max(0.0, deadline - time.monotonic())))
    except queue.Empty:
        measured.failed("processes", TimeoutError(f"{len(results)} of {config.drafters} drafters have ended in time"))
    finally:
        ends.over.set()
        deadline = time.monotonic() + 15
        for member in members:
            member.join(max(0.0, deadline - time.monotonic()))
            if member.is_alive():
                member.kill()
    if not results:
        return
    results.sort(key=lambda result: result["index"])
    measured.times, measured.losses = results[0]["times"], results[0]["losses"]
    measured.elsewhere["graphs"] = dict(sum((Counter(result["graphs"]) for result in results), Counter()))
    measured.elsewhere["allocated"] = sum(result["allocated"] for result in results)


def target_process(config: Config, index: int, ends: Ends) -> None:
    """Make every so manieth batch of work, on the default stream, on which the queue's thread hands it over."""
    source = tokens()
    (target,) = load(config, 1)
    for ticket in range(index, config.steps * config.drafters, config.targets):
        item, replica = divmod(ticket, config.drafters)
        work = make_work(config, source, target, item, replica)
        ends.work[index][replica].put((work.tokens, work.loss_mask, *work.features))
    ends.over.wait()  # what was handed over is this process's memory


def drafter_process(config: Config, index: int, ends: Ends) -> None:
    """Train one replica."""
    (target,) = load(config, 1)
    vocabulary = Vocabulary(*(part.clone() for part in target.vocabulary(DEVICE)))
    vocabulary = vocabulary._replace(head=vocabulary.embedding)  # tied
    shape, taps, mask_id = target.shape, len(target.taps), target.language.mask_id
    del target
    torch.cuda.empty_cache()
    replica = Replica(config, index, new_drafter(config, shape, taps, DEVICE), vocabulary, mask_id)
    parameters = list(replica.drafter.parameters())
    own = torch.empty(sum(p.numel() for p in parameters), device=DEVICE)
    for other in range(config.drafters):
        if other != index:
            ends.gradients[other].put((index, own))
    flat = {index: own} | dict(ends.gradients[index].get() for _ in range(config.drafters - 1))
    in_order = [flat[i] for i in range(config.drafters)]
    sizes = [p.numel() for p in parameters]
    times: list[float] = []
    losses: list[float] = []
    for step in range(config.steps):
        ticket = step * config.drafters + index
        tokens_, loss_mask, tapped, normed = ends.work[ticket % config.targets][index].get()
        made = replica.gradients(Work(tokens_, loss_mask, Features(tapped, normed)), step)
        torch.cat([p.grad.flatten() for p in parameters if p.grad is not None], out=own)
        torch.cuda.synchronize()
        ends.barrier.wait()
        (mean,) = mean_gradients([[part] for part in in_order], DEVICE)
        torch.cuda.synchronize()
        ends.barrier.wait()
        for parameter, part in zip(parameters, mean.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        replica.step_optimizers()
        losses.append(float(made.loss))  # a process waits for its device twice a step as it is
        times.append(time.time())
        del tokens_, tapped, normed  # the sender's memory
    allocated = torch.cuda.max_memory_allocated()
    ends.results.put({"index": index, "times": times, "losses": losses, "graphs": graphs(), "allocated": allocated})
    ends.over.wait()


if __name__ == "__main__":
    main()
