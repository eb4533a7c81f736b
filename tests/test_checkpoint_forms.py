"""The forms of `checkpoint`: decorator, methods, sequences; and regions that draw from a generator of their own."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError
from torch.utils.checkpoint import checkpoint_sequential as torch_checkpoint_sequential

import safecompile
from safecompile import UnsupportedCallableError, checkpoint, checkpoint_sequential, thread_safe_compile
from tests.helpers.backends import CountingBackend
from tests.helpers.regions import (
    COMPANIES,
    SECONDS,
    alone,
    another_thread,
    backward,
    draw,
    draw_elsewhere,
    in_any_company,
    interrupted_in,
    ones,
    right_gradient,
    stock,
    two_dropouts,
)
from tests.helpers.threads import run_threads, switch_interval
from tests.helpers.torch_version import lacks

pytestmark = pytest.mark.usefixtures("nothing_is_known")


@pytest.fixture
def torch_alone() -> None:
    safecompile.uninstall()


# ---------------------------------------------------------------------------------------------------------- decorators


@checkpoint
def bare(x: Tensor, *, scale: float = 1.0) -> Tensor:
    """Drop twice."""
    return two_dropouts(x) * scale


@checkpoint()
def called(x: Tensor, *, scale: float = 1.0) -> Tensor:
    """Drop twice."""
    return two_dropouts(x) * scale


@checkpoint(determinism_check="none", preserve_rng_state=True)
def with_options(x: Tensor, *, scale: float = 1.0) -> Tensor:
    """Drop twice."""
    return two_dropouts(x) * scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((64,), 2.0))
        self.calls: list[str] = []

    @checkpoint
    def bare(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        """Drop twice."""
        self.calls.append("bare")
        return two_dropouts(x) * self.weight * (scale / 2)

    @checkpoint()
    def called(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        """Drop twice."""
        self.calls.append("called")
        return two_dropouts(x) * self.weight * (scale / 2)

    @checkpoint(determinism_check="none")
    def with_options(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        """Drop twice."""
        self.calls.append("with_options")
        return two_dropouts(x) * self.weight * (scale / 2)

    @staticmethod
    @checkpoint
    def static(x: Tensor, *, scale: float = 1.0) -> Tensor:
        """Drop twice."""
        return two_dropouts(x) * scale

    @classmethod
    @checkpoint
    def of_class(cls, x: Tensor, *, scale: float = 1.0) -> Tensor:
        """Drop twice."""
        assert cls is Model
        return two_dropouts(x) * scale


MODEL = Model()
# Any: to a type checker `@checkpoint` is a call of the function.
FORMS: dict[str, Any] = {
    "@checkpoint": bare,
    "@checkpoint()": called,
    "@checkpoint(...)": with_options,
    "@checkpoint on a method": MODEL.bare,
    "@checkpoint() on a method": MODEL.called,
    "@checkpoint(...) on a method": MODEL.with_options,
    "@checkpoint on a static method": Model.static,
    "@checkpoint on a class method": Model.of_class,
    "a partial function": checkpoint()(partial(two_dropouts).func),
}
each_form = pytest.mark.parametrize("form", [pytest.param(form, id=name) for name, form in FORMS.items()])


@each_form
@in_any_company
def test_a_decorated_function_is_a_region_at_each_call(form: Callable[..., Tensor]) -> None:
    MODEL.calls.clear()
    for _ in range(2):
        x = ones()
        y = form(x)
        draw()
        assert torch.equal(backward(y, x), right_gradient(y, x))
    assert len(MODEL.calls) in {0, 4}


@pytest.mark.parametrize("form", ["@checkpoint", "@checkpoint()", "@checkpoint(...)"])
def test_a_decorated_function_keeps_its_name_signature_and_keywords(form: str) -> None:
    function, method = FORMS[form], FORMS[f"{form} on a method"]
    assert [function.__name__, method.__name__] == [
        {"@checkpoint": "bare", "@checkpoint()": "called"}.get(form, "with_options")
    ] * 2
    for decorated in (function, method):
        assert decorated.__doc__ == "Drop twice."
        assert "scale" in inspect.signature(decorated).parameters
    x = ones()
    y = function(x, scale=3.0)
    assert torch.allclose(backward(y, x), 3 * right_gradient(y, x))


def test_the_options_of_a_decorator_reach_the_region() -> None:
    runs = 0

    def region(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return x.sin() if runs == 1 else x[:1].sin().expand(64)

    x = ones()
    assert torch.equal(backward(checkpoint(determinism_check="none")(region)(x), x), x.detach().cos())
    runs = 0
    y = checkpoint()(region)(x)
    with pytest.raises(CheckpointError, match="different metadata"):
        backward(y, x)


@pytest.mark.parametrize("keywords", [{}, {"determinism_check": "none"}])
def test_a_decorator_of_a_module_says_what_to_do_instead(keywords: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedCallableError, match=r"Linear.*checkpoint\(module, x\)"):
        checkpoint(**keywords)(nn.Linear(2, 2))


def test_a_decorator_refuses_the_reentrant_kind_where_it_stands() -> None:
    with pytest.raises(ValueError, match="use_reentrant"):
        checkpoint(use_reentrant=True)
    with pytest.raises(ValueError, match="use_reentrant"):
        FORMS["@checkpoint"](ones(), use_reentrant=True)


def test_a_function_without_arguments_is_called_and_not_decorated() -> None:
    x = ones()
    y: Any = checkpoint(lambda: two_dropouts(x))
    assert isinstance(y, Tensor)
    assert torch.equal(backward(y, x), right_gradient(y, x))
    assert isinstance(checkpoint(lambda x=x: x.sin()), Tensor)
    assert isinstance(checkpoint(lambda *, scale: x * scale, scale=2.0), Tensor)
    assert isinstance(checkpoint(nn.Identity(), x), Tensor)


@in_any_company
def test_decorated_functions_may_be_nested() -> None:
    inner = FORMS["@checkpoint"]
    outer: Any = checkpoint(lambda x: inner(x).exp())
    x = ones()
    y = outer(x)
    draw()
    assert torch.allclose(backward(y, x), y.detach() * right_gradient(y.log(), x))


@pytest.mark.usefixtures("nothing_compiled")
def test_a_decorated_compiled_callable_and_a_compiled_decorated_one_are_right() -> None:
    backend = CountingBackend()
    inside: Any = checkpoint(thread_safe_compile(two_dropouts, backend=backend))
    region: Any = checkpoint(_sines)
    outside = thread_safe_compile(region, backend=backend)
    with another_thread():
        for _ in range(2):
            x = ones()
            y = inside(x)
            draw_elsewhere()
            assert torch.equal(backward(y, x), right_gradient(y, x))
            assert torch.allclose(backward(outside(x), x), backward(_sines(x), x))
    assert backend.count == 2


def _sines(x: Tensor) -> Tensor:
    return x.sin().sin()


@pytest.mark.parametrize("run", [1, 2])
def test_a_decorated_function_is_right_beside_threads_that_draw(run: int) -> None:
    x = ones()
    with another_thread():
        y = checkpoint()(interrupted_in(run))(x)
        assert torch.equal(backward(y, x), right_gradient(y, x))


@pytest.mark.usefixtures("torch_alone")
@pytest.mark.parametrize("run", [1, 2])
def test_control_torchs_is_wrong_beside_threads_that_draw(run: int) -> None:
    x = ones()
    y = stock(interrupted_in(run), x)
    assert not torch.equal(backward(y, x), right_gradient(y, x))


# ----------------------------------------------------------------------------------------------- checkpoint_sequential


def layers(count: int) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()) for _ in range(count)))


def values_and_gradients(make: Callable[..., Tensor], functions: Any, model: nn.Module, segments: int) -> list[Tensor]:
    torch.manual_seed(0)
    x = torch.randn(3, 8, requires_grad=True)
    y = make(functions, segments, x, use_reentrant=False)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *model.parameters()]), torch.get_rng_state()]


@in_any_company
@pytest.mark.parametrize(("count", "segments"), [(4, 1), (4, 2), (5, 2), (5, 3), (4, 4), (1, 1)])
@pytest.mark.parametrize("kind", [nn.Sequential, list])
def test_checkpoint_sequential_gives_torchs_values_gradients_and_numbers(count: int, segments: int, kind: Any) -> None:
    model = layers(count)
    functions = model if kind is nn.Sequential else list(model)
    ours = values_and_gradients(checkpoint_sequential, functions, model, segments)
    torchs = values_and_gradients(torch_checkpoint_sequential, functions, model, segments)
    assert all(map(torch.equal, ours, torchs))


@pytest.mark.parametrize(("count", "segments", "twice"), [(6, 3, 4), (5, 2, 2), (5, 3, 2), (3, 1, 0), (4, 4, 3)])
def test_checkpoint_sequential_recomputes_what_torch_recomputes(count: int, segments: int, twice: int) -> None:
    def counted(make: Callable[..., Tensor]) -> list[int]:
        runs = [0] * count

        def layer(index: int, x: Tensor) -> Tensor:
            runs[index] += 1
            return x.sin().exp()

        make([partial(layer, index) for index in range(count)], segments, ones(), use_reentrant=False).sum().backward()
        return runs

    ours = counted(checkpoint_sequential)
    assert ours == counted(torch_checkpoint_sequential)
    assert ours == [2] * twice + [1] * (count - twice)


@pytest.mark.parametrize("segments", [0, -1, 4])
def test_segments_that_make_no_sense_are_refused(segments: int) -> None:
    with pytest.raises(ValueError, match=rf"between 1 and 3.*not {segments}"):
        checkpoint_sequential(nn.Sequential(nn.Tanh(), nn.Tanh(), nn.Tanh()), segments, ones())


def test_a_sequence_of_nothing_and_the_reentrant_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="segments"):
        checkpoint_sequential([], 1, ones())
    with pytest.raises(ValueError, match="use_reentrant"):
        checkpoint_sequential([torch.sin] * 4, 2, ones(), use_reentrant=True)


@lacks((2, 9), "early_stop as an option")
def test_checkpoint_sequential_takes_any_iterable_and_the_options_of_checkpoint() -> None:
    ends = 0

    def counted(x: Tensor) -> Tensor:
        nonlocal ends
        y = x.sin()
        ends += 1
        return y

    for early_stop, expected in ((True, 1), (False, 2)):
        ends, x = 0, ones()
        y = checkpoint_sequential((f for f in (counted, torch.exp)), 2, x, early_stop=early_stop)
        assert torch.allclose(backward(y, x), y.detach() * x.detach().cos())
        assert ends == expected


@pytest.mark.parametrize("run", [1, 2])
def test_checkpoint_sequential_is_right_beside_threads_that_draw(run: int) -> None:
    x = ones()
    with another_thread():
        y = checkpoint_sequential([interrupted_in(run), torch.exp], 2, x)
        assert torch.allclose(backward(y, x), y.detach() * right_gradient(y.log(), x))


# ------------------------------------------------------------------------------------------- generators of one's own


def own(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noisy(x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Two products with random numbers: the gradient shows which they were."""
    y = (x * torch.rand(64, generator=generator)).sin()
    return y * torch.rand(64, generator=generator)


def expected_of_noisy(seed: int = 5) -> tuple[Tensor, Tensor]:
    x = ones()
    y = noisy(x, own(seed))
    return y.detach(), backward(y, x)


class Holder(nn.Module):
    all: ClassVar[list[Holder]] = []

    @classmethod
    def kept(cls, generator: torch.Generator | None) -> Holder:
        """Make one that is never freed: another may have its address otherwise."""
        cls.all.append(cls(generator))
        return cls.all[-1]

    def __init__(self, generator: torch.Generator | None) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        return noisy(x, self.generator)


WAYS_TO_PASS: dict[str, Callable[[torch.Generator | None, Tensor], Tensor]] = {
    "argument": lambda generator, x: checkpoint(noisy, x, generator),
    "keyword": lambda generator, x: checkpoint(noisy, x, generator=generator),
    "closure": lambda generator, x: checkpoint(lambda x: noisy(x, generator), x),
    "partial function": lambda generator, x: checkpoint(partial(noisy, generator=generator), x),
    "module": lambda generator, x: checkpoint(Holder.kept(generator), x),
    "container": lambda generator, x: checkpoint(lambda x, things: noisy(x, *things), x, [generator]),
}
each_way = pytest.mark.parametrize("way", WAYS_TO_PASS)


@each_way
@in_any_company
def test_numbers_of_a_generator_of_ones_own_are_the_same_in_the_recomputation(way: str) -> None:
    value, gradient = expected_of_noisy()
    for _ in range(2):
        generator, x = own(), ones()
        y = WAYS_TO_PASS[way](generator, x)
        after = generator.get_state()
        torch.rand(3, generator=generator)
        assert torch.equal(y, value)
        first = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
        assert torch.equal(first, gradient)
        assert torch.equal(backward(y, x), gradient)
        # The recomputation leaves no trace: the generator goes on as if there were no region.
        generator.set_state(after)
        without = own()
        noisy(ones(), without)
        assert torch.equal(torch.rand(4, generator=generator), torch.rand(4, generator=without))


@each_way
@in_any_company
def test_a_recomputation_does_not_move_a_generator_of_ones_own(way: str) -> None:
    generator, x = own(), ones()
    y = WAYS_TO_PASS[way](generator, x)
    before = generator.get_state()
    backward(y, x)
    assert torch.equal(generator.get_state(), before)


unseen = pytest.mark.xfail(
    strict=True,
    reason="a region is known by its code, modules and arguments: that a module has a generator now is not seen",
)


@pytest.mark.parametrize("first", ["without one", "with the default one"])
@pytest.mark.parametrize(("company", "way"), [(company, way) for company in COMPANIES for way in WAYS_TO_PASS])
def test_a_region_that_drew_without_a_generator_of_its_own_may_draw_with_one(
    company: str, way: str, first: str
) -> None:
    with COMPANIES[company]():
        x = ones()
        for _ in range(2):
            backward(WAYS_TO_PASS[way](None if first == "without one" else torch.default_generator, x), x)
        value, gradient = expected_of_noisy()
        y = WAYS_TO_PASS[way](own(), x)
        assert torch.equal(y, value)
        assert torch.equal(backward(y, x), gradient)


@pytest.mark.parametrize(
    ("company", "before"),
    [
        pytest.param("alone", "nothing", marks=unseen),
        pytest.param("alone", "default", marks=unseen),
        pytest.param("among threads", "nothing", marks=unseen),
        pytest.param("among threads", "default"),
    ],
)
def test_a_module_that_draws_from_a_generator_later_is_right(company: str, before: str) -> None:
    class Sometimes(nn.Module):
        generator: torch.Generator | None = None
        noisy = before == "default"

        def forward(self, x: Tensor) -> Tensor:
            return noisy(x, self.generator) if self.noisy else x.sin()

    with COMPANIES[company]():
        module, x = Sometimes(), ones()
        for _ in range(2):
            backward(checkpoint(module, x), x)
        module.noisy, module.generator = True, own()
        value, gradient = expected_of_noisy()
        y = checkpoint(module, x)
        assert torch.equal(y, value)
        assert torch.equal(backward(y, x), gradient)


def test_a_module_at_the_address_of_one_that_is_gone_may_have_a_generator() -> None:
    value, gradient = expected_of_noisy()
    met = 0
    with alone():
        for _ in range(100):
            module, x = Holder(None), ones()
            backward(checkpoint(module, x), x)
            generator, before = own(), id(module)
            del module
            module = Holder(generator)  # nothing is made in between that could take the place
            met += id(module) == before
            y = checkpoint(module, x)
            assert torch.equal(y, value)
            assert torch.equal(backward(y, x), gradient)
    assert met > 0, "no module had the address of another"


@pytest.mark.parametrize("company", COMPANIES)
def test_a_module_that_draws_from_the_default_generator_later_is_right(company: str) -> None:
    class Sometimes(nn.Module):
        noisy = False

        def forward(self, x: Tensor) -> Tensor:
            return two_dropouts(x) if self.noisy else x.sin()

    with COMPANIES[company]():
        module, x = Sometimes(), ones()
        for _ in range(2):
            backward(checkpoint(module, x), x)
        module.noisy = True
        for _ in range(2):
            y = checkpoint(module, x)
            assert torch.equal(backward(y, x), right_gradient(y, x))


@in_any_company
def test_a_region_that_draws_from_both_kinds_of_generator_is_right() -> None:
    def region(x: Tensor, generator: torch.Generator) -> Tensor:
        return noisy(two_dropouts(x), generator)

    x = ones()
    for _ in range(2):
        torch.manual_seed(0)
        expected = backward(region(x, own()), x)
        torch.manual_seed(0)
        generator = own()
        y = checkpoint(region, x, generator)
        draw()
        torch.rand(3, generator=generator)
        assert torch.equal(backward(y, x), expected)


def threads_with_generators(make: Callable[..., Any]) -> bool:
    """Let threads own a generator each; tell whether all numbers and gradients are those of a thread alone."""

    def steps(seed: int, make: Callable[..., Any]) -> list[Tensor]:
        generator, seen = own(seed), []
        for _ in range(10):
            x = ones()
            y = make(noisy, x, generator)
            seen += [y.detach(), backward(y, x), torch.rand(4, generator=generator)]
        return seen

    alone_ = [steps(seed, lambda function, *args: function(*args)) for seed in range(4)]
    with switch_interval():
        together = run_threads(lambda seed: steps(seed, make), 4)
    return all(all(map(torch.equal, *pair)) for pair in zip(alone_, together, strict=True))


def test_threads_that_own_a_generator_get_what_they_get_alone() -> None:
    assert threads_with_generators(checkpoint)


@pytest.mark.usefixtures("torch_alone")
def test_control_with_torch_threads_that_own_a_generator_get_wrong_gradients() -> None:
    assert not threads_with_generators(stock)


@each_way
def test_another_threads_numbers_from_the_default_generator_do_no_harm(way: str) -> None:
    value, gradient = expected_of_noisy()
    done = threading.Event()

    def others() -> None:
        while not done.is_set():
            draw()

    def steps() -> None:
        try:
            for _ in range(20):
                generator, x = own(), ones()
                y = WAYS_TO_PASS[way](generator, x)
                assert torch.equal(y, value)
                assert torch.equal(backward(y, x), gradient)
        finally:
            done.set()

    with switch_interval():
        run_threads([others, steps], timeout=SECONDS)
