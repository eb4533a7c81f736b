"""Threads that launch one autotuned Triton kernel for the first time fail: the tuner keeps a launch's arguments in itself."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from safecompile.doctor._program import Case, fault, first_line, program, repeat, together

__all__ = ["run"]

# Triton reads a kernel's source from its file.
_KERNEL = """
import triton
import triton.language as tl

def made():
    @triton.autotune([triton.Config({"BLOCK": block}) for block in (64, 128, 256, 512)], key=["n"])
    @triton.jit
    def add_one(x, y, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)

    return add_one
"""


@program(
    "E9",
    "a Triton autotuner shared by threads fails at its first launch",
    kind="error",
    upstream="triton#11494",
    needs="gpu",
)
def run(case: Case) -> str:
    if case.library:
        from safecompile import install

        install()
    namespace: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.py")
        file.write_text(_KERNEL)
        exec(compile(_KERNEL, str(file), "exec"), namespace)  # noqa: S102
        return repeat(5, lambda: _launch(namespace["made"]()))  # type: ignore[operator]


def _launch(kernel: object) -> None:
    def once(number: int) -> None:
        x = torch.full((1 << 14,), float(number), device="cuda")
        y = torch.empty_like(x)
        kernel[lambda meta: (-(-x.numel() // meta["BLOCK"]),)](x, y, x.numel())  # type: ignore[index]
        if not torch.equal(y, x + 1):
            fault("a launch gave other numbers")

    try:
        together(*(lambda number=number: once(number) for number in range(4)))
    except Exception as error:
        fault(first_line(error))
