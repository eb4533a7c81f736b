"""A pool whose threads have the settings of the thread that makes it, warmed up before it works."""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor

import torch

from safecompile import capture_context, thread_safe_compile, warmup
from safecompile.testing import no_compiles


def main(backend: str) -> None:
    eager = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 3))
    model = thread_safe_compile(lambda x: eager(x).softmax(-1), backend=backend, dynamic=False)
    inputs = [torch.randn(rows, 8) for rows in (1, 2, 4)]

    with torch.inference_mode():
        context = capture_context()
        expected = [eager(x).softmax(-1) for x in inputs]

    with ThreadPoolExecutor(4, initializer=context.apply) as pool:
        warmup(model, [(x,) for x in inputs], executor=pool)
        with no_compiles():
            results = list(pool.map(model, inputs * 10))
    assert all(result.is_inference() for result in results)
    for result, wanted in zip(results, expected * 10, strict=True):
        torch.testing.assert_close(result, wanted)
    print(f"{len(results)} results of 4 threads, nothing compiled after the warm-up")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="aot_eager", help="for torch.compile; inductor for real use")
    main(parser.parse_args().backend)
