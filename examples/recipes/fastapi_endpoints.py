"""Plain endpoints of FastAPI, which Starlette runs in anyio's pool of threads, all with one compiled model.

To serve it: ``uvicorn --app-dir examples/recipes --factory fastapi_endpoints:application``. As a program it asks itself.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import torch
from fastapi import FastAPI

from safecompile import capture_context, thread_safe_compile, warmup
from safecompile.testing import no_compiles

# Rows of a request that are warmed up. Another number is compiled when it comes, and answered eagerly meanwhile.
ROWS = (1, 2, 4)
eager = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 3))


def application(backend: str = "inductor") -> FastAPI:
    model = thread_safe_compile(eager.forward, backend=backend, dynamic=False, when_compiling="eager")
    with torch.inference_mode():
        context = capture_context()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        with context:
            warmup(model, [(torch.zeros(rows, 8),) for rows in ROWS])
        yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/classes")
    @context.wrap  # the pool's threads have none of the settings that the model is compiled for
    def classes(rows: list[list[float]]) -> list[list[float]]:
        return model(torch.tensor(rows)).tolist()

    return app


async def main(backend: str) -> None:
    app = application(backend)
    requests = [torch.randn(rows, 8) for rows in ROWS * 5]
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app")
    async with app.router.lifespan_context(app), client:
        with no_compiles():
            answers = await asyncio.gather(*(client.post("/classes", json=x.tolist()) for x in requests))
    for x, answer in zip(requests, answers, strict=True):
        torch.testing.assert_close(torch.tensor(answer.json()), eager(x))
    print(f"{len(answers)} requests answered, nothing compiled after the warm-up")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="aot_eager", help="for torch.compile; inductor for real use")
    asyncio.run(main(parser.parse_args().backend))
