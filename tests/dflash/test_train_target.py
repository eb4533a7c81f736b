"""The program that trains targets: the bundled one's recipe stays as it is, and a larger one can be used like any target."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the example's target is a transformers model")
pytest.importorskip("rich", reason="the example's display")
pytest.importorskip("matplotlib", reason="the example's plots")

from transformers import Qwen3ForCausalLM

import data
import optimizer
import train_target
from command import command_line
from config import BUNDLED_TARGET, ConfigError
from estimate import estimate
from speculative import greedy
from target import Target
from train_target import PRESETS, Recipe, architecture, held_out_loss, loss_of, train

CPU = torch.device("cpu")
TEXT = " ".join(str(number) for number in range(3000)).encode()
CORPUS = data.Corpus(TEXT[:12000], TEXT[12000:])
TINY = Recipe(
    layers=5,
    width=32,
    intermediate=48,
    heads=4,
    kv_heads=2,
    head_dim=8,
    sequence=16,
    batch=2,
    steps=6,
    saved_dtype="float32",
)
SIZES = [
    "--layers",
    "8",
    "--width",
    "32",
    "--intermediate",
    "48",
    "--heads",
    "4",
    "--head-dim",
    "8",
    "--sequence",
    "16",
]


def weights(model: Qwen3ForCausalLM) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_the_defaults_are_what_the_bundled_target_came_from() -> None:
    written = json.loads((BUNDLED_TARGET / "config.json").read_text())
    made = architecture(PRESETS["bundled"]).to_dict()
    of_the_saved = {"architectures", "dtype", "transformers_version"}
    same = (written.keys() & made.keys()) - of_the_saved
    assert len(same) > 15
    assert {key: made[key] for key in same} == {key: written[key] for key in same}
    assert train_target.command_line([]) == (Recipe(), BUNDLED_TARGET)
    assert json.loads((BUNDLED_TARGET / "training.json").read_text())["steps"] == Recipe().steps


def test_the_recipe_of_the_bundled_target_gives_the_same_bits_as_ever() -> None:
    """The loop is the one that the bundled target came from, at another size."""
    recipe = replace(TINY, sequence=24, batch=3, steps=5)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(architecture(recipe))
    steps = optimizer.build(model, "muon", lr=3e-3, muon_lr=2e-2, steps=5, warmup_ratio=0.04, clip=1.0)
    rng, text = data.generator("target", "train"), data.encode(CORPUS.train)
    for _ in range(5):
        tokens = torch.stack([data.window(text, 25, rng) for _ in range(3)])
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        steps.step()
    found = train(recipe, CPU, CORPUS)
    assert all(map(torch.equal, weights(found.model), weights(model)))


def test_windows_at_once_are_those_of_one_after_the_other() -> None:
    text = torch.arange(1000, dtype=torch.int32)
    together = data.windows(text, 7, 40, data.generator("a"))
    rng = data.generator("a")
    assert torch.equal(together, torch.stack([data.window(text, 7, rng) for _ in range(40)]))


def test_the_loss_is_that_of_the_model_as_it_is_used_and_compiles_to_one_graph() -> None:
    model = Qwen3ForCausalLM(architecture(TINY))
    tokens = torch.randint(2, 258, (2, 17), generator=torch.Generator().manual_seed(0))
    logits = model(input_ids=tokens[:, :-1]).logits  # with the mask that transformers makes
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(loss_of(model, tokens), expected)
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(loss_of, backend=backend, dynamic=False)
    torch.testing.assert_close(compiled(model, tokens), expected)
    attention = [node for node in graphs[0].graph.nodes if "scaled_dot_product" in str(node.target)]
    assert len(graphs) == 1
    assert [(node.kwargs["attn_mask"], node.kwargs["is_causal"]) for node in attention] == [(None, True)] * 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_with_a_compiled_loss_goes_the_same_way(dtype: train_target.Precision) -> None:
    losses = []
    for compiled in (False, True):
        lines: list[str] = []
        found = train(replace(TINY, dtype=dtype, compiled=compiled), CPU, CORPUS, lines.append)
        losses.append([*(float(line.split()[3]) for line in lines), found.training["held_out_loss_nats_per_byte"]])
    assert losses[1] == pytest.approx(losses[0], abs=0.02)
    assert losses[0][1] < losses[0][0] - 0.1


def test_time_ends_the_training_and_moves_the_learning_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is a second later. The first step looks when it is over, for its line, and for what is done; others once."""
    clock = itertools.count()
    monkeypatch.setattr("train_target.time.monotonic", lambda: float(next(clock)))
    places: list[int] = []
    move_to = optimizer.Optimizers.move_to

    def spy(self: optimizer.Optimizers, step: int) -> None:
        move_to(self, step)
        places.append(step)

    monkeypatch.setattr(optimizer.Optimizers, "move_to", spy)
    found = train(replace(TINY, steps=None, minutes=10 / 60), CPU, CORPUS)
    assert places == [0, *range(2000, 10000, 1000)]
    assert found.training["steps"] == len(places)


def test_the_weights_with_the_least_held_out_loss_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[torch.Tensor]] = []
    losses: Iterator[float] = iter([3.0, 2.0, 2.5, 2.0])

    def judge(model: Qwen3ForCausalLM, text: torch.Tensor, recipe: Recipe) -> float:
        seen.append(weights(model))
        return next(losses)

    monkeypatch.setattr(train_target, "held_out_loss", judge)
    found = train(replace(TINY, evaluations=3), CPU, CORPUS)
    assert found.training["weights_of_step"] == 4
    assert found.training["steps"] == 6
    assert all(map(torch.equal, weights(found.model), seen[1]))
    assert not all(map(torch.equal, seen[1], seen[2]))


def test_a_larger_preset_makes_a_target_in_bfloat16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--preset", "gpu", "--device", "cpu", *SIZES, "--kv-heads", "2", "--batch", "2", "--steps", "4"]
    assert train_target.main([*arguments, "--evaluations", "2", "--to", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.count("held-out loss") == 3
    training = json.loads((tmp_path / "training.json").read_text())
    assert f"held-out loss {training['held_out_loss_nats_per_byte']:.3f} nats per byte" in out
    assert training["bytes_seen"] == 4 * 2 * 16
    assert training["recipe"]["weight_decay"] == 0.1
    target = Target(tmp_path, None, CPU, dtype=torch.bfloat16)
    assert target.taps == (1, 2, 3, 4, 5)
    assert target.model.config.dtype == torch.bfloat16
    assert not (tmp_path / "generation_config.json").exists()
    assert len(greedy(target, torch.arange(2, 14), 4)) == 4


def test_the_bundled_file_for_the_larger_preset_fits_it(tmp_path: Path) -> None:
    architecture(PRESETS["gpu"]).save_pretrained(tmp_path)
    config = command_line(["--config", "h200-bytes", "--target", str(tmp_path)]).config
    found = estimate(config)
    assert 50e6 < found.target_parameters < 80e6
    assert found.shapes["features"] == (config.batch, config.length, 5 * 512)
    assert list(found.device_memory) == ["cuda:0"]
    assert found.device_memory["cuda:0"] < 110e9  # an H200 has 141
    answered = math.ceil(config.steps / config.uses) * config.drafters * config.sequences
    assert answered > 6_000
    assert math.ceil(config.steps / config.uses) * config.drafters / config.targets < 2  # hardly a target decodes twice


def test_the_held_out_loss_is_that_of_what_is_saved() -> None:
    found = train(replace(TINY, saved_dtype="bfloat16"), CPU, CORPUS)
    assert {parameter.dtype for parameter in found.model.parameters()} == {torch.bfloat16}
    again = held_out_loss(found.model, data.encode(CORPUS.held_out), TINY)
    assert found.training["held_out_loss_nats_per_byte"] == round(again, 3)


def test_a_training_that_diverges_after_its_last_line_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_target, "held_out_loss", lambda *given: float("nan"))
    with pytest.raises(FloatingPointError, match="diverged before step 6"):
        train(replace(TINY, evaluations=2), CPU, CORPUS)


def test_a_training_that_diverges_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*SIZES, "--batch", "2", "--steps", "4", "--lr", "1e30", "--to", str(tmp_path / "made")]
    assert train_target.main(arguments) == 1
    assert "training diverged before step 3" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("--steps 0", "steps is 0, it must be at least 1"),
        ("--minutes 0", "minutes is 0.0, it must be above 0"),
        ("--minutes nan", "minutes is nan, it must be above 0"),
        ("--lr inf", "lr is inf, it must be above 0"),
        ("--weight-decay -1", "weight_decay is -1.0, it must be at least 0"),
        ("--steps 3 --minutes 1", "name steps or minutes"),
        ("--kv-heads 3", "heads is 4, it must be a multiple of kv_heads, 3"),
        ("--head-dim 7", "head_dim is 7"),
        ("--sequence 5000", "sequence is 5000"),
        ("--dtype float16", "dtype is 'float16': use 'float32' or 'bfloat16'"),
        ("--preset gpu --device cuda:99", "'cuda:99' does not exist here"),
        ("--preset gpu", "name it with --to"),
        ("--steps 1", "name it with --to"),
    ],
)
def test_options_that_cannot_work_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: str, says: str
) -> None:
    monkeypatch.setattr(train_target, "train", None)  # no work
    to = [] if "--to" in says else ["--to", str(tmp_path)]
    assert train_target.main([*wrong.split(), *to]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert says in error


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="sequence is 16"):
        train(TINY, CPU, data.Corpus(b"a" * 100, b"b" * 16))
