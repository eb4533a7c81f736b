"""Train the example's drafters with a GPU for each thread, and call one function on all GPUs: ``python benchmarks/dflash_devices.py``.

Five targets and three drafters by default, on eight GPUs of one host, in one process. A target has the sizes of Qwen3-8B with fewer
layers and random weights in bfloat16, made on its GPU; drafters are the paper's for Qwen3-8B (5 layers, width 4,096, 151,936 ids), with
sequences of 3,072 random tokens, 512 anchors and blocks of 16. Each sequence is read by a target and used for one step. The parts, each
in a process of its own, in the order of what they are worth if time runs out:

    train   the example's own training: steps, errors, graphs by function and device, difference between replicas, rates, busy
            share and memory of each GPU, depth of the queues, time to the first step; with all drafters, and last with fewer
    stock   the same with ``torch.compile`` in place of ``thread_safe_compile``: errors by thread, compiles, time to the first step
    calls   one guarded function called by as many threads, each on its GPU, and each result compared with eager's

Rates are of the steps after ``--warm-up``. The busy share is the share of that time in which a GPU ran a kernel, as NVML reports it. Graphs
are torch's own count. Times to a first step begin when the threads do; the first part also fills the compile caches for the others.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.dflash_shared import (  # isort: skip  # before the example's modules
    VOCABULARY,
    Compiles,
    NotingCrew,
    Outcome,
    busy,
    config_of,
    first_line,
    in_a_process,
    tokens,
)

import devices
import train
from backend import BACKEND
from benchmarks.cuda_graphs import INPUTS, ROWS, WIDTH, function
from benchmarks.dflash_step import EIGHT_B
from config import Config, ConfigError
from drafter import Drafter, drafter_shape
from monitor import Monitor, memory
from pipeline import WorkerError
from safecompile import thread_safe_compile
from target import Target, TargetShape, tapped_layers
from work import Work

KINDS = ("train", "stock", "calls")
SECONDS = {"train": (75.0, 1e9), "stock": (75.0, 150.0), "calls": (40.0, 90.0)}
"""Of each kind of part, how long it takes at least, or it is left out, and how long it may take at most."""
ENDING = 25.0
"""Seconds that a part's process has for its end, after its time for training or calls."""
PATIENCE, TINY_PATIENCE = 30.0, 3.0
"""Seconds that other threads may go on after the first error of stock torch, so that theirs are seen, too."""
ERRORS = 20
"""After so many, a thread makes no more calls."""

FULL = {"target_layers": 12, "length": 3072, "anchors": 512, "chunk_blocks": 256}
TINY = {"target_layers": 8, "length": 32, "anchors": 4, "chunk_blocks": 2}
TINY_SHAPE = replace(EIGHT_B, hidden_size=32, intermediate_size=48, heads=4, kv_heads=2, head_dim=8)
TINY_VOCABULARY = 320


@dataclass(frozen=True)
class Part:
    """What one process does.

    Attributes:
        device: of each thread, targets first, with commas between them.
        tiny: small sizes, for a trial.
        limit: seconds for the process.
        began: when it was started.
        folder: with the target's configuration, and for the result.
    """

    kind: str
    targets: int
    drafters: int
    device: str
    tiny: bool
    steps: int
    warm_up: int
    calls: int
    target_layers: int
    length: int
    anchors: int
    chunk_blocks: int
    folder: str
    limit: float = 0.0
    began: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind}-{self.drafters}" if self.kind == "train" else self.kind

    @property
    def threads(self) -> dict[str, str]:
        """The device of each thread of training, by the thread's name."""
        names = [f"target-{i}" for i in range(self.targets)] + [f"drafter-{i}" for i in range(self.drafters)]
        return dict(zip(names, self.device.split(","), strict=True))

    @property
    def vocabulary(self) -> int:
        return TINY_VOCABULARY if self.tiny else VOCABULARY

    @property
    def result(self) -> Path:
        return Path(self.folder, "result.json")

    @property
    def config(self) -> Config:
        """The example's options for it."""
        return config_of(
            self.length,
            device=self.device,
            target=Path(self.folder),
            compile_target=True,
            targets=self.targets,
            drafters=self.drafters,
            block_size=4 if self.tiny else 16,
            anchors=self.anchors,
            chunk_blocks=self.chunk_blocks,
            kl_weight=0.0,
            steps=self.steps,
        )

    def target_config(self) -> Any:
        """Return the target's configuration, from which a drafter takes its sizes."""
        from transformers import Qwen3Config

        shape = TINY_SHAPE if self.tiny else EIGHT_B
        return Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=self.target_layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=40_960,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
            rms_norm_eps=shape.rms_norm_eps,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=0,
            architectures=["Qwen3ForCausalLM"],
        )


def main(arguments: Sequence[str] | None = None) -> None:
    began, parser = time.time(), parser_of_options()
    options = parser.parse_args(arguments)
    if options.child:
        measure(Part(**json.loads(options.part)))
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            parts = parts_of(options, folder)
        except ConfigError as error:
            parser.exit(2, f"{error}\n")
        run_all(parts, began + options.limit, options.json)


def parser_of_options() -> argparse.ArgumentParser:
    summary, _, _ = (__doc__ or "").partition(":")
    parser = argparse.ArgumentParser(description=f"{summary}.")
    parser.add_argument("--targets", type=int, default=5)
    parser.add_argument("--drafters", type=int, default=3)
    parser.add_argument(
        "--devices",
        metavar="MAP",
        help="of each thread, targets first, such as cuda:0,cuda:1; fewer than threads are gone through again (a GPU for each "
        "thread); with cpu, sizes are tiny",
    )
    parser.add_argument("--only", choices=KINDS, nargs="+", default=list(KINDS), help="parts to run (all)")
    parser.add_argument(
        "--drafters-scaling", type=int, nargs="+", metavar="N", help="numbers of drafters to train (1 to all)"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warm-up", type=int, default=30, help="first steps, which rates leave out")
    parser.add_argument("--calls", type=int, default=2000, help="of each thread")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the program")
    for name, default in FULL.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"({default:,}; tiny: {TINY[name]})")
    parser.add_argument("--limit", type=float, default=570, help="seconds in all; what no longer fits is left out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, after each part")
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    return parser


def parts_of(options: argparse.Namespace, folder: str) -> list[Part]:
    """Return all parts that were asked for, the one that is worth most first; the target's configuration is in ``folder`` then.

    Raises:
        ConfigError: if the options cannot work.
    """
    threads = options.targets + options.drafters
    if options.targets < 1 or options.drafters < 1:
        raise ConfigError(
            f"targets are {options.targets} and drafters {options.drafters}: at least 1 of each is needed"
        )
    if options.devices is None and torch.cuda.device_count() < threads:
        raise ConfigError(
            f"a GPU for each of {threads} threads is more than the {torch.cuda.device_count()} that torch sees: name --devices, "
            "or lower --targets and --drafters"
        )
    gpus = options.devices or ",".join(f"cuda:{index}" for index in range(threads))
    on = [str(d) for d in Config(device=gpus, targets=options.targets, drafters=options.drafters).devices()]
    scaling = sorted(set(options.drafters_scaling or range(1, options.drafters + 1)), reverse=True)
    if not 1 <= scaling[-1] <= scaling[0] <= options.drafters:
        raise ConfigError(
            f"drafters_scaling goes from {scaling[-1]} to {scaling[0]}, but drafters are {options.drafters}"
        )
    if not 0 <= options.warm_up < options.steps - 1:
        raise ConfigError(f"warm_up is {options.warm_up}, which leaves less than 2 of {options.steps} steps to measure")
    if options.calls < 1:
        raise ConfigError(f"calls are {options.calls}, at least 1 is needed")
    tiny = options.tiny or "cpu" in on
    chosen = {name: getattr(options, name) for name in FULL if getattr(options, name) is not None}
    sizes = (TINY if tiny else FULL) | chosen

    def part(kind: str, drafters: int) -> Part:
        return Part(
            kind=kind,
            targets=options.targets,
            drafters=drafters,
            device=",".join(on[: options.targets + drafters]),
            tiny=tiny,
            steps=options.steps,
            warm_up=options.warm_up,
            calls=options.calls,
            folder=folder,
            **sizes,
        )

    whole = part("train", options.drafters)
    tapped_layers(whole.target_layers, EIGHT_B.taps)
    whole.target_config().save_pretrained(folder)
    whole.config.validate()
    first, *fewer = [part("train", count) for count in scaling]
    parts = [first, part("stock", options.drafters), part("calls", options.drafters), *fewer]
    return [one for one in parts if one.kind in options.only]


# --- the process that starts the parts' processes, and watches the GPUs


def run_all(parts: list[Part], end: float, file: Path | None) -> None:
    """Run the parts one after the other until ``end``, and print and write what is known after each."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    known: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.split()[0], "gpus": gpus}
    known |= {"parts": [], "failed": {}, "left_out": {}}
    print(f"torch {torch.__version__}, {', '.join(f'{n} {name}' for name, n in Counter(gpus).items()) or 'CPU'}")
    for index, part in enumerate(parts):
        left = end - time.time()
        least, most = SECONDS[part.kind]
        if left < least:
            known["left_out"][str(part)] = f"takes {least:.0f} s at least, and {max(0.0, left):.0f} s were left"
            print(f"{part}: left out, it {known['left_out'][str(part)]}", flush=True)
        else:
            # Training with fewer drafters takes what is left: compiles on many devices may need most of the time at first.
            later = sum(SECONDS[one.kind][0] for one in parts[index + 1 :] if one.kind != "train")
            measured = run(replace(part, limit=min(most, max(least, left - later))))
            known["parts"].append(measured)
            if measured["failed"]:
                known["failed"][str(part)] = measured["failed"]
            print(describe(measured), flush=True)
        if file:
            write(file, known)


def write(file: Path, known: dict[str, Any]) -> None:
    """Write JSON that is whole or not there."""
    beside = file.with_name(f"{file.name}.new")
    beside.write_text(json.dumps(known, indent=1) + "\n")
    beside.replace(file)


def run(part: Part) -> dict[str, Any]:
    """Run a part in a process of its own and return what it measured, with what was seen of the GPUs meanwhile."""
    part.result.unlink(missing_ok=True)
    part = replace(part, began=time.time())
    command = [sys.executable, __file__, f"--child={part.kind}", f"--part={json.dumps(asdict(part))}"]
    gpus = sorted({torch.device(name).index for name in part.threads.values() if name != "cpu"})
    outcome = in_a_process(command, part.result.with_name("output.txt"), part.limit, gpus)
    measured: dict[str, Any] = {"part": str(part), "options": asdict(part), "seconds": time.time() - outcome.began}
    measured |= {"exit": outcome.exit, "failed": failure(outcome, part)}
    if part.result.exists():
        measured |= json.loads(part.result.read_text())
        if part.kind != "calls":
            measured |= rates(part, measured, outcome)
    if measured["failed"]:
        measured["output"] = outcome.output[-8000:]
    return measured


def failure(outcome: Outcome, part: Part) -> str | None:
    """Return in a line how a part failed; None if it came to its end, with or without errors in threads."""
    if outcome.exit is None:
        return f"no end within {part.limit:.0f} s"
    if outcome.exit:
        said = outcome.output.strip().splitlines()
        return f"exit status {outcome.exit}: {said[-1] if said else 'nothing was said'}"
    return None if part.result.exists() else "no result"


def rates(part: Part, measured: dict[str, Any], outcome: Outcome) -> dict[str, Any]:
    """Return tokens a second of each drafter, and what each device did in the meantime."""
    drafters = [measured["times"].get(name, []) for name in part.threads if name.startswith("drafter")]
    warm = [times[part.warm_up :] for times in drafters]
    by_drafter = [part.length * (len(t) - 1) / (t[-1] - t[0]) if len(t) > 1 else None for t in warm]
    known = [rate for rate in by_drafter if rate is not None]
    used: dict[str, dict[str, Any]] = {}
    for name, device in part.threads.items():
        used.setdefault(device, {"threads": []})["threads"].append(name)
    for device, of in used.items():
        samples = outcome.samples.get(torch.device(device).index or 0, []) if device != "cpu" else []
        of["busy"] = busy(samples, warm[0][0], warm[0][-1]) if known else None
        of["memory"] = max((sample.memory for sample in samples), default=None)
        of.update(measured["memory"].get(device, {}))
    return {
        "seconds_to_first_step": [times[0] - measured["started"] if times else None for times in drafters],
        "tokens_per_second_of_each_drafter": by_drafter,
        "tokens_per_second": sum(known) if len(known) == part.drafters else None,
        "devices": used,
    }


def describe(measured: dict[str, Any]) -> str:
    """Return some lines about a part."""
    lines = [f"{measured['part']}: {measured['seconds']:.0f} s, {measured['failed'] or 'came to its end'}"]
    if "calls" in measured:
        lines.append(
            f"{measured['calls']:,} calls in {len(measured['calls_of_threads'])} threads, {measured['wrong']} wrong"
        )
    if "steps" in measured:
        late = ", stopped because the time was over" if measured["stopped"] else ""
        lines.append(
            f"{measured['steps']} of {measured['options']['steps']} steps{late}; {measured['failed_threads']} threads failed"
        )
        first = ", ".join("never" if s is None else f"{s:.0f} s" for s in measured["seconds_to_first_step"])
        lines.append(
            f"targets and drafters there after {measured['seconds_to_load']:.0f} s, first steps then after {first}"
        )
        lines.append(
            f"replicas differ by {measured['replicas_differ_by']}, losses {measured['losses'][:1]} to {measured['losses'][-1:]}"
        )
        if measured["tokens_per_second"]:
            each = ", ".join(f"{rate:,.0f}" for rate in measured["tokens_per_second_of_each_drafter"])
            lines.append(f"{measured['tokens_per_second']:,.0f} context tokens a second, of each drafter {each}")
        for device, used in measured["devices"].items():
            share = "?" if used["busy"] is None else f"{used['busy']:.0%}"
            size = "?" if used["memory"] is None else f"{used['memory'] / 2**30:.1f} GiB"
            lines.append(f"{device} ({', '.join(used['threads'])}): busy {share}, memory {size}")
        if measured["without_peer_access"]:
            lines.append(f"features go through the host from {', '.join(measured['without_peer_access'])}")
    if "graphs" in measured:
        counts = (f"{name} {' + '.join(map(str, by.values()))}" for name, by in measured["graphs"].items())
        lines.append(
            f"graphs on {'each device once' if measured['once_per_device'] else 'devices'}: {', '.join(counts)}"
        )
    lines += [f"error in {where}: {what}" for where, what in measured.get("errors", {}).items()]
    return "\n  ".join(lines)


# --- a part's process


class Measured:
    """What a part's process measures, written from time to time, so that an end before the last step loses little.

    Attributes:
        known: by names of the results.
        errors: of each thread, the first.
        threads: the device of each.
    """

    def __init__(self, part: Part, threads: dict[str, str]) -> None:
        self.known: dict[str, Any] = {}
        self.errors: dict[str, str] = {}
        self.threads = threads
        self._part = part
        self._compiles = Compiles()
        self._written = 0.0

    @property
    def over(self) -> bool:
        """Whether the time for training or calls is over."""
        return time.time() > self._part.began + self._part.limit - ENDING

    def failed(self, thread: str, error: BaseException) -> None:
        """Take note of an error."""
        self.errors.setdefault(thread, first_line(error))

    def write(self) -> None:
        """Write all that is known."""
        graphs = self._compiles.by_device(self.threads)
        compiled = {
            "graphs": graphs,
            "failed_compiles": self._compiles.failures(),
            "once_per_device": bool(graphs) and all(count == 1 for by in graphs.values() for count in by.values()),
        }
        errors = {"errors": dict(self.errors), "failed_threads": len(self.errors)}
        write(self._part.result, self.known | errors | compiled)
        self._written = time.time()

    @property
    def due(self) -> bool:
        """Whether it is time to write: seldom, since the threads need Python, too."""
        return time.time() > self._written + 5


def measure(part: Part) -> None:
    """Run a part here, and write what was measured."""
    faulthandler.dump_traceback_later(max(1.0, part.limit - 5), exit=True)  # says where it hangs
    left = (run_calls if part.kind == "calls" else run_training)(part)
    faulthandler.cancel_dump_traceback_later()
    if left:
        sys.stderr.flush()
        os._exit(0)  # threads that hang would hold up the end


class TimedMonitor(Monitor):
    """Also knows when each thread made or used a batch of work."""

    def __init__(self) -> None:
        super().__init__()
        self.times: dict[str, list[float]] = {}

    def add(self, name: str) -> None:
        super().add(name)
        self.times[name] = []

    def count(self, tokens: int) -> None:
        super().count(tokens)
        self.times[threading.current_thread().name].append(time.time())


def load(config: Config, model_config: Any) -> list[Target]:
    """Make the targets, all with the same random weights, each on its device."""
    from transformers import AutoModelForCausalLM

    found: list[Target] = []
    for device in config.devices()[: config.targets]:
        torch.manual_seed(0)
        with device:
            model = AutoModelForCausalLM.from_config(model_config, dtype=torch.bfloat16)
        language = found[0].language if found else None
        found.append(
            Target(
                config.target,
                None,
                device,
                language=language,
                dtype=torch.bfloat16,
                compiled=config.compile_target,
                model=model,
            )
        )
    return found


def new_drafter(config: Config, target: TargetShape, taps: int, device: torch.device) -> Drafter:
    """Return an untrained drafter, made on its device: the CPU would draw its billion numbers for each one after the other."""
    with device:
        drafter = Drafter(drafter_shape(config, target, taps))
    drafter.initialize(target.initializer_range, torch.Generator(device).manual_seed(config.seed))
    return drafter


def note_handing_over(handed: list[tuple[torch.device, torch.device]]) -> Callable[[Work, torch.device], Work]:
    """Return `Work.sent`, which also takes note of where features come from and go to."""
    sent = Work.sent

    def noted(work: Work, device: torch.device) -> Work:
        after = sent(work, device)
        handed.extend((a.device, b.device) for a, b in zip(work.features, after.features, strict=True))
        return after

    return noted


def through_the_host(source: torch.device, to: torch.device) -> bool:
    """Return whether a copy between two devices passes through the host's memory."""
    if source == to:
        return False
    return "cpu" in (source.type, to.type) or not torch.cuda.can_device_access_peer(source, to)


def run_training(part: Part) -> bool:
    """Run the example's own training; return whether threads are left behind that did not end."""
    config, measured = part.config, Measured(part, part.threads)
    known = measured.known
    monitor, handed, depths = TimedMonitor(), list[tuple[torch.device, torch.device]](), list[list[float]]()
    patience = 0.0 if part.kind == "train" else TINY_PATIENCE if part.tiny else PATIENCE
    train.Crew = partial(NotingCrew, note=measured.failed, patience=patience)  # type: ignore[assignment, attr-defined]
    train.Monitor = lambda: monitor  # type: ignore[assignment, attr-defined]
    train.new_drafter = new_drafter  # type: ignore[attr-defined]
    Work.sent = note_handing_over(handed)  # type: ignore[method-assign, assignment]
    training = train.Training(config, tokens(part.vocabulary), load(config, part.target_config()))
    crew, started = training.crew, time.time()
    assert isinstance(crew, NotingCrew)
    known |= {"started": started, "seconds_to_load": started - part.began, "stopped": False, "replicas_differ_by": None}

    def note() -> None:
        pairs = Counter(handed)
        known.update(
            steps=training.step,
            compiled=training.compiled,
            times=monitor.times,
            losses=training.replicas[0].losses,
            queue_depth=depths,
            seconds_of_threads={name: dict(thread.seconds) for name, thread in monitor.threads.items()},
            memory=memory(config.devices()),
            handed_over={f"{source} to {to}": count for (source, to), count in pairs.items()},
            without_peer_access=[f"{source} to {to}" for source, to in pairs if through_the_host(source, to)],
        )

    def tick() -> None:
        monitor.sample()
        passed = time.time() - started
        if not depths or passed >= depths[-1][0] + 0.5:
            depths.append([round(passed, 2), *map(len, training.queues)])
        if measured.over and not known["stopped"]:
            known["stopped"] = True
            crew.stop_all()
        if measured.due:
            note()
            measured.write()

    with suppress(WorkerError):  # whose error has been taken note of
        training.run(lambda step, numbers: None, tick)
    note()
    measured.write()  # in case that something hangs in what follows
    if not crew.running():
        known["replicas_differ_by"] = train.largest_difference(training.drafters)
        measured.write()
    return bool(crew.running())


def run_calls(part: Part) -> bool:
    """Let a thread for each device call one guarded function; return whether threads are left behind."""
    on = dict(enumerate(part.config.devices()))
    measured = Measured(part, {f"caller-{number}": str(device) for number, device in on.items()})
    call: Any = thread_safe_compile(function, backend=BACKEND, dynamic=False)
    together = threading.Barrier(len(on))
    done, wrong, seconds = [0] * len(on), [0] * len(on), [0.0] * len(on)

    def calls(number: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(number)

        def random(rows: int) -> torch.Tensor:
            return torch.randn(rows, WIDTH, device=device, generator=generator)

        weights = [random(WIDTH) / WIDTH**0.5 for _ in range(2)]
        inputs = [random(ROWS) for _ in range(INPUTS)]
        wants = [function(x, *weights) for x in inputs]
        differs = torch.zeros((), dtype=torch.int64, device=device)
        failures = 0
        together.wait()
        seconds[number] = -time.perf_counter()
        for turn in range(part.calls):
            if measured.over or failures == ERRORS:
                break
            try:
                got, want = call(inputs[turn % INPUTS], *weights), wants[turn % INPUTS]
                differs += ~((got - want).abs().max() <= 0.01 * want.abs().max())  # what is no number is wrong, too
                done[number] += 1
            except Exception as error:
                failures += 1
                measured.failed(threading.current_thread().name, error)
        wrong[number] = int(differs)
        seconds[number] += time.perf_counter()

    def run(number: int, device: torch.device) -> None:
        try:
            with devices.own_stream(device):
                calls(number, device)
        except Exception as error:
            together.abort()
            measured.failed(threading.current_thread().name, error)

    threads = [threading.Thread(target=run, args=item, name=f"caller-{item[0]}", daemon=True) for item in on.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, part.began + part.limit - ENDING / 2 - time.time()))
    measured.known |= {"calls": sum(done), "calls_of_threads": done, "wrong": sum(wrong), "seconds_of_calls": seconds}
    measured.write()
    return any(thread.is_alive() for thread in threads)


if __name__ == "__main__":
    main()
