"""Strict exports overlap: since torch 2.9 their traces take no lock. What they share must not be mixed up."""

from __future__ import annotations

import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo import guards
from torch._dynamo.source import AttrSource, LocalSource
from torch._guards import ChainedSource

import safecompile
from tests.helpers.threads import WorkersFailedError, run_threads

SECONDS = 60.0

pytestmark = pytest.mark.usefixtures("nothing_compiled")

looks_up_in_a_dictionary = pytest.mark.skipif(
    not hasattr(ChainedSource, "get_value"),
    reason="values for guards are looked up by one expression: before torch 2.11",
)


def look_up_at_the_same_time() -> list[Any]:
    """Look up ``x.size`` in two threads as for guards: the second is inside ``x.size`` while the first begins and ends."""
    inside, ended = threading.Event(), threading.Event()

    class Second:
        @property
        def size(self) -> str:
            inside.set()
            assert ended.wait(SECONDS)
            return "second"

    class FirstScope(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            second.start()
            assert inside.wait(SECONDS)
            return super().__getitem__(name)

    def size(scope: dict[str, Any]) -> Any:
        source: Any = AttrSource(LocalSource("x"), "size")
        return source.get_value({"L": scope}, guards._get_closure_vars(), weakref.WeakKeyDictionary())

    found: list[Any] = [None, None]

    def look_up_second() -> None:
        try:
            found[1] = size({"x": Second()})
        except KeyError as error:
            found[1] = error

    second = threading.Thread(target=look_up_second, daemon=True)
    try:
        found[0] = size(FirstScope(x=SimpleNamespace(size="first")))
    finally:
        ended.set()
        second.join(SECONDS)
    return found


def kernels_found_at_the_same_time() -> list[Any]:
    """Let threads look for the kernel of one operator when all have seen that none is known."""
    library = torch.library.Library("safecompile_tests", "FRAGMENT")
    library.define("met(Tensor x) -> Tensor")
    library.impl("met", torch.clone, "CPU")
    operator: Any = torch.ops.safecompile_tests.met.default
    key, all_here = torch._C.DispatchKey.CPU, threading.Barrier(4)

    def find(_: int) -> Any:
        assert key not in operator._dispatch_cache
        all_here.wait(SECONDS)
        return operator._get_dispatch(key)

    try:
        return run_threads(find, 4)
    finally:
        library._destroy()


@looks_up_in_a_dictionary
def test_threads_look_up_the_values_for_their_guards_apart() -> None:
    safecompile.install()
    assert look_up_at_the_same_time() == ["first", "second"]


@looks_up_in_a_dictionary
def test_control_with_torch_alone_they_look_in_each_others_place() -> None:
    safecompile.uninstall()
    first, second = look_up_at_the_same_time()
    assert (first, type(second)) == ("first", KeyError)


def test_threads_that_meet_in_an_operator_find_the_same_kernel() -> None:
    safecompile.install()
    assert len(set(kernels_found_at_the_same_time())) == 1


def test_control_with_torch_alone_threads_that_meet_in_an_operator_fail() -> None:
    safecompile.uninstall()
    with pytest.raises(WorkersFailedError) as caught:
        kernels_found_at_the_same_time()
    assert all(isinstance(error, AssertionError) for error in caught.value.errors.values())
