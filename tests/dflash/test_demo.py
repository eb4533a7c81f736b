"""The program: bad input is refused before any work; faults and Ctrl-C end it with the right code and lose nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the example's target is a transformers model")
pytest.importorskip("rich", reason="the example's display")
pytest.importorskip("matplotlib", reason="the example's plots")

import demo
from checkpoints import Snapshot, by_step
from command import command_line
from prepare import prepare
from tests.dflash.conftest import EXAMPLE
from tests.helpers.subprocess_run import run_forked

OPTIONS = [
    "--device",
    "cpu",
    "--taps",
    "0,2,3",
    "--layers",
    "1",
    "--block-size",
    "4",
    "--prompt-length",
    "8",
    "--response-length",
    "8",
    "--sequences",
    "4",
    "--uses",
    "2",
    "--batch",
    "2",
    "--anchors",
    "4",
    "--chunk-blocks",
    "2",
    "--steps",
    "8",
    "--save-every",
    "3",
    "--eval-every",
    "2",
    "--eval-prompts",
    "2",
    "--eval-prompt-length",
    "8",
    "--eval-new-tokens",
    "8",
]


def arguments(target: Path, text: Path, run: Path) -> list[str]:
    return [*OPTIONS, "--target", str(target), "--text", str(text), "--run", str(run)]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("--nonsense 1", "--nonsense"),
        ("--steps many", "--steps"),
        ("--steps 0", "steps is 0"),
        ("--config largest", "none of the bundled ones (demo, "),
        ("--optimizer sgd", "optimizer is 'sgd': use 'adamw' or 'muon'"),
        ("--lr fast", "--lr: 'fast' is not a number"),
        ("--mask-token-id 258", "mask_token_id is 258"),
        ("--eval-every -1", "eval_every is -1"),
        ("--eval-every 1 --target {dynamic}", "'dynamic', whose frequencies change"),
        ("--draft-heads 3", "3 heads and 2 key/value heads"),
        ("--draft-head-dim 7", "needs an even number"),
        ("--device tpu", "'tpu' does not exist here"),
        ("--device cpu,cuda:99", "'cuda:99' does not exist here"),
        ("--prompt-length 249", "prompt_length + response_length is 257"),
        ("--eval-new-tokens 249", "eval_prompt_length + eval_new_tokens is 257"),
        ("--sliding-window 4", "no layer slides"),
        ("--text {empty}", "there is no text"),
        ("--text {short}", "only 3 tokens"),
        ("--text {empty}/absent", "no folder"),
        ("--taps 0,5", "0 to 4"),
        ("--taps paper --target {shallow}", "2 layers has no 5 layers to tap"),
        ("--target {empty}", "no config.json"),
        ("--run {other}", "another configuration"),
        ("--chunk-blocks 7", "chunk_blocks"),
        ("--resume", "holds no run to resume"),
        ("--resume --restart", "not allowed with"),
    ],
)
def test_bad_input_is_one_clear_error_before_any_work(
    tiny_target: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wrong: str,
    says: str,
) -> None:
    places = {name: tmp_path / name for name in ("empty", "short", "shallow", "dynamic", "other")}
    for place in places.values():
        place.mkdir()
    (places["short"] / "a.txt").write_text("abcdefghij" * 5)
    config = json.loads((tiny_target / "config.json").read_text())
    (places["shallow"] / "config.json").write_text(
        json.dumps(config | {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2})
    )
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    (places["dynamic"] / "config.json").write_text(json.dumps(config | {"rope_parameters": dynamic}))
    (places["other"] / "options.json").write_text("{}")
    monkeypatch.setattr(demo, "Run", None)  # no work
    run = tmp_path / "run"
    code = demo.main([*arguments(tiny_target, text, run), *wrong.format(**places).split()])
    error = capsys.readouterr().err
    assert code == 2
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert says in error
    assert not run.exists()


PROGRAM = """
import itertools, json, os, random, signal, sys, threading
from pathlib import Path

example, run, arguments = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
sys.path.insert(0, example)
import torch
import demo, export, replica, train
from checkpoints import Checkpoints, by_step
from run_folder import RunFolder
from safetensors.torch import load_file
from target import Target

torch.compiler.reset = lambda: None  # compile once for all runs
moment, count, fault, trains = None, itertools.count(), None, []

def watched(original):
    def call(*args, **kwargs):
        name, number = threading.current_thread().name, next(count)
        if name.startswith(("target-", "drafter-")):
            trains.append(number)
        if number == moment:
            os.kill(os.getpid(), end)
        if name == fault[0] and next(fault[1]) == 2:
            raise ArithmeticError("injected")
        return original(*args, **kwargs)
    return call

def steps_and_losses():
    lines = list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
    evaluated = [line["step"] for line in lines if line["kind"].startswith("evaluation")]
    assert lines[-1]["kind"] != "stage" or lines[-1]["stage"] != "plots" or sorted(evaluated) == [2, 4, 6, 8], evaluated
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "step"]

def newest():
    return max((step for step, _ in by_step(run / "checkpoints")), default=0)

def resume(steps):
    global moment
    moment = None
    (run / "drafter" / "model.safetensors").unlink()
    code, summary = go("--resume")
    assert code == 1 and summary["status"] == "complete" and summary["resumed"]["step"] == steps, summary
    again = load_file(run / "drafter" / "model.safetensors")
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    assert steps_and_losses() == losses, steps_and_losses()
    print("resumed at", steps, flush=True)

def go(*how):
    global count
    count = itertools.count()
    code = demo.main([*arguments, *how, "--run", str(run)])
    assert not [t for t in threading.enumerate() if t.name.startswith(("target-", "drafter-", "evaluation"))]
    return code, json.loads((run / "summary.json").read_text())

fault = (None, None)
for owner, name in ((Target, "forward"), (replica.Replica, "loss"), (RunFolder, "metric"), (Checkpoints, "save"), (export, "save")):
    setattr(owner, name, watched(getattr(owner, name)))

code, summary = go()
assert code == 1 and summary["status"] == "complete", summary  # so little training does not pass the checks
assert summary["training"]["largest_difference_between_replicas"] == 0.0
drafters = summary["evaluation"]["drafters"]
assert all(d["identical"] == 2 for d in drafters.values()), drafters
complete = (run / "drafter" / "model.safetensors").read_bytes()
weights = load_file(run / "drafter" / "model.safetensors")
losses = steps_and_losses()
assert [step for step, _ in losses] == list(range(8)), losses
for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
    if line["kind"] == "step":
        assert len(line["accuracy"]) == len(line["acceptance_by_position"]), line
        assert abs(line["eal"] - 1 - sum(share or 0 for share in line["acceptance_by_position"])) < 1e-3, line
total = next(count)

rng = random.Random(0)
resumed = set()
# Most events are passes of the evaluation: half of the moments are while it trains.
training = rng.sample(trains, 5)
moments = sorted(training + rng.sample(sorted(set(range(1, total * 9 // 10)).difference(training)), 5))
for moment in moments:
    (run / "drafter" / "model.safetensors").unlink()
    end = rng.choice([signal.SIGINT, signal.SIGTERM])
    before = newest()
    code, summary = go("--restart")
    assert code == 128 + end and summary["status"] == "interrupted", (moment, code, summary)
    steps = summary.get("training", {}).get("steps", 0)
    assert newest() == (steps if "training" in summary else before), (moment, steps)  # those of before stay until it trains
    saved = export.load(run / "drafter", torch.device("cpu")).step if (run / "drafter/model.safetensors").exists() else 0
    assert saved >= steps, (moment, saved, steps)
    print("interrupted at", moment, "of", total, "after", saved, "steps", flush=True)
    if not saved:
        (run / "drafter" / "model.safetensors").write_bytes(complete)

    if 0 < steps not in resumed and len(resumed) < 3:
        resumed.add(steps)
        resume(steps)

moment = None
for worker in ("target-3", "drafter-1"):
    fault = (worker, itertools.count())
    (run / "drafter" / "model.safetensors").write_bytes(complete)
    code, summary = go("--restart")
    assert code == 1 and summary["status"] == "failed", summary
    assert summary["error"] == f"thread '{worker}' failed: ArithmeticError: injected", summary
    assert (run / "drafter" / "model.safetensors").read_bytes() == complete  # newer than what this run had
    print("failed in", worker, flush=True)
fault = (None, None)
print("files", *sorted(p.name for p in run.iterdir()))
"""


@pytest.mark.hang_timeout(320)
def test_ctrl_c_at_ten_random_moments_and_faults_end_the_program_and_lose_nothing(
    tiny_target: Path, text: Path, tmp_path: Path
) -> None:
    """Moments are numbers of events (passes, steps, metrics, saves), drawn at random: no time is waited for."""
    given = arguments(tiny_target, text, tmp_path)[:-2]
    result = run_forked(PROGRAM, [str(EXAMPLE), str(tmp_path / "run"), *given], timeout=300).check()
    assert result.stdout.count("interrupted at") == 10
    assert result.stdout.count("resumed at") >= 3
    assert "failed in drafter-1" in result.stdout
    files = result.stdout.splitlines()[-1].split()[1:]
    assert {"options.json", "metrics.jsonl", "summary.json", "evaluation.json", "loss.png"} <= set(files)
    assert {"drafter", "checkpoints"} <= set(files)
    assert "thread 'drafter-1' failed: ArithmeticError: injected" in result.stderr


def test_a_restart_that_fails_before_it_trains_deletes_nothing(
    tiny_target: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    given = arguments(tiny_target, text, run)
    prepared = prepare(command_line(given).config, run)
    prepared.checkpoints.save(Snapshot(3, {}, {}), 0.0)
    before = '{"kind": "step", "step": 0, "loss": 5.0}\n'
    (run / "metrics.jsonl").write_text(before)

    def out_of_memory(*given: object) -> None:
        raise MemoryError

    monkeypatch.setattr("train.Training", out_of_memory)
    with pytest.raises(MemoryError):
        demo.main([*given, "--restart"])
    assert json.loads((run / "summary.json").read_text())["status"] == "failed"
    assert [step for step, _ in by_step(run / "checkpoints")] == [3]
    assert (run / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_the_process_ends_with_the_code_of_the_signal(
    tiny_target: Path, text: Path, tmp_path: Path, name: str, code: int
) -> None:
    program = """
    import os, runpy, signal, sys
    example, name = sys.argv.pop(1), sys.argv.pop(1)
    sys.path.insert(0, example)
    import run_folder
    write = run_folder.RunFolder.metric
    def metric(self, kind, **values):
        write(self, kind, **values)
        if kind == "stage":
            os.kill(os.getpid(), signal.Signals[name])
    run_folder.RunFolder.metric = metric
    runpy.run_path(os.path.join(example, "demo.py"), run_name="__main__")
    """
    given = [str(EXAMPLE), name, *arguments(tiny_target, text, tmp_path / "run")]
    result = run_forked(program, given, timeout=120)
    assert result.rc == code, result.stderr
    assert "interrupted" in result.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "interrupted"


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_second_signal_ends_the_process_at_once(
    tiny_target: Path, text: Path, tmp_path: Path, name: str, code: int
) -> None:
    program = """
    import os, signal, sys
    example, name = sys.argv.pop(1), sys.argv.pop(1)
    sys.path.insert(0, example)
    import demo
    def interrupt(*ignored):
        os.kill(os.getpid(), signal.SIGINT)
    def interrupt_again(*ignored):
        os.kill(os.getpid(), signal.Signals[name])
        print("went on")
    demo.Run.complete = interrupt
    demo.Run.end = interrupt_again
    demo.leave(demo.main(sys.argv[1:]))
    """
    given = [str(EXAMPLE), name, *arguments(tiny_target, text, tmp_path / "run")]
    result = run_forked(program, given, timeout=120)
    assert result.rc == code, result.stderr
    assert "ending; once more stops at once" in result.stderr
    assert result.stderr.endswith("stopped at once\n")
    assert result.stdout == ""
