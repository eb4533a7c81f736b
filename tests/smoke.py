"""Try an installed safecompile, which must be the environment's own."""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import safecompile
from safecompile import capture_context, checkpoint, install, statistics, thread_safe_compile, uninstall, warmup
from safecompile.testing import no_compiles

THREADS = 4


def is_installed(wrapt: str | None) -> None:
    folder = Path(safecompile.__file__).parent
    assert folder.is_relative_to(sys.prefix), f"{folder} is not in the environment {sys.prefix}"
    assert (folder / "py.typed").exists()
    if wrapt is not None:
        assert importlib.metadata.version("wrapt") == wrapt


def threads_compile_once() -> None:
    install(strict=True)
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    @thread_safe_compile(backend=backend, dynamic=False)
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).sin()

    x = torch.linspace(0, 1, 8, requires_grad=True)

    def gradient(_: int) -> torch.Tensor:
        return torch.autograd.grad(checkpoint(f, x).sum(), x)[0]

    with ThreadPoolExecutor(THREADS, initializer=capture_context().apply) as pool:
        for found in pool.map(gradient, range(THREADS)):
            torch.testing.assert_close(found, (x * 2).cos().detach() * 2)
    assert len(graphs) == 1, len(graphs)

    warmup(f, (torch.zeros(3),))
    with no_compiles():
        f(torch.zeros(3))
    assert statistics().installed
    uninstall()


def the_doctor_runs() -> None:
    command = [sys.executable, "-m", "safecompile", "doctor", "--only", "E1", "--markdown"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mismatch" not in done.stdout, done.stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wrapt", help="the version of wrapt that must be there")
    parser.add_argument("--doctor", action="store_true", help="let it examine one hazard, too")
    options = parser.parse_args()
    is_installed(options.wrapt)
    threads_compile_once()
    if options.doctor:
        the_doctor_runs()
