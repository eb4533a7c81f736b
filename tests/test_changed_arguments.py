"""Arguments that another thread changes while a call is compiled with them (E8): an error that says so."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import safecompile
from safecompile import ArgumentChangedError, fx_trace_lock
from tests.helpers.backends import CountingBackend
from tests.helpers.regions import alone, another_thread, elsewhere
from tests.helpers.subprocess_run import run_forked
from tests.helpers.torch_version import TORCH

pytestmark = pytest.mark.usefixtures("nothing_compiled", "not_alone")

X = torch.ones(2)


@pytest.fixture(autouse=True)
def installed(nothing_compiled: None) -> None:
    safecompile.install()


@pytest.fixture
def not_alone() -> Iterator[None]:
    with another_thread():
        yield


def use_key(box: Any, x: torch.Tensor) -> torch.Tensor:
    return x * box["k"]


def use_inner_key(box: Any, x: torch.Tensor) -> torch.Tensor:
    return x * box["inner"]["k"]


def use_item(box: Any, x: torch.Tensor) -> torch.Tensor:
    return x * box[2]


def use_inner_item(box: Any, x: torch.Tensor) -> torch.Tensor:
    return x * box[0][2]


def use_member(box: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 3 if 3 in box else x


# The call, what makes the container, and how it is changed; the result is 3 with what was made.
CASES: dict[str, tuple[Callable[..., torch.Tensor], Callable[[], Any], Callable[[Any], object]]] = {
    "dict": (use_key, lambda: {"k": 3, "l": 4}, lambda box: box.pop("k")),
    "dict of tensors": (use_key, lambda: {"k": torch.full((2,), 3.0)}, dict.clear),
    "OrderedDict": (use_key, lambda: OrderedDict(k=3, l=4), lambda box: box.pop("k")),
    "nested dict": (use_inner_key, lambda: {"inner": {"k": 3}}, lambda box: box["inner"].clear()),
    "set": (use_member, lambda: {1, 2, 3}, set.clear),
    "list": (use_item, lambda: [1, 2, 3], list.clear),
    "deque": (use_item, lambda: deque([1, 2, 3]), deque.clear),
    "list in a tuple": (use_inner_item, lambda: ([1, 2, 3],), lambda box: box[0].clear()),
}
if TORCH < (2, 11):
    del CASES["set"]  # its members are not looked at again


def take_the_lock() -> bool:
    if fx_trace_lock.acquire(timeout=0):
        fx_trace_lock.release()
        return True
    return False


def compile_while_changed(
    function: Callable[..., torch.Tensor], change: Callable[[], object], *args: Any, run: Any = elsewhere
) -> torch.Tensor:
    """Compile, while another thread makes the change before the guards are made."""

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        run(change)
        return graph.forward

    result: torch.Tensor = torch.compile(function, backend=backend)(*args)
    return result


@pytest.mark.parametrize("name", CASES)
def test_the_error_names_the_argument_and_the_function_and_has_torchs_as_its_cause(name: str) -> None:
    function, make, change = CASES[name]
    box = make()
    with pytest.raises(ArgumentChangedError) as caught:
        compile_while_changed(function, lambda: change(box), box, X)
    error = caught.value
    assert f"argument 'box' ({type(box).__name__})" in str(error)
    assert f"while {function.__name__} was being compiled" in str(error)
    assert isinstance(error.__cause__, (torch._dynamo.exc.InternalTorchDynamoError, AssertionError, IndexError))
    assert isinstance(error, RuntimeError)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (ArgumentChangedError, str(error))

    assert elsewhere(take_the_lock)
    backend, box = CountingBackend(), make()
    assert torch.equal(torch.compile(function, backend=backend)(box, X), 3 * X)
    assert backend.count == 1


def test_of_several_arguments_only_those_that_were_changed_are_named() -> None:
    def use(one: Any, other: Any, untouched: Any, *rest: Any, **by_name: Any) -> torch.Tensor:
        return X * one["k"] * other["k"] * untouched["k"] * rest[0]["k"] * by_name["late"]["k"]

    boxes: list[dict[str, int]] = [{"k": number} for number in range(5)]

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        for box in (boxes[1], boxes[4]):
            elsewhere(box.clear)
        return graph.forward

    compiled = torch.compile(use, backend=backend)
    with pytest.raises(ArgumentChangedError, match=r"argument 'other' \(dict\), 'by_name' \(dict\) while use"):
        compiled(*boxes[:4], late=boxes[4])


@pytest.mark.parametrize("make", [dict, OrderedDict])
def test_a_container_that_changes_all_the_time_is_no_internal_error(make: Any) -> None:
    box = make((f"i{number}", number) for number in range(200))
    box["k"] = 3
    done = threading.Event()

    def change() -> None:
        number = 0
        while not done.is_set():
            number += 1
            box[f"n{number % 50}"] = number
            box.pop(f"n{(number + 25) % 50}", None)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(5):
            torch._dynamo.reset()
            with contextlib.suppress(ArgumentChangedError):
                assert torch.equal(torch.compile(use_key, backend="eager")(box, X), 3 * X)
    finally:
        done.set()
        thread.join()


def test_values_that_change_without_harm_to_the_compile_are_no_error() -> None:
    box = {"k": 3}
    got = compile_while_changed(use_key, lambda: box.update(more=1), box, X)
    assert torch.equal(got, 3 * X)


def test_what_the_calling_thread_itself_changes_alone_in_the_process_is_torchs_error() -> None:
    box = {"k": 3}
    with alone(), pytest.raises(torch._dynamo.exc.InternalTorchDynamoError):
        compile_while_changed(use_key, box.clear, box, X, run=lambda change: change())


def test_an_internal_error_that_no_change_explains_is_torchs_error() -> None:
    def raise_internal(change: Any) -> None:
        raise torch._dynamo.exc.InternalTorchDynamoError("of another cause")

    with pytest.raises(Exception, match="of another cause") as caught:
        compile_while_changed(use_key, lambda: None, {"k": 3}, X, run=raise_internal)
    assert not isinstance(caught.value, ArgumentChangedError)


class Settings:
    def __init__(self) -> None:
        self.values = {"k": 3}


def use_attribute(settings: Settings, x: torch.Tensor) -> torch.Tensor:
    return x * settings.values["k"]


def test_a_container_that_is_an_attribute_of_an_argument_is_no_internal_error() -> None:
    settings = Settings()
    with pytest.raises(ArgumentChangedError, match="settings"):
        compile_while_changed(use_attribute, settings.values.clear, settings, X)


GLOBAL = {"k": 3}


def use_global(x: torch.Tensor) -> torch.Tensor:
    return x * GLOBAL["k"]


def test_a_global_container_is_no_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GLOBAL, "k", 3)
    with pytest.raises(ArgumentChangedError, match="GLOBAL"):
        compile_while_changed(use_global, GLOBAL.clear, X)


def test_control_torch_alone_raises_its_internal_errors() -> None:
    run_forked(
        """
        import torch
        from torch._dynamo.exc import InternalTorchDynamoError
        from tests.test_changed_arguments import CASES, X, compile_while_changed

        for name in CASES:
            function, make, change = CASES[name]
            box = make()
            try:
                compile_while_changed(function, lambda: change(box), box, X)
            except (InternalTorchDynamoError, AssertionError, IndexError):  # which of them differs with the version
                continue
            raise SystemExit(f"{name}: no error")
        """
    ).check()


def test_no_method_of_a_container_of_the_users_is_called() -> None:
    class Box(dict[str, int]):
        def items(self) -> Any:
            raise KeyError("items")

        __len__ = __iter__ = items

    def use(box: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 3

    compiled = torch.compile(use, backend="eager")
    assert torch.equal(compiled(Box(k=3), X), X * 3)
