"""Features on disk give the weights that features from the targets give, and only where they are of the same work."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the example's target is a transformers model")
pytest.importorskip("rich", reason="the example's display")
pytest.importorskip("matplotlib", reason="the example's plots")

import cache
import demo
import train
from checkpoints import Checkpoints, Snapshot
from command import command_line
from config import Config, ConfigError
from pipeline import WorkerError
from prepare import prepare
from target import Features, Target
from tests.dflash.small import SMALL, TEXT
from work import Work, fill, make_work

CPU = torch.device("cpu")
TAPS = (0, 2, 3)
OTHER_TEXT = TEXT.flip(0)
TOKEN_BYTES = 4 * 32 * 4


@pytest.fixture(scope="module")
def config(tiny_target: Path) -> Config:
    return replace(
        SMALL,
        target=tiny_target,
        taps=TAPS,
        uses=2,
        steps=6,
    )


@pytest.fixture(scope="module")
def targets(config: Config) -> list[Target]:
    return [Target(config.target, TAPS, CPU) for _ in range(2)]


@pytest.fixture(scope="module")
def made(config: Config, targets: list[Target], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a complete cache, not to be changed."""
    folder = tmp_path_factory.mktemp("cache") / "features"
    fill(config, TEXT, targets, cache.begin(folder, config, TEXT, TAPS, TOKEN_BYTES))
    return folder


def copied(made: Path, to: Path) -> Path:
    to.mkdir()
    for file in made.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def weights(training: train.Training) -> list[torch.Tensor]:
    training.run(lambda step, numbers: None)
    return [p.detach() for p in training.drafters[0].parameters()]


def test_what_is_read_is_what_the_target_made(config: Config, targets: list[Target], made: Path) -> None:
    stored = cache.open_complete(made, config, TEXT, TAPS)
    assert stored.works == cache.works_of(config) == 6
    for number in range(6):
        work = make_work(config, TEXT, targets[0], *divmod(number, 2))
        read = Work(*stored.read(number))
        assert read.tokens.dtype == work.tokens.dtype
        for one, other in (
            (work.tokens, read.tokens),
            (work.loss_mask, read.loss_mask),
            *zip(work.features, read.features, strict=True),
        ):
            assert torch.equal(one, other)
    assert torch.equal(stored.read(7).tokens, stored.read(1).tokens)


def test_bfloat16_comes_back_as_it_was(tmp_path: Path) -> None:
    store = cache.Cache(tmp_path, 1, {})
    features = Features(torch.randn(1, 3, 8).bfloat16(), torch.randn(1, 3, 4).bfloat16())
    store.write(0, torch.tensor([[1, 2, 3]]), torch.tensor([[False, True, True]]), features)
    read = store.read(0)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(features, read.features, strict=True))


def test_training_on_a_cache_gives_the_weights_of_training_with_targets(
    config: Config, targets: list[Target], made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = weights(train.Training(config, TEXT, targets))
    stored = cache.open_complete(made, config, TEXT, TAPS)
    monkeypatch.setattr(Target, "respond", None)
    monkeypatch.setattr(Target, "forward", None)
    training = train.Training(config, TEXT, targets[:1], cache=stored)
    assert all(map(torch.equal, weights(training), expected))
    assert set(training.monitor.threads) == {"reader-0", "reader-1", "drafter-0", "drafter-1"}
    longer = replace(config, steps=9, seed=5)
    again = train.Training(longer, TEXT, targets[:1], cache=cache.open_complete(made, longer, TEXT, TAPS))
    again.run(lambda step, numbers: None)
    assert len(again.losses) == 9


def test_making_goes_on_where_it_was_ended(
    config: Config, targets: list[Target], made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "features"
    begun = cache.begin(folder, config, TEXT, TAPS, TOKEN_BYTES)
    write, lock, left = cache.Cache.write, threading.Lock(), iter(range(3))

    def fails(self: cache.Cache, number: int, *work: Any) -> None:
        with lock:
            if next(left, None) is None:
                raise OSError("no space left")
        write(self, number, *work)

    with monkeypatch.context() as patch:
        patch.setattr(cache.Cache, "write", fails)
        with pytest.raises(WorkerError, match="no space left"):
            fill(config, TEXT, targets, begun)
    assert len(begun.missing()) == 3
    with pytest.raises(ConfigError, match=r"lacks 3 of its 6 .* --make-cache"):
        cache.open_complete(folder, config, TEXT, TAPS)
    there = {path: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
    fill(config, TEXT, targets, cache.begin(folder, config, TEXT, TAPS, TOKEN_BYTES))
    assert all(path.stat().st_mtime_ns == time for path, time in there.items())
    for path in made.iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes()


def test_a_cache_can_be_made_longer_but_not_shorter(config: Config, made: Path, tmp_path: Path) -> None:
    folder = copied(made, tmp_path / "features")
    longer = cache.begin(folder, replace(config, steps=8), TEXT, TAPS, TOKEN_BYTES)
    assert longer.missing() == [6, 7]
    assert cache.begin(folder, replace(config, steps=2), TEXT, TAPS, TOKEN_BYTES).works == 8


@pytest.mark.parametrize(
    "change",
    [
        {"answers": "data"},
        {"temperature": 1.0},
        {"prompt_length": 9},
        {"response_length": 9},
        {"sequences": 5},
        {"target_dtype": "bfloat16", "autocast": True},
    ],
)
def test_a_cache_of_other_work_is_refused(config: Config, made: Path, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"is of other work: {next(iter(change))} is .* there and .* here$"):
        cache.open_complete(made, replace(config, **change), TEXT, TAPS)


def test_a_cache_of_another_target_text_or_taps_is_refused(config: Config, made: Path, tmp_path: Path) -> None:
    other = tmp_path / "target"
    other.mkdir()
    for file in config.target.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    cache.open_complete(made, replace(config, target=other), TEXT, TAPS)  # a copy is the same target
    content = bytearray((other / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (other / "model.safetensors").write_bytes(content)
    for changed, text, taps, name in (
        (replace(config, target=other), TEXT, TAPS, "target"),
        (config, OTHER_TEXT, TAPS, "text or data"),
        (config, TEXT, (0, 2, 4), "taps"),
    ):
        with pytest.raises(ConfigError, match=f"is of other work: {name} is"):
            cache.open_complete(made, changed, text, taps)


@pytest.mark.parametrize("change", [{"seed": 1}, {"drafters": 3}])
def test_making_does_not_go_on_with_other_draws(config: Config, made: Path, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(change))} is"):
        cache.begin(made, replace(config, **change), TEXT, TAPS, TOKEN_BYTES)
    cache.open_complete(made, replace(config, **change), TEXT, TAPS)


def test_a_folder_that_cannot_be_used_is_refused(config: Config, made: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="holds no cache: make one"):
        cache.open_complete(tmp_path, config, TEXT, TAPS)
    with pytest.raises(ConfigError, match="is not empty and holds no cache"):
        cache.begin(tmp_path, config, TEXT, TAPS, TOKEN_BYTES)
    with pytest.raises(ConfigError, match="cannot be written"):
        cache.begin(tmp_path / "thesis.txt", config, TEXT, TAPS, TOKEN_BYTES)
    with pytest.raises(ConfigError, match="GB are free"):
        cache.begin(tmp_path / "new", config, TEXT, TAPS, 10**16)
    damaged = copied(made, tmp_path / "features")
    shard = damaged / "work-00000003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"work-00000003\.safetensors is damaged"):
        cache.open_complete(damaged, config, TEXT, TAPS)
    for content in ("{", "[]", json.dumps({"format": 9}), json.dumps({"format": 1})):
        (damaged / "index.json").write_text(content)
        with pytest.raises(ConfigError, match=r"index\.json cannot be read|has format 9"):
            cache.open_complete(damaged, config, TEXT, TAPS)


def test_the_size_foretold_is_that_of_the_files(config: Config, made: Path) -> None:
    sizes = [path.stat().st_size for path in made.glob("*.safetensors")]
    headers = 1000
    foretold = cache.size_of(config, TOKEN_BYTES)
    assert all(foretold <= size < foretold + headers for size in sizes)


def test_the_program_makes_a_cache_and_says_how_to_use_it(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "counting.txt").write_text(" ".join(str(i) for i in range(500)))
    monkeypatch.chdir(tmp_path)
    numbers = "--targets 2 --drafters 1 --layers 1 --sequences 2 --uses 2 --batch 2 --steps 4 --prompt-length 8 --response-length 8"
    given = f"--target {config.target} --text text --taps 0,2 --device cpu --eval-prompt-length 8 {numbers}".split()
    monkeypatch.setattr(demo, "Run", None)
    assert demo.main([*given, "--make-cache", "features"]) == 0
    assert "--cache features" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["features", "text"]
    assert len(list((tmp_path / "features").iterdir())) == 3
    assert demo.main([*given, "--cache", "features", "--taps", "0,3"]) == 2
    assert "taps is [0, 2] there and [0, 3] here" in capsys.readouterr().err
    assert demo.main([*given, "--cache", "absent"]) == 2
    assert "--make-cache absent" in capsys.readouterr().err
    command = command_line([*given, "--cache", "features"])
    prepared = prepare(command.config, command.run)
    assert prepared.cache is not None
    assert prepared.cache.works == 2
    assert prepared.checkpoints._contract["cache"] == {"works": 2, "seed": 0, "drafters": 1}


def test_a_run_goes_on_with_a_copy_of_its_cache_and_with_no_other(
    config: Config, targets: list[Target], made: Path, tmp_path: Path
) -> None:
    """Of the same target, text and options, all of which a run may share with caches of other draws."""
    stored = cache.open_complete(made, config, TEXT, TAPS)
    on_cache = replace(config, cache=made)
    Checkpoints(tmp_path / "saved", on_cache, TEXT, stored.drawn).save(Snapshot(3, {}, {}), 0.0)

    def resumed(folder: Path | None) -> int:
        here = replace(config, cache=folder)
        drawn = cache.open_complete(folder, here, TEXT, TAPS).drawn if folder else None
        checkpoint = Checkpoints(tmp_path / "saved", here, TEXT, drawn).resumable()
        assert checkpoint is not None
        return checkpoint.step

    assert resumed(made) == resumed(copied(made, tmp_path / "moved")) == 3
    others = {"seed": replace(config, seed=1), "works": replace(config, steps=8)}
    others["drafters"] = replace(config, drafters=3, steps=4)  # as many batches of work
    for name, drawn_otherwise in others.items():
        folder = tmp_path / name
        fill(drawn_otherwise, TEXT, targets, cache.begin(folder, drawn_otherwise, TEXT, TAPS, TOKEN_BYTES))
        with pytest.raises(ConfigError, match=rf"the cache was drawn by .*'{name}': \d.* there and by .* here: make"):
            resumed(folder)
    with pytest.raises(ConfigError, match=r"the cache was drawn by .* there and by None here"):
        resumed(None)


def test_what_killed_processes_left_is_removed_when_making_goes_on(config: Config, made: Path, tmp_path: Path) -> None:
    folder = copied(made, tmp_path / "features")
    whole = sorted(path.name for path in folder.iterdir())
    left = (".work-00000003.safetensors.17-18.new", ".index.json.17-18.new", ".tmpu7Ymdk")
    for name in left:
        (folder / name).write_bytes(b"half")
    cache.open_complete(folder, config, TEXT, TAPS)  # reads only
    with pytest.raises(ConfigError, match="seed is"):
        cache.begin(folder, replace(config, seed=1), TEXT, TAPS, TOKEN_BYTES)
    assert len(list(folder.iterdir())) == len(whole) + len(left)
    cache.begin(folder, config, TEXT, TAPS, TOKEN_BYTES)
    assert sorted(path.name for path in folder.iterdir()) == whole
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / ".index.json.17-18.new").write_text("{")
    assert len(cache.begin(tmp_path / "new", config, TEXT, TAPS, TOKEN_BYTES).missing()) == 6
