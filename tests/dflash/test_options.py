"""Options from the defaults, a configuration file and the command line; what is wrong in a file names the file and the key."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich", reason="the example's display")
pytest.importorskip("matplotlib", reason="the example's plots")
pytest.importorskip("transformers", reason="the example's target is a transformers model")

import options
from command import Parser, command_line
from config import TYPES, Config, ConfigError, choices_of
from drafter import drafter_shape
from target import TargetShape


def config(*arguments: str) -> Config:
    return command_line(list(arguments)).config


def refusal(path: Path, content: str) -> str:
    """Return what is said about a file, a sentence that begins with its name."""
    path.write_text(content)
    with pytest.raises(ConfigError) as error:
        config("--config", str(path))
    said = str(error.value)
    assert said.startswith(f"{path}")
    assert "\n" not in said
    return said


def test_no_arguments_are_the_demo_and_its_file_says_every_default() -> None:
    assert config() == config("--config", "demo") == Config()
    left_out = TYPES.keys() - options.read(options.find("demo")).keys()
    text = options.find("demo").read_text()
    assert all(getattr(Config, name) is None or name in ("target", "taps") for name in left_out)
    assert all(name in text for name in left_out)


def test_every_option_is_explained() -> None:
    assert all(option.metadata["help"] for option in fields(Config))


@pytest.mark.parametrize("name", options.bundled())
def test_a_bundled_file_can_work(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    target = () if name in ("demo", "paper-tiny") else ("--target", str(tmp_path))
    config("--config", name, *target, "--device", "cpu").validate()
    config("--config", name, *target).validate(planned=True)
    assert command_line(["--config", name]).run == Path("runs") / f"dflash-{name}"


def test_the_published_sizes_are_those_of_the_files() -> None:
    four, eight, large = (config("--config", name) for name in ("qwen3-4b", "qwen3-8b", "qwen3.6-27b"))
    assert replace(four, target=eight.target) == eight
    assert (eight.layers, eight.block_size, eight.anchors, eight.gamma, eight.lr) == (5, 16, 512, 7.0, 6e-4)
    assert (eight.taps, eight.mask_token_id, eight.length) == ((1, 9, 17, 25, 33), 151669, 3072)
    assert (large.taps, large.mask_token_id, large.length) == ((1, 16, 31, 46, 61), 248070, 4096)
    assert large.layer_types == ("sliding_attention",) * 4 + ("full_attention",)
    target = TargetShape(5120, 17408, 64, 24, 4, 256, 1e7, 1e-6, 0.02)
    shape = drafter_shape(large, target, 5)
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate_size) == (32, 8, 128, 17408)
    shape = drafter_shape(eight, target, 5)
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (24, 4, 256)


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('steps = 7\nlr = 1\ntext = "books"\ntrust_remote_code = true\n')
    assert config("--config", str(file)) == replace(
        Config(), steps=7, lr=1.0, text=Path("books"), trust_remote_code=True
    )
    changed = config("--config", str(file), "--steps", "8", "--text", "none", "--no-trust-remote-code")
    assert changed == replace(Config(), steps=8, lr=1.0)


@pytest.mark.parametrize("name", TYPES)
def test_every_option_can_be_given_in_a_file_and_on_the_command_line(name: str, tmp_path: Path) -> None:
    cases: dict[str, tuple[str, list[str], Any]] = {
        "bool": ("true", [], True),
        "int": ("3", ["3"], 3),
        "int | None": ("3", ["3"], 3),
        "float": ("0.5", ["0.5"], 0.5),
        "str": ('"cpu"', ["cpu"], "cpu"),
        "Path": ('"a/b"', ["a/b"], Path("a/b")),
        "Path | None": ('"a/b"', ["a/b"], Path("a/b")),
        "tuple[int, ...] | None": ("[4, 2]", ["4,2"], (4, 2)),
        "tuple[str, ...]": ('["tensorboard", "a.b:c"]', ["tensorboard,a.b:c"], ("tensorboard", "a.b:c")),
        "tuple[str, ...] | None": ('["sliding_attention"]', ["sliding_attention"], ("sliding_attention",)),
    }
    kind = Config.__annotations__[name]
    if kind not in cases:
        word = choices_of(name)[-1]
        cases[kind] = (f'"{word}"', [word], word)
    written, typed, value = ("1.5", ["1.5"], 1.5) if name == "tau" else cases[kind]
    (tmp_path / "a.toml").write_text(f"{name} = {written}")
    assert options.read(tmp_path / "a.toml") == {name: value}
    parser = Parser()
    options.add_to(parser)
    assert vars(parser.parse_args([f"--{name.replace('_', '-')}", *typed])) == {name: value}


def test_another_target_has_the_papers_taps_unless_they_are_named(tmp_path: Path) -> None:
    assert config("--target", "x").taps is None
    assert config("--target", "x", "--taps", "1,2").taps == (1, 2)
    assert config("--taps", "paper").taps is None
    assert config("--config", "qwen3-8b", "--target", "x").taps == (1, 9, 17, 25, 33)
    (tmp_path / "a.toml").write_text('target = "x"')
    assert config("--config", str(tmp_path / "a.toml")).taps is None
    (tmp_path / "a.toml").write_text('taps = "paper"')
    assert config("--config", str(tmp_path / "a.toml")).taps is None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("steps = ", "cannot be read as TOML"),
        ("step = 3", "there is no option 'step', did you mean 'steps'?"),
        ("[optimizer]\nlr = 1", "optimizer is {'lr': 1}, it must be a string"),
        ("[training]\nlr = 1", "there is no option 'training'"),
        ("steps = 3.0", "steps is 3.0, it must be a whole number"),
        ("steps = true", "steps is True, it must be a whole number"),
        ('lr = "fast"', "lr is 'fast', it must be a number"),
        ("autocast = 1", "autocast is 1, it must be true or false"),
        ("target = 1", "target is 1, it must be a path"),
        ("draft_heads = []", "draft_heads is [], it must be a whole number, or 'none'"),
        ("taps = 3", "taps is 3, it must be a list, each element a whole number, or 'paper'"),
        ("taps = [0.5]", "taps is [0.5], it must be a list, each element a whole number, or 'paper'"),
        ("taps = [3, 3]", "taps are (3, 3)"),
        ("steps = 0", "steps is 0, it must be at least 1"),
        ("lr = nan", "lr is nan, it must be a finite number"),
        ("warmup_ratio = 1", "warmup_ratio is 1.0, it must be below 1"),
        ('optimizer = "sgd"', "optimizer is 'sgd': use 'adamw' or 'muon'"),
        ('layer_types = ["causal", "causal"]', "layer_types is 'causal': use 'full_attention' or 'sliding_attention'"),
        ("batch = 17", "batch is 17, but one batch of work holds only 16"),
    ],
)
def test_what_is_wrong_in_a_file_is_refused(content: str, says: str, tmp_path: Path) -> None:
    assert says in refusal(tmp_path / "mine.toml", content)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"a\.toml cannot be read as TOML"):
        config("--config", str(tmp_path / "a.toml"))
