"""The benchmark of a GPU for each thread, in the same layout on logical devices of the CPU and at tiny sizes."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("rich", reason="the example's display")
pytest.importorskip("transformers", reason="the example's target is a transformers model")

from benchmarks import dflash_devices, dflash_layouts
from benchmarks.dflash_shared import Compiles, NotingCrew, Outcome
from benchmarks.dflash_step import EIGHT_B, VOCABULARY
from drafter import drafter_shape
from pipeline import WorkerError
from target import shape_of

TINY = ["--devices=cpu", "--steps=4", "--warm-up=1", "--calls=20"]


def results(folder: Path, *arguments: str) -> dict[str, Any]:
    file = folder / "results.json"
    dflash_devices.main([*TINY, f"--json={file}", *arguments])
    written: dict[str, Any] = json.loads(file.read_text())
    return written


def part_of(folder: Path, *arguments: str) -> dflash_devices.Part:
    return dflash_devices.parts_of(dflash_devices.parser_of_options().parse_args(arguments), str(folder))[0]


@pytest.mark.hang_timeout(200)  # stock torch may hang
@pytest.mark.parametrize(("kind", "targets", "drafters"), [("train", 5, 3), ("stock", 1, 1)])
def test_a_training_with_a_device_for_each_thread_is_measured(
    kind: str, targets: int, drafters: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = [f"--targets={targets}", f"--drafters={drafters}", f"--drafters-scaling={drafters}"]
    written = results(tmp_path, f"--only={kind}", *layout)
    (part,) = written["parts"]
    assert written["torch"] == torch.__version__
    assert written["failed"] == written["left_out"] == {}
    threads = [f"target-{i}" for i in range(targets)] + [f"drafter-{i}" for i in range(drafters)]
    assert part["devices"]["cpu"]["threads"] == list(part["times"]) == list(part["seconds_of_threads"]) == threads
    assert part["devices"]["cpu"].keys() == {"threads", "busy", "memory", "peak_resident"}
    assert part["exit"] == 0
    assert part["part"] in capsys.readouterr().out
    assert all(len(depths) == 1 + drafters for depths in part["queue_depth"])
    assert len(part["queue_depth"]) > 1
    assert part["seconds_to_load"] > 0
    assert part.keys() >= {"failed_compiles", "without_peer_access", "options", "seconds", "compiled", "started"}
    assert len(part["tokens_per_second_of_each_drafter"]) == len(part["seconds_to_first_step"]) == drafters
    if kind == "train":
        assert part["errors"] == {}
        assert part["failed_threads"] == 0
        assert not part["stopped"]
        assert part["steps"] == len(part["losses"]) == 4
        assert part["replicas_differ_by"] == 0
        assert part["once_per_device"]
        assert part["graphs"]["drafter.forward"] == part["graphs"]["loss.chunk_loss"] == {"cpu": 1}
        assert part["handed_over"] == {"cpu to cpu": 2 * 4 * 3}
        assert all(seconds > 0 for seconds in part["seconds_to_first_step"])
        assert part["tokens_per_second"] == pytest.approx(sum(part["tokens_per_second_of_each_drafter"]))
    else:  # who fails is a matter of luck
        assert part["failed_threads"] == len(part["errors"])
        assert part["compiled"] == 0, "the library has no part in it"
        assert "drafter.forward" in part["graphs"]


def test_calls_of_eight_threads_are_compared_with_eager(tmp_path: Path) -> None:
    (part,) = results(tmp_path, "--only=calls")["parts"]
    assert (part["calls"], part["wrong"], part["errors"]) == (8 * 20, 0, {})
    assert part["graphs"] == {"cuda_graphs.function": {"cpu": 1}}
    assert part["once_per_device"]
    assert all(seconds > 0 for seconds in part["seconds_of_calls"])


def ended(command: Sequence[str], output: Path, limit: float, gpus: Sequence[int]) -> Outcome:
    """Be a process in which training fails in one way or another, and calls do not."""
    part = dflash_devices.Part(**json.loads(command[-1].removeprefix("--part=")))
    assert limit <= 150 or part.kind == "train"
    if part.kind == "calls":
        known = {"calls": 160, "calls_of_threads": [20] * 8, "wrong": 0, "graphs": {}, "once_per_device": False}
        part.result.write_text(json.dumps(known))
        return Outcome(0.0, 0, "", {})
    return Outcome(0.0, None if part.kind == "stock" else 1, "...\nRuntimeError: no memory\n", {})


def test_a_part_that_fails_is_named_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dflash_devices, "in_a_process", ended)
    written = results(tmp_path)
    assert [part["part"] for part in written["parts"]] == ["train-3", "stock", "calls", "train-2", "train-1"]
    trained = dict.fromkeys(("train-3", "train-2", "train-1"), "exit status 1: RuntimeError: no memory")
    assert written["failed"] == trained | {"stock": "no end within 150 s"}
    assert "no memory" in written["parts"][0]["output"]
    assert written["parts"][2]["calls"] == 160


def test_a_part_that_no_longer_fits_is_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dflash_devices, "in_a_process", ended)
    written = results(tmp_path, "--limit=50")
    assert [part["part"] for part in written["parts"]] == ["calls"]
    assert written["left_out"].keys() == {"train-3", "stock", "train-2", "train-1"}
    assert "train-1: left out, it takes 75 s at least" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--devices=cuda:77"], "'cuda:77' does not exist"),
        (["--devices=cpu", "--drafters=0"], "at least 1 of each"),
        (["--devices=cpu", "--drafters-scaling", "1", "4"], "to 4, but drafters are 3"),
        (["--devices=cpu", "--steps=20"], "warm_up is 30"),
        (["--devices=cpu", "--calls=0"], "calls are 0"),
        (["--devices=cpu", "--anchors=5"], "must divide anchors"),
        (["--devices=cpu", "--target-layers=5"], "5 layers"),
    ],
)
def test_options_that_cannot_work_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        dflash_devices.main(arguments)
    said = capsys.readouterr().err
    assert refused.value.code == 2
    assert words in said
    assert said.count("\n") == 1


def test_fewer_gpus_than_threads_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit):
        dflash_devices.main([])
    assert "8 threads is more than the 2" in capsys.readouterr().err


def test_threads_get_the_devices_of_the_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    eight = part_of(tmp_path)
    assert list(eight.threads.values()) == [f"cuda:{index}" for index in range(8)]
    two = part_of(tmp_path, "--targets=1", "--drafters=1")
    assert two.threads == {"target-0": "cuda:0", "drafter-0": "cuda:1"}
    fewer = part_of(tmp_path, "--drafters-scaling=1")
    assert str(fewer) == "train-1"
    assert fewer.threads["drafter-0"] == "cuda:5"


def test_the_sizes_are_those_of_the_paper_s_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    part = part_of(tmp_path)
    config = part.target_config()
    assert drafter_shape(part.config, shape_of(config), EIGHT_B.taps) == EIGHT_B
    assert config.vocab_size == VOCABULARY
    assert (part.config.length, part.config.anchors, part.config.block_size) == (3072, 512, 16)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert 3e9 < sum(p.numel() for p in model.parameters()) < 5e9


@pytest.mark.parametrize("patience", [0.0, 0.5])
def test_a_crew_notes_the_errors_of_threads_that_go_on(patience: float) -> None:
    over, noted = threading.Event(), dict[str, str]()
    crew = NotingCrew([over.set], note=lambda name, error: noted.update({name: str(error)}), patience=patience)

    def fail_late(name: str) -> None:
        if not over.wait(0.2):
            raise ValueError(name)

    def fail() -> None:
        raise ValueError("first")

    crew.start("first", fail)
    crew.start("second", lambda: fail_late("second"))
    with pytest.raises(WorkerError, match="first"):
        crew.join()
    assert noted == ({"first": "first", "second": "second"} if patience else {"first": "first"})
    assert crew.running() == []


def test_a_crew_that_is_stopped_waits_for_no_thread_that_hangs() -> None:
    over, let_go = threading.Event(), threading.Event()
    crew = NotingCrew([over.set], note=lambda name, error: None)

    def hang() -> None:
        let_go.wait()

    crew.start("hangs", hang)
    crew.wait(crew.stop_all)
    assert over.is_set()
    assert crew.running() == ["hangs"]
    let_go.set()


def test_compiles_are_counted_by_the_device_of_their_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._dynamo.utils._compilation_metrics", None)
    compiles = Compiles()

    def add(fail_type: str | None) -> None:
        found = {"graph_node_count": 3, "fail_type": fail_type, "co_filename": "/a/loss.py", "co_name": "chunk_loss"}
        compiles.append(SimpleNamespace(**found))

    for name, fail_type in (("a", None), ("b", None), ("b", None), ("b", "TypeError")):
        thread = threading.Thread(target=add, args=(fail_type,), name=name)
        thread.start()
        thread.join()
    assert compiles.by_device({"a": "cuda:0", "b": "cuda:1"}) == {"loss.chunk_loss": {"cuda:0": 1, "cuda:1": 2}}
    assert compiles.failures() == {"loss.chunk_loss": 1}


def test_the_layout_of_processes_ends_within_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Process:
        def __init__(self, **options: Any) -> None:
            pass

        def start(self) -> None:
            pass

        def join(self, timeout: float) -> None:
            assert timeout <= 15

        def is_alive(self) -> bool:
            return False

    context = SimpleNamespace(Queue=queue.Queue, Barrier=threading.Barrier, Event=threading.Event, Process=Process)
    monkeypatch.setattr("torch.multiprocessing.get_context", lambda method: context)
    measured = dflash_layouts.Measured(1, tmp_path / "result.json")
    part = part_of(tmp_path, *TINY)
    dflash_layouts.processes(part.config, measured, limit=0.1)
    assert measured.errors == [("processes", "TimeoutError: 0 of 3 drafters have ended in time")]
