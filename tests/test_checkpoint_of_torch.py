"""torch's own checkpoint while the patches are installed: right among threads, and the same function for all who hold it."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint as torch_checkpoint  # before any installation, as other libraries do
from torch.utils.checkpoint import checkpoint_sequential as torch_checkpoint_sequential

import safecompile
from tests.helpers.backends import AotCountingBackend
from tests.helpers.models import tiny_model
from tests.helpers.regions import (
    SECONDS,
    alone,
    another_thread,
    backward,
    draw,
    draw_elsewhere,
    elsewhere,
    interrupted_in,
    ones,
    right_gradient,
    two_dropouts,
)
from tests.helpers.threads import run_threads, switch_interval
from tests.helpers.torch_version import lacks


@pytest.fixture
def installed(nothing_compiled: None, nothing_is_known: None) -> Iterator[None]:
    """Have the patches installed, another thread in the process, and nothing learned of regions."""
    safecompile.install()
    with another_thread():
        yield


@pytest.fixture
def torch_alone(nothing_compiled: None) -> Iterator[None]:
    safecompile.uninstall()
    with another_thread():
        yield


both_kinds = pytest.mark.parametrize("use_reentrant", [False, True], ids=["not reentrant", "reentrant"])
both_runs = pytest.mark.parametrize("run", [1, 2], ids=["forward", "recomputation"])


def by_backward(y: Tensor, x: Tensor) -> Tensor:
    """Return the gradient the only way that the reentrant kind knows."""
    y.sum().backward()
    assert x.grad is not None
    return x.grad


def interrupted(run: int, use_reentrant: bool) -> tuple[Tensor, Tensor]:
    """Let another thread draw in one run of a region; return the gradient and the right one."""
    x = ones()
    y = torch_checkpoint(interrupted_in(run), x, use_reentrant=use_reentrant)
    return by_backward(y, x), right_gradient(y, x)


@both_kinds
@both_runs
@pytest.mark.usefixtures("installed")
def test_numbers_drawn_by_others_do_no_harm_to_torchs_own(run: int, use_reentrant: bool) -> None:
    grad, expected = interrupted(run, use_reentrant)
    assert torch.equal(grad, expected)


def in_four_threads(use_reentrant: bool) -> set[bool]:
    """Tell whether the gradients of four threads were right, or wrong, or some of each."""

    def work(_: int) -> list[bool]:
        right = []
        for _ in range(40):
            x = ones(256)
            y = torch_checkpoint(two_dropouts, x, use_reentrant=use_reentrant)
            right.append(torch.equal(by_backward(y, x), right_gradient(y, x)))
        return right

    with switch_interval():
        return {right for rights in run_threads(work, 4) for right in rights}


@both_kinds
@pytest.mark.usefixtures("installed")
def test_four_threads_with_torchs_own_are_right(use_reentrant: bool) -> None:
    assert in_four_threads(use_reentrant) == {True}


@lacks((2, 14), "checkpoint as a decorator")
@both_runs
@pytest.mark.usefixtures("installed")
def test_a_function_that_torchs_own_has_decorated_is_right_too(run: int) -> None:
    decorate: Any = torch_checkpoint
    x = ones()
    y = decorate(use_reentrant=False)(interrupted_in(run))(x)
    assert torch.equal(backward(y, x), right_gradient(y, x))


@pytest.mark.usefixtures("installed")
def test_the_module_has_the_function_that_was_imported_before() -> None:
    assert torch.utils.checkpoint.checkpoint is torch_checkpoint


# ------------------------------------------------------------------------------------------------ checkpoint_sequential


def masks(y: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return which elements of a product with dropout are zero, in the output and in the gradient."""
    return y.detach() == 0, grad == 0


class Noisy(nn.Module):
    """Squares its argument and drops half of it; lets another thread do something in one of its runs."""

    def __init__(self, run: int, do: Callable[[], object] = draw) -> None:
        super().__init__()
        self.runs, self.run, self.do = 0, run, do

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        if self.runs == self.run:
            elsewhere(self.do)
        return dropout(x * x)


def sequential(run: int, use_reentrant: bool) -> tuple[Tensor, Tensor]:
    x = ones()
    y = torch_checkpoint_sequential(
        nn.Sequential(Noisy(run), nn.Tanh(), nn.Tanh(), nn.Softplus()), 2, x, use_reentrant=use_reentrant
    )
    return masks(y - y.min(), by_backward(y, x))


@both_kinds
@both_runs
@pytest.mark.usefixtures("installed")
def test_torchs_sequential_is_right_too(run: int, use_reentrant: bool) -> None:
    output, grad = sequential(run, use_reentrant)
    assert torch.equal(output, grad) and 0 < output.sum() < 64


# ----------------------------------------------------------------------------------------------------------- options


@pytest.mark.usefixtures("installed")
def test_without_preserving_random_numbers_torchs_own_does_as_it_does_alone() -> None:
    x = ones()
    y = torch_checkpoint(two_dropouts, x, use_reentrant=False, preserve_rng_state=False)
    assert not torch.equal(backward(y, x), right_gradient(y, x))


@pytest.mark.usefixtures("installed")
def test_keywords_of_the_region_and_options_of_torch_are_told_apart() -> None:
    seen: list[tuple[int, str]] = []

    def region(x: Tensor, *, power: int, name: str) -> Tensor:
        seen.append((power, name))
        return x.sin() ** power

    x = ones()
    y = torch_checkpoint(
        region, x, use_reentrant=False, power=3, determinism_check="none", preserve_rng_state=True, name="cube"
    )
    backward(y, x)
    assert seen == [(3, "cube")] * 2


@pytest.mark.usefixtures("installed")
@pytest.mark.filterwarnings("ignore:.*use_reentrant:UserWarning")
def test_what_torch_refuses_it_refuses_still() -> None:
    with pytest.raises(ValueError, match="determinism_check"):
        torch_checkpoint(torch.sin, ones(), use_reentrant=False, determinism_check="strict")
    with pytest.raises(ValueError, match="power"):
        torch_checkpoint(torch.sin, ones(), use_reentrant=True, power=3)
    with pytest.raises((TypeError, ValueError)):  # with no argument but keywords of a region
        torch_checkpoint(power=3)  # type: ignore[call-arg]


@pytest.mark.usefixtures("installed")
def test_a_region_that_is_part_of_a_region_of_the_library_is_right_too() -> None:
    x = ones()
    inner = interrupted_in(2)
    y = safecompile.checkpoint(lambda x: torch_checkpoint(inner, x, use_reentrant=False).exp(), x)
    assert torch.allclose(backward(y, x), y.detach() * right_gradient(y.log(), x))


@pytest.mark.usefixtures("installed")
def test_in_one_thread_numbers_and_gradients_are_those_of_torch_alone() -> None:
    block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5)

    def train() -> list[Tensor]:
        torch.manual_seed(0)
        x = torch.randn(2, 3, 8, requires_grad=True)
        seen = []
        for use_reentrant in (False, True, False):
            y = torch_checkpoint(block, x, use_reentrant=use_reentrant)
            block.zero_grad()
            y.square().sum().backward()
            seen += [y.detach(), *(p.grad for p in block.parameters() if p.grad is not None), torch.rand(3)]
        return [*seen, torch.get_rng_state()]

    with alone():
        ours = train()
        safecompile.uninstall()
        torchs = train()
    assert len(ours) == len(torchs) > 30
    assert all(map(torch.equal, ours, torchs))


# ---------------------------------------------------------------------------------------------------------- compiling


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torchs_own_may_be_called_in_a_fullgraph_function(backend: str) -> None:
    @torch.compile(backend=backend, fullgraph=True)
    def f(x: Tensor, scale: float) -> Tensor:
        def region(x: Tensor, *, power: int) -> Tensor:
            return (x * scale).sin() ** power

        y: Tensor = torch_checkpoint(region, x, use_reentrant=False, preserve_rng_state=True, power=3)
        return y.exp()

    x = ones()
    expected = backward(((x * 2.0).sin() ** 3).exp(), x)
    assert torch.allclose(backward(f(x, 2.0), x), expected)


@pytest.mark.usefixtures("installed")
def test_a_region_of_torchs_own_holds_a_compiled_callable_that_is_compiled_once() -> None:
    backend = AotCountingBackend()
    compiled = torch.compile(two_dropouts, backend=backend)
    for _ in range(2):
        x = ones()
        y = torch_checkpoint(compiled, x, use_reentrant=False)
        draw_elsewhere()
        assert torch.equal(backward(y, x), right_gradient(y, x))
    assert (backend.forward.count, backend.backward.count) == (1, 1)


# ------------------------------------------------------------------------------------------- installing, uninstalling


def parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_the_parameters_are_torchs_and_all_is_put_back(nothing_compiled: None) -> None:
    safecompile.uninstall()
    implementation = getattr(torch.utils.checkpoint, "_checkpoint_impl", torch_checkpoint)  # from torch 2.14 on
    function: Any = inspect.unwrap(implementation)
    code, signature, attributes = function.__code__, inspect.signature(torch_checkpoint), set(vars(function))
    names = parameters(torch_checkpoint)
    assert "__signature__" not in attributes
    safecompile.install()
    assert function.__code__ is not code
    assert parameters(torch_checkpoint) == names
    safecompile.uninstall()
    assert function.__code__ is code
    assert set(vars(function)) == attributes
    assert inspect.signature(torch_checkpoint) == signature


def test_the_annotations_in_the_signature_are_torchs(nothing_compiled: None) -> None:
    safecompile.uninstall()
    signature = inspect.signature(torch_checkpoint)
    safecompile.install()
    assert inspect.signature(torch_checkpoint) == signature


def test_a_region_that_began_with_the_patches_ends_right_without_them(nothing_compiled: None) -> None:
    safecompile.install()
    x = ones()
    with another_thread():
        y = torch_checkpoint(interrupted_in(2), x, use_reentrant=False)
        safecompile.uninstall()
        assert torch.equal(backward(y, x), right_gradient(y, x))


def test_a_region_that_began_without_the_patches_ends_as_torchs(nothing_compiled: None) -> None:
    safecompile.uninstall()
    x = ones()
    y = torch_checkpoint(two_dropouts, x, use_reentrant=False)
    safecompile.install()
    draw_elsewhere()
    assert torch.equal(backward(y, x), right_gradient(y, x))


# -------------------------------------------------------------------------------------------------- knobs (hazard P2)


class Ends:
    """A region that counts how often it runs to its end."""

    count = 0

    def __call__(self, x: Tensor) -> Tensor:
        y = x.sin()
        self.count += 1
        return y


def runs_to_the_end(checkpoint: Callable[..., Any] = safecompile.checkpoint) -> bool:
    """Tell whether a region that is made now is recomputed to its end."""
    region, x = Ends(), ones()
    backward(checkpoint(region, x, use_reentrant=False), x)
    return region.count == 2


def is_debugged(checkpoint: Callable[..., Any] = safecompile.checkpoint) -> bool:
    """Tell whether a region that is made now is debugged: torch refuses that together with contexts."""
    try:
        checkpoint(torch.sin, ones(), use_reentrant=False, context_fn=lambda: (nullcontext(), nullcontext()))
    except ValueError as error:
        assert "debug" in str(error)  # noqa: PT017  it is a question, not an expectation
        return True
    return False


KNOBS: dict[str, tuple[Callable[[bool], Any], bool, Callable[..., bool]]] = {
    "early stop": (torch.utils.checkpoint.set_checkpoint_early_stop, False, runs_to_the_end),
    "debug": (torch.utils.checkpoint.set_checkpoint_debug_enabled, True, is_debugged),
}
each_knob = pytest.mark.parametrize("knob", KNOBS)
makers = pytest.mark.parametrize("checkpoint", [safecompile.checkpoint, torch_checkpoint], ids=["library", "torch"])


@each_knob
@makers
@pytest.mark.usefixtures("installed")
def test_a_knob_acts_for_its_thread_alone(knob: str, checkpoint: Callable[..., Any]) -> None:
    turn, value, acts = KNOBS[knob]
    assert not acts(checkpoint)
    with turn(value):
        assert acts(checkpoint)
        assert not elsewhere(lambda: acts(checkpoint))
        with turn(not value):
            assert not acts(checkpoint)
        assert acts(checkpoint)
    assert not acts(checkpoint)


def left_behind(knob: str, checkpoint: Callable[..., Any]) -> list[bool]:
    """Let two threads turn a knob, and the first to turn it be the first to let go; tell for whom it acts then."""
    turn, value, acts = KNOBS[knob]
    first_is_inside, second_is_inside, first_has_left = (threading.Event() for _ in range(3))

    def first() -> bool:
        with turn(value):
            first_is_inside.set()
            assert second_is_inside.wait(SECONDS)
        first_has_left.set()
        return acts(checkpoint)

    def second() -> bool:
        assert first_is_inside.wait(SECONDS)
        with turn(value):
            second_is_inside.set()
            assert first_has_left.wait(SECONDS)
            if not acts(checkpoint):
                return True  # the other's exit has put its own value here
        return acts(checkpoint)

    return [*run_threads([first, second], timeout=SECONDS), acts(checkpoint), elsewhere(lambda: acts(checkpoint))]


@each_knob
@makers
@pytest.mark.usefixtures("installed")
def test_knobs_are_put_back_in_any_order_of_exits(knob: str, checkpoint: Callable[..., Any]) -> None:
    assert left_behind(knob, checkpoint) == [False] * 4


@pytest.mark.usefixtures("installed")
def test_a_region_keeps_the_knobs_of_its_forward_in_a_backward_on_another_thread() -> None:
    region, x = Ends(), ones()
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        y = safecompile.checkpoint(region, x)
    elsewhere(lambda: backward(y, x))
    assert region.count == 2


# ------------------------------------------------------------------------------------------------------- transformers


class Kept(nn.Dropout):
    """Dropout that keeps which elements it has dropped, call by call."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.calls = [*getattr(self, "calls", []), (y == 0).detach()]
        return y


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers")


def gpt2(transformers: Any, use_reentrant: bool) -> Any:
    config = transformers.GPT2Config(
        vocab_size=16, n_positions=8, n_embd=16, n_layer=2, n_head=2, use_cache=False, attn_implementation="eager"
    )
    config.resid_pdrop = config.attn_pdrop = config.embd_pdrop = 0.5
    model = transformers.GPT2LMHeadModel(config)
    for block in model.transformer.h:
        block.attn.resid_dropout = Kept()  # not the last in the block: a recomputation stops inside that one
    enable(model, use_reentrant)
    return model.train()


def enable(model: Any, use_reentrant: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers has a newer name for it
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})


def models_in_four_threads(transformers: Any, use_reentrant: bool) -> set[bool]:
    """Let each thread train a model of its own; tell whether dropouts dropped the same in their recomputations."""
    together = threading.Barrier(4)
    models = [gpt2(transformers, use_reentrant) for _ in range(4)]
    tokens = torch.arange(16).reshape(2, 8)

    def work(index: int) -> set[bool]:
        model, same = models[index], set()
        kept = [module for module in model.modules() if isinstance(module, Kept)]
        assert len(kept) == 2
        for _ in range(3):
            together.wait(SECONDS)
            for module in kept:
                module.calls = []
            model(input_ids=tokens, labels=tokens).loss.backward()
            for module in kept:
                forward, recomputation = module.calls
                same.add(torch.equal(forward, recomputation))
        return same

    with switch_interval():
        return set().union(*run_threads(work, 4))


@both_kinds
@pytest.mark.usefixtures("installed")
def test_gradient_checkpointing_of_transformers_is_right_in_four_threads(
    transformers: Any, use_reentrant: bool
) -> None:
    assert models_in_four_threads(transformers, use_reentrant) == {True}


def qwen3_gradients(attention: str) -> tuple[list[Tensor], list[Tensor]]:
    """Let another thread draw in the recomputations of a model; return its gradients and those without regions."""
    model = tiny_model(
        "Qwen3",
        vocab_size=16,
        num_hidden_layers=2,
        head_dim=8,
        attention_dropout=0.5,
        use_cache=False,
        attn_implementation=attention,
    ).train()
    tokens = torch.arange(16).reshape(2, 8)

    def gradients(do: Callable[[], object]) -> list[Tensor]:
        torch.manual_seed(0)
        loss = model(input_ids=tokens, labels=tokens).loss
        for layer in model.model.layers:  # each recomputation begins there
            layer.input_layernorm.register_forward_pre_hook(lambda *_: elsewhere(do) and None)
        return list(torch.autograd.grad(loss, list(model.parameters())))

    plain = gradients(draw)
    enable(model, use_reentrant=False)
    for layer in model.model.layers:
        layer.input_layernorm._forward_pre_hooks.clear()
    return gradients(draw), plain


attentions = pytest.mark.parametrize("attention", ["eager", "sdpa"])


@attentions
@pytest.mark.usefixtures("installed")
def test_dropout_in_the_attention_of_a_checkpointed_qwen3_is_recomputed_alike(attention: str) -> None:
    grads, expected = qwen3_gradients(attention)
    assert all(map(torch.allclose, grads, expected))


# ----------------------------------------------------------------------------------------------------------- controls

# Together, for installing the patches takes a second.


@both_kinds
@both_runs
@pytest.mark.usefixtures("torch_alone")
def test_control_torch_alone_gives_a_wrong_gradient(run: int, use_reentrant: bool) -> None:
    grad, expected = interrupted(run, use_reentrant)
    assert not torch.equal(grad, expected)


@both_kinds
@pytest.mark.usefixtures("torch_alone")
def test_control_four_threads_with_torch_alone_are_wrong(use_reentrant: bool) -> None:
    assert any(False in in_four_threads(use_reentrant) for _ in range(10))


@both_kinds
@pytest.mark.usefixtures("torch_alone")
def test_control_torchs_sequential_is_wrong(use_reentrant: bool) -> None:
    output, grad = sequential(2, use_reentrant)
    assert not torch.equal(output, grad)


@each_knob
@pytest.mark.usefixtures("torch_alone")
def test_control_with_torch_alone_a_knob_acts_for_all_threads(knob: str) -> None:
    turn, value, acts = KNOBS[knob]
    with turn(value):
        assert elsewhere(lambda: acts(torch_checkpoint))


@each_knob
@pytest.mark.usefixtures("torch_alone")
def test_control_with_torch_alone_a_knob_stays_turned(knob: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_enable_checkpoint_early_stop", "_checkpoint_debug_enabled"):
        monkeypatch.setattr(torch.utils.checkpoint, name, None)  # and so again at the end
    assert left_behind(knob, torch_checkpoint)[2:] == [True, True]


@both_kinds
@pytest.mark.usefixtures("torch_alone")
def test_control_with_torch_alone_gradient_checkpointing_of_transformers_is_wrong(
    transformers: Any, use_reentrant: bool
) -> None:
    assert any(False in models_in_four_threads(transformers, use_reentrant) for _ in range(10))


@attentions
@pytest.mark.usefixtures("torch_alone")
def test_control_with_torch_alone_a_checkpointed_qwen3_is_wrong(attention: str) -> None:
    grads, expected = qwen3_gradients(attention)
    assert not all(map(torch.allclose, grads, expected))
