"""Types that users of the decorators see. Checked by mypy with the rest of the tests, and run by test_typing.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

from safecompile import capture_context, checkpoint, fx_trace_lock, thread_safe_compile, warmup


@thread_safe_compile
def bare(x: Tensor, n: int = 1, *, flag: bool = False) -> Tensor:
    return x * n if flag else x + n


@thread_safe_compile(backend="eager", fullgraph=True)
def with_options(x: Tensor, n: int = 1) -> tuple[Tensor, int]:
    return x + n, n


def plain(x: Tensor) -> Tensor:
    return x + 1


called = thread_safe_compile(plain, backend="eager")


class Owner:
    @thread_safe_compile(backend="eager")
    def method(self, x: Tensor) -> Tensor:
        return x + 1

    @thread_safe_compile(backend="eager")
    @classmethod
    def make(cls, x: Tensor) -> Tensor:
        return x + 2

    @thread_safe_compile(backend="eager")
    @staticmethod
    def helper(x: Tensor) -> Tensor:
        return x + 3

    @staticmethod
    @thread_safe_compile
    def inside(x: Tensor) -> Tensor:
        return x + 4


class Net(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1

    def own(self) -> str:
        return "own"


@fx_trace_lock
def locked(n: int) -> str:
    return str(n)


def functions(x: Tensor) -> None:
    assert_type(with_options(x, n=2), tuple[Tensor, int])
    assert_type(called(x), Tensor)
    assert_type(called, Callable[[Tensor], Tensor])  # type: ignore[assert-type]  # it names its argument, too


def methods(x: Tensor) -> None:
    owner = Owner()
    assert_type(owner.method(x), Tensor)
    assert_type(Owner.make(x), Tensor)
    assert_type(Owner.helper(x), Tensor)
    assert_type(thread_safe_compile(owner.method, backend="eager")(x), Tensor)


def modules() -> None:
    net = thread_safe_compile(Net(), backend="eager")
    assert_type(net, Net)
    assert_type(net.own(), str)


def the_rest(x: Tensor) -> None:
    assert_type(locked(1), str)
    assert_type(fx_trace_lock.acquire(timeout=1.0), bool)
    fx_trace_lock.release()
    assert_type(checkpoint(plain, x), Tensor)
    assert_type(capture_context().run(plain, x), Tensor)
    assert_type(warmup(called, (x,)).graphs, int)


def mistakes_are_found(x: Tensor) -> None:
    """Never called: each line is an error that mypy must see, else the `ignore` is unused and itself an error."""
    bare("text")  # type: ignore[arg-type]
    bare(x, flag=1)  # type: ignore[arg-type]
    with_options(x, number=1)  # type: ignore[call-arg]
    called()  # type: ignore[call-arg]
    Owner().method(1)  # type: ignore[arg-type]
    locked("text")  # type: ignore[arg-type]
    thread_safe_compile(Net()).no_such_method()  # type: ignore[operator]
    thread_safe_compile(3)  # type: ignore[call-overload]


def main() -> None:
    x = torch.ones(2)
    functions(x)
    methods(x)
    modules()
    the_rest(x)
