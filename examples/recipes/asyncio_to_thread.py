"""Coroutines that leave a compiled function to asyncio's threads, so that the event loop goes on meanwhile.

``asyncio.to_thread`` copies context variables, and with them torch's compiler configuration from torch 2.12 on; grad mode,
autocast, default device and the number of intra-op threads are the thread's own, and come with the context.
"""

from __future__ import annotations

import argparse
import asyncio

import torch

from safecompile import capture_context, statistics, thread_safe_compile


async def main(backend: str) -> None:
    linear = torch.nn.Linear(8, 8)

    @thread_safe_compile(backend=backend, dynamic=False)
    def step(x: torch.Tensor) -> torch.Tensor:
        return linear(x).relu()

    inputs = [torch.randn(rows, 8) for rows in (1, 2, 4)] * 5
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        context = capture_context()
        expected = [linear(x).relu() for x in inputs]

    before = statistics().compiled
    results = await asyncio.gather(*(asyncio.to_thread(context.run, step, x) for x in inputs))
    assert statistics().compiled - before == 3, "one graph for each shape"
    for result, wanted in zip(results, expected, strict=True):
        assert not result.requires_grad
        torch.testing.assert_close(result, wanted)  # of type bfloat16, as with autocast
    print(f"{len(results)} results of {len(inputs)} coroutines, 3 graphs")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="aot_eager", help="for torch.compile; inductor for real use")
    asyncio.run(main(parser.parse_args().backend))
