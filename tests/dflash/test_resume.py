"""N steps are k steps, a resume and N - k steps, bit for bit; what does not match is refused; a kill leaves what can be resumed."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("transformers", reason="the example's target is a transformers model")

import checkpoints
import optimizer
import train
from backend import BACKEND
from checkpoints import MODEL, OPTIMIZER, STATE, Checkpoints, Snapshot, by_step
from config import Config, ConfigError
from pipeline import WorkerError
from replica import Numbers, Report
from target import Target
from tests.dflash.conftest import EXAMPLE
from tests.dflash.small import SMALL, TEXT
from tests.helpers.subprocess_run import run_forked

CPU = torch.device("cpu")
STEPS, USES = 11, 4
CONFIG = replace(
    SMALL,
    drafters=3,
    uses=USES,
    steps=STEPS,
    warmup_ratio=0.5,
    queue_depth=1,
)


@pytest.fixture(scope="module")
def targets(tiny_target: Path) -> list[Target]:
    return [Target(tiny_target, (0, 2, 3), CPU) for _ in range(5)]


@pytest.fixture
def config(tiny_target: Path) -> Config:
    return replace(CONFIG, target=tiny_target)


def stop_after(steps: int) -> Report:
    """Return a report that ends training in the middle of all that the other threads do."""

    def report(step: int, numbers: Numbers) -> None:
        if step + 1 == steps:
            raise InterruptedError("enough")

    return report


def to_the_end(training: train.Training) -> train.Training:
    training.run(lambda step, numbers: None)
    return training


def bits(snapshot: Snapshot) -> dict[str, bytes]:
    return {name: t.numpy().tobytes() for part in (snapshot.weights, snapshot.optimizer) for name, t in part.items()}


def learning_rates(training: train.Training) -> list[list[float]]:
    return [
        [float(group["lr"]) for o in replica._optimizers._optimizers for group in o.param_groups]
        for replica in training.replicas
    ]


@pytest.fixture(scope="module")
def uninterrupted(targets: list[Target]) -> Callable[[optimizer.OptimizerName], train.Training]:
    """Return the whole training with an optimizer, made once, with one target thread."""
    made: dict[str, train.Training] = {}

    def get(name: optimizer.OptimizerName) -> train.Training:
        if name not in made:
            made[name] = to_the_end(train.Training(replace(CONFIG, optimizer=name, targets=1), TEXT, targets[:1]))
        return made[name]

    return get


@pytest.mark.parametrize(
    ("name", "stops"),
    [
        ("muon", (USES + 2,)),
        ("muon", (1, USES, USES + 1, 10)),
        ("muon", (STEPS,)),
        ("adamw", (1, USES, USES + 1, 10)),
    ],
)
def test_n_steps_are_k_steps_a_resume_and_the_others_bit_for_bit(
    targets: list[Target],
    config: Config,
    tmp_path: Path,
    uninterrupted: Callable[[optimizer.OptimizerName], train.Training],
    name: optimizer.OptimizerName,
    stops: tuple[int, ...],
) -> None:
    """Whether the work at hand has steps left or not, and whatever the number of target threads is after the resume."""
    config = replace(config, optimizer=name)
    training = train.Training(config, TEXT, targets[:2])
    losses: list[float] = []
    for number, step in enumerate(stops):
        with pytest.raises(WorkerError, match="enough"):
            training.run(stop_after(step))
        assert [replica.step for replica in training.replicas] == [step] * 3
        assert all(replica.whole for replica in training.replicas)
        losses += training.losses
        replica = training.at_rest()
        assert replica is not None
        Checkpoints(tmp_path, config, TEXT).save(replica.snapshot(), 0.0)

        config = replace(config, targets=5 - number)
        checkpoint = Checkpoints(tmp_path, config, TEXT).resumable()
        assert checkpoint is not None
        assert (checkpoint.step, checkpoint.notes) == (step, ())
        training = train.Training(config, TEXT, targets[: config.targets], checkpoint.snapshot())
    to_the_end(training)

    whole = uninterrupted(name)
    assert losses + training.losses == whole.losses
    assert learning_rates(training) == learning_rates(whole)
    assert learning_rates(training)[0][0] == pytest.approx(0.0, abs=1e-9)
    for replica, other in zip(training.replicas, whole.replicas, strict=True):
        assert replica.step == other.step == STEPS
        assert bits(replica.snapshot()) == bits(other.snapshot())


def test_a_replica_whose_update_failed_is_not_saved_and_the_others_finish_theirs(
    targets: list[Target],
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    uninterrupted: Callable[[optimizer.OptimizerName], train.Training],
) -> None:
    whole = uninterrupted("muon")
    step, calls = optimizer.Optimizers.step, itertools.count()

    def failing(self: optimizer.Optimizers) -> Tensor:
        if threading.current_thread().name == "drafter-0" and next(calls) == 3:
            raise ArithmeticError("injected")
        return step(self)

    training = train.Training(config, TEXT, targets[:2])
    with monkeypatch.context() as patched:
        patched.setattr(optimizer.Optimizers, "step", failing)
        with pytest.raises(WorkerError, match="injected"):
            training.run(lambda step, numbers: None)
    assert [(replica.step, replica.whole) for replica in training.replicas] == [(3, False), (4, True), (4, True)]
    replica = training.at_rest()
    assert replica is training.replicas[1]
    resumed = to_the_end(train.Training(config, TEXT, targets[:2], replica.snapshot()))
    assert bits(resumed.replicas[0].snapshot()) == bits(whole.replicas[0].snapshot())


def forgets_weights(snapshot: Snapshot) -> Snapshot:
    name, weight = next(iter(snapshot.weights.items()))
    return snapshot._replace(weights={**snapshot.weights, name: weight + 1e-6})


def forgets_optimizer(snapshot: Snapshot) -> Snapshot:
    return snapshot._replace(optimizer={name: torch.zeros_like(t) for name, t in snapshot.optimizer.items()})


def forgets_position(snapshot: Snapshot) -> Snapshot:
    return snapshot._replace(step=snapshot.step - 1)


@pytest.mark.parametrize("forget", [forgets_weights, forgets_optimizer, forgets_position])
def test_the_comparison_sees_what_is_not_restored(
    targets: list[Target],
    config: Config,
    uninterrupted: Callable[[optimizer.OptimizerName], train.Training],
    forget: Callable[[Snapshot], Snapshot],
) -> None:
    training = train.Training(config, TEXT, targets[:2])
    with pytest.raises(WorkerError, match="enough"):
        training.run(stop_after(6))
    resumed = to_the_end(train.Training(config, TEXT, targets[:2], forget(training.replicas[0].snapshot())))
    assert resumed.step == STEPS
    assert bits(resumed.replicas[0].snapshot()) != bits(uninterrupted("muon").replicas[0].snapshot())


SNAPSHOT = Snapshot(6, {"fc.weight": torch.arange(6.0).view(2, 3)}, {"0.0.momentum": torch.ones(2, 3)})


def save(folder: Path, config: Config, *steps: int, text: Tensor = TEXT) -> Checkpoints:
    saved = Checkpoints(folder, config, text)
    for step in steps:
        saved.save(SNAPSHOT._replace(step=step), 1.5)
    return saved


def test_the_two_newest_checkpoints_stay_and_the_newest_is_resumed(config: Config, tmp_path: Path) -> None:
    saved = save(tmp_path / "a", config, 9, 99, 999_999, 1_000_000)
    assert [step for step, _ in by_step(tmp_path / "a")] == [999_999, 1_000_000]
    checkpoint = saved.resumable()
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.seconds) == (1_000_000, 1.5)
    assert bits(checkpoint.snapshot()) == bits(SNAPSHOT)
    assert {p.name for p in checkpoint.path.iterdir()} == {MODEL, OPTIMIZER, STATE}
    assert Checkpoints(tmp_path / "none", config, TEXT).resumable() is None


CHANGES: dict[str, Any] = {
    "seed": 1,
    "drafters": 2,
    "layers": 2,
    "block_size": 2,
    "taps": (0, 1),
    "prompt_length": 16,
    "response_length": 16,
    "temperature": 0.5,
    "sequences": 8,
    "uses": 5,
    "batch": 1,
    "anchors": 8,
    "gamma": 7.0,
    "position_weights": "dpace",
    "dpace_alpha": 0.25,
    "kl_weight": 0.0,
    "chunk_blocks": 4,
    "gradient": "in_forward",
    "steps": 12,
    "optimizer": "adamw",
    "lr": 0.1,
    "muon_lr": 0.1,
    "warmup_ratio": 0.1,
    "clip": 2.0,
    "autocast": True,
    "target_dtype": "bfloat16",
    "answers": "data",
    "packing": True,
    "thinking": "off",
    "draft_heads": 2,
    "draft_kv_heads": 1,
    "draft_head_dim": 4,
    "draft_intermediate_size": 16,
    "layer_types": ("sliding_attention",),
    "sliding_window": 16,
    "mask_token_id": 2,
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_value_of_an_option_that_changes_the_weights_is_refused(
    config: Config, tmp_path: Path, name: str
) -> None:
    save(tmp_path, config, 6)
    other = replace(config, **{name: CHANGES[name]})
    with pytest.raises(
        ConfigError, match=rf"step-000006 cannot be resumed like this: {name} is .* there and .* here: make"
    ):
        Checkpoints(tmp_path, other, TEXT).resumable()


def test_every_option_either_may_change_or_is_in_the_contract(config: Config, tmp_path: Path) -> None:
    assert CHANGES.keys() | checkpoints.NOT_IN_CONTRACT == config.as_json().keys()
    save(tmp_path, config, 6)
    shutil.copytree(config.target, tmp_path / "moved target")
    free: dict[str, Any] = {
        "device": "cpu,cpu",
        "attention": "dense",
        "compile_target": True,
        "targets": 1,
        "queue_depth": 7,
        "save_every": 7,
        "node_timeout": 7.0,
        "collective_timeout": 7.0,
        "metrics": ("tensorboard",),
        "trust_remote_code": True,
        "target": tmp_path / "moved target",
        "text": tmp_path,
        "data": tmp_path / "chats.jsonl",
        "cache": tmp_path / "features",
        "tau": 1.0,
        "eval_every": 3,
        "eval_prompts": 1,
        "eval_prompt_length": 1,
        "eval_new_tokens": 1,
    }
    assert free.keys() == checkpoints.NOT_IN_CONTRACT
    checkpoint = Checkpoints(tmp_path, replace(config, **free), TEXT).resumable()
    assert checkpoint is not None
    for name, note in zip(("attention", "compile_target"), checkpoint.notes, strict=True):
        assert f"was made with {name} " in note


def test_another_target_or_text_in_the_same_place_is_refused(config: Config, tmp_path: Path) -> None:
    place = tmp_path / "target"
    shutil.copytree(config.target, place)
    config = replace(config, target=place)
    save(tmp_path / "saved", config, 6)
    other = TEXT.clone()
    other[1000] += 1
    with pytest.raises(ConfigError, match="the text is another one"):
        Checkpoints(tmp_path / "saved", config, other).resumable()
    weights = bytearray((place / "model.safetensors").read_bytes())
    weights[-1000] ^= 1  # the same header and size: a fine-tune
    (place / "model.safetensors").write_bytes(weights)
    with pytest.raises(ConfigError, match="the target is another one"):
        Checkpoints(tmp_path / "saved", config, TEXT).resumable()


def test_a_large_target_is_known_by_samples_of_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    content = torch.arange(2**21, dtype=torch.int32).numpy().tobytes()
    found = set()
    for changed in (None, 0, len(content) - 1, range(0, len(content), 2**16)):
        weights = bytearray(content)
        for place in changed if isinstance(changed, range) else () if changed is None else (changed,):
            weights[place] ^= 1
        (tmp_path / "model.safetensors").write_bytes(weights)
        found.add(checkpoints.target_fingerprint(tmp_path))
    assert len(found) == 4


def test_other_versions_are_a_note_and_no_refusal(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, config, 6)
    monkeypatch.setattr(checkpoints, "BACKEND", "another")
    checkpoint = Checkpoints(tmp_path, config, TEXT).resumable()
    assert checkpoint is not None
    (note,) = checkpoint.notes
    assert f"made with backend {BACKEND}, and this is another" in note
    assert "not bit for bit" in note


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def of_another_step(path: Path) -> None:
    other = path.parent.parent / "step-000003" / path.name
    shutil.copy(other, path)


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER, STATE])
@pytest.mark.parametrize("damage", [cut_off, Path.unlink, of_another_step], ids=lambda d: d.__name__)
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(
    config: Config, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    saved = save(tmp_path, config, 3, 6)
    damage(tmp_path / "step-000006" / name)
    checkpoint = saved.resumable()
    assert checkpoint is not None
    assert checkpoint.step == 3
    (note,) = checkpoint.notes
    assert "step-000006 cannot be read, an older one is looked for" in note
    saved.begin(checkpoint)  # the damaged one must not count as one of the two that stay
    assert (tmp_path / "unreadable-step-000006" / STATE).exists() or (name, damage) == (STATE, Path.unlink)
    saved.save(SNAPSHOT, 1.5)
    assert [step for step, _ in by_step(tmp_path)] == [3, 6]
    newest = saved.resumable()
    assert newest is not None
    assert (newest.step, newest.notes) == (6, ())


def test_it_is_an_error_if_no_checkpoint_can_be_read(config: Config, tmp_path: Path) -> None:
    saved = save(tmp_path, config, 3, 6)
    for step in (3, 6):
        cut_off(tmp_path / f"step-00000{step}" / MODEL)
    with pytest.raises(ConfigError, match=r"step-000006 cannot be read.*begin again with --restart"):
        saved.resumable()
    assert [step for step, _ in by_step(tmp_path)] == [3, 6]


@pytest.mark.parametrize("call", range(10))
def test_a_save_that_fails_anywhere_leaves_the_checkpoint_before_and_can_be_made_again(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    saved = save(tmp_path, config, 3)
    calls = 0

    def failing(original: Callable[..., Any]) -> Callable[..., Any]:
        def work(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call + 1:
                raise OSError("No space left on device")
            return original(*args)

        return work

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "save_file", failing(save_file))
        patched.setattr(os, "fsync", failing(os.fsync))
        patched.setattr(Path, "write_text", failing(Path.write_text))
        patched.setattr(Path, "rename", failing(Path.rename))
        if call < 9:
            with pytest.raises(OSError, match="No space"):
                saved.save(SNAPSHOT, 1.5)
        else:
            saved.save(SNAPSHOT, 1.5)
            assert calls == 9
    checkpoint = saved.resumable()
    assert checkpoint is not None
    assert checkpoint.step == (3 if call < 8 else 6)
    assert checkpoint.notes == ()
    saved.save(SNAPSHOT, 1.5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000003", "step-000006"]
    assert load_file(tmp_path / "step-000006" / MODEL)["fc.weight"].tolist() == SNAPSHOT.weights["fc.weight"].tolist()


KILLED_SAVES = """
import itertools, os, shutil, signal, sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
folder = Path(sys.argv[2])
import torch
import checkpoints
from config import Config

saved = checkpoints.Checkpoints(folder, Config(), torch.zeros(4))
snapshot = checkpoints.Snapshot(0, {"fc.weight": torch.ones(9, 9)}, {"0.0.momentum": torch.ones(9, 9)})

def killing(original, path_of=None):
    def work(*args, **kwargs):
        if next(calls) != last:
            return original(*args, **kwargs)
        if path_of:  # in the middle of a file
            original(*args, **kwargs)
            os.truncate(path_of(*args), path_of(*args).stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)
    return work

for last in itertools.count():
    shutil.rmtree(folder, ignore_errors=True)
    for step in (3, 6):
        saved.save(snapshot._replace(step=step), 0.0)
    process = os.fork()
    if process == 0:
        calls = itertools.count()
        checkpoints.save_file = killing(checkpoints.save_file, lambda tensors, path, metadata: path)
        Path.write_text = killing(Path.write_text, lambda path, text: path)
        for owner, name in ((Path, "mkdir"), (Path, "rename"), (os, "fsync"), (os, "unlink"), (os, "rmdir")):
            setattr(owner, name, killing(getattr(owner, name)))
        saved.save(snapshot._replace(step=9), 0.0)
        os._exit(0)
    _, status = os.waitpid(process, 0)
    checkpoint = saved.resumable()
    assert checkpoint.notes == (), (last, checkpoint.notes)
    print(checkpoint.step)
    if not os.WIFSIGNALED(status):
        break
"""


def test_a_process_killed_at_any_point_of_a_save_leaves_the_new_checkpoint_whole_or_not_there(tmp_path: Path) -> None:
    result = run_forked(KILLED_SAVES, [str(EXAMPLE), str(tmp_path / "checkpoints")]).check()
    steps = [int(line) for line in result.stdout.split()]
    assert steps == sorted(steps)
    assert steps.count(6) >= 9  # folder, three files, syncs, and the rename
    assert steps.count(9) >= 5  # the last sync, and what is dropped of the oldest


def test_what_a_killed_process_left_is_removed_when_a_run_goes_on(config: Config, tmp_path: Path) -> None:
    saved = save(tmp_path, config, 3)
    (tmp_path / ".step-000006.12345.new").mkdir()
    (tmp_path / ".step-000006.12345.new" / MODEL).write_bytes(b"half")
    checkpoint = saved.resumable()
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.notes) == (3, ())
    saved.begin(checkpoint)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000003"]


def test_a_checkpoint_says_what_it_is(config: Config, tmp_path: Path) -> None:
    save(tmp_path, config, 6)
    state = json.loads((tmp_path / "step-000006" / STATE).read_text())
    assert (state["step"], state["item"], state["seconds"]) == (6, 1, 1.5)
    assert state["contract"]["options"]["lr"] == CONFIG.lr
    assert state["environment"]["torch"] == torch.__version__


KILLS = """
import torch
torch._dynamo.config.disable = True  # compiles are most of so short a run, and are not what is killed here
from tests.dflash.kill_and_resume import main
main(["--kills", "2", "--steps", "12"])
"""


def test_runs_killed_at_random_moments_go_on_as_if_nothing_had_been() -> None:
    for package in ("rich", "matplotlib"):
        pytest.importorskip(package, reason="the whole program is run")
    result = run_forked(KILLS, timeout=120).check()
    assert "2 kills" in result.stdout.splitlines()[-1]
