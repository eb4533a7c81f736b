"""A small server of a compiled model, and the latency of its requests while it compiles: ``python benchmarks/server.py``.

Sixteen clients, in a process of their own, ask one after the other for the logits of a tiny language model, half of them
with the newest sequence length: a new one comes every second, and its graph is compiled while all others are answered
(``when_compiling="eager"``). Then the same load is measured again with everything compiled and, for as long as each
compile took, one thread that does nothing but run Python; requests of the length in question run uncompiled meanwhile, as
they did before. The ratio is what a compile costs beyond the core and the share of the interpreter that any thread takes.
Every answer is compared with what the model gives uncompiled: one that differs by more than ``TOLERANCE`` is an error.

Last, after ``warmup``, a load of ``--seconds`` in which no thread may compile anything.

``application``, ``running`` and ``tiny_model`` also serve `tests/test_server.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# torch, and what serves, are imported where they are used: the clients' process needs neither.

clock = time.perf_counter
Answer = tuple[float, float, str]  # when it came, after how many seconds, and the error if it was one
CLIENTS = 16
FIRST_LENGTH, VOCABULARY = 4, 64
TOLERANCE = 1e-4  # of a logit, absolute and relative: compiled code adds up in another order
Expected = Mapping[str, Sequence[float]]  # the logits that follow each `request`


def tiny_model() -> Any:
    """Make a transformers model from ids of shape (1, length) to logits, the same each time."""
    import torch
    from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # Of all causal models the one that Dynamo is through with soonest, twice as fast as with Llama.
            config = OpenAIGPTConfig(
                vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=2, n_positions=64, initializer_range=0.2
            )
            self.model: Any = OpenAIGPTLMHeadModel(config)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.model(input_ids=ids).logits
            return logits

    torch.manual_seed(0)
    return Logits().eval()


def tokens(length: int, salt: int = 0) -> list[int]:
    return [(salt + place * place + length) % VOCABULARY for place in range(length)]


def request(length: int, client: int) -> str:
    return f"{length} ids of client {client}"


def answers_of(model: Any, lengths: Iterable[int]) -> Expected:
    """Return what the model answers to every client's ids of each length."""
    import torch

    each = [(length, client) for length in lengths for client in range(CLIENTS)]
    with torch.no_grad():
        return {request(*one): model(torch.tensor([tokens(*one)]))[0, -1].tolist() for one in each}


def application(answer: Callable[[Any], Any], context: Any) -> Any:
    """Serve the logits that follow the ids of a request: Starlette runs plain functions in anyio's pool of threads."""
    import torch
    from fastapi import FastAPI

    app = FastAPI()

    @app.post("/logits")
    def logits(ids: list[int]) -> list[float]:
        with context:
            found: list[float] = answer(torch.tensor([ids]))[0, -1].tolist()
        return found

    return app


@contextmanager
def running(app: Any) -> Iterator[str]:
    """Let uvicorn serve it, in a thread, on a free port of the loopback; give the address."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none"))
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:  # requests wait there until it has begun
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="uvicorn")
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def ask(expected: Expected, url: str, seconds: float, interval: float, lengths: int) -> list[Answer]:
    """Load the server with all clients; return when each answer came, after how long, and the error if it was one."""
    import httpx

    answers: list[Answer] = []
    begin = clock()

    def client(index: int) -> None:
        with httpx.Client(base_url=url, timeout=120) as connection:
            number = index
            while (now := clock()) < begin + seconds:
                newest = min(int((now - begin) / interval), lengths - 1)
                length = FIRST_LENGTH + (newest if number % 2 else number // 2 % (newest + 1))
                error = ""
                try:
                    response = connection.post("/logits", json=tokens(length, index)).raise_for_status()
                    took = clock() - now
                    error = difference(response.json(), expected[request(length, index)])
                except httpx.HTTPError as failed:
                    took, error = clock() - now, repr(failed)
                answers.append((now + took - begin, took, error))
                number += CLIENTS + 1

    threads = [threading.Thread(target=client, args=(index,)) for index in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def difference(found: Sequence[float], expected: Sequence[float]) -> str:
    """Return how an answer differs from the expected one, or nothing where it does not."""
    if len(found) != len(expected):
        return f"{len(found)} logits, not {len(expected)}"
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        if not math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            return f"logit {place} is {one:g}, not {other:g}"
    return ""


def ask_from_elsewhere(expected: Expected, url: str, *how: float) -> list[Answer]:
    command = [sys.executable, __file__, "--ask", url, *map(str, how)]
    done = subprocess.run(command, input=json.dumps(expected), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the clients ended with {done.returncode}:\n{done.stderr}")
    return [(at, took, error) for at, took, error in json.loads(done.stdout)]


class LengthsOf:
    """Another backend, which notes the sequence length that each graph is for."""

    def __init__(self, backend: str) -> None:
        import torch

        self._compile: Any = torch._dynamo.lookup_backend(backend)
        self.lengths: list[int] = []

    def __call__(self, graph: Any, inputs: Sequence[Any]) -> Any:
        # The ids are the one matrix of integers.
        self.lengths += [x.shape[1] for x in inputs if hasattr(x, "dim") and x.dim() == 2 and not x.is_floating_point()]
        return self._compile(graph, inputs)


@dataclass(frozen=True)
class Compiled:
    """The graph of one length: when its compile began and ended, in seconds from the first request on."""

    length: int
    begin: float
    end: float


class Beginning:
    """Answer requests as ``answer(ids, at)`` does, with the seconds since the first of them."""

    def __init__(self, answer: Callable[[Any, float], Any]) -> None:
        self._answer = answer
        self.at = 0.0
        self.begun = threading.Event()

    def __call__(self, ids: Any) -> Any:
        if not self.begun.is_set():
            self.at = clock()
            self.begun.set()
        return self._answer(ids, clock() - self.at)


def measure(backend: str, lengths: int, interval: float, seconds: float) -> None:
    import torch

    from safecompile import capture_context, thread_safe_compile, warmup
    from safecompile.testing import max_compiles, no_compiles

    torch.set_num_threads(1)
    with torch.no_grad():
        context = capture_context()
    original, counting = tiny_model(), LengthsOf(backend)
    all_lengths = range(FIRST_LENGTH, FIRST_LENGTH + lengths)
    expected = answers_of(original, all_lengths)
    model = thread_safe_compile(
        tiny_model(), backend=counting, dynamic=False, recompile_limit=lengths, when_compiling="eager"
    )
    # Starting the backend up is not what is measured.
    thread_safe_compile(torch.nn.Linear(2, 2), backend=backend)(torch.ones(2, 2))

    def load(answer: Callable[[Any, float], Any]) -> tuple[list[Answer], float]:
        beginning = Beginning(answer)
        with running(application(beginning, context)) as url:
            urllib.request.urlopen(f"{url}/openapi.json").close()  # it has begun, and imported what it imports then
            return ask_from_elsewhere(expected, url, lengths * interval, interval, lengths), beginning.at

    with max_compiles(lengths) as limit:
        answers, at = load(lambda ids, _: model(ids))
    compiled = [
        Compiled(length, one.start - at, one.start - at + one.seconds)
        for length, one in zip(counting.lengths, limit.compiles, strict=True)
    ]
    took = [one.end - one.begin for one in compiled]
    print(f"{CLIENTS} clients, a new length every {interval:g} s; {len(took)} compiles, {sum(took):.1f} s together")
    while_compiling = report("while it compiles", answers)
    others = report("  without the requests that compile", sorted(answers, key=lambda one: one[1])[: -len(took)])

    ready = {one.length: one.end for one in compiled}
    for length in all_lengths:
        with context:
            warmup(model, (torch.tensor([tokens(length)]),))
    beside = Beginning(lambda ids, at: (model if at >= ready.get(ids.shape[1], math.inf) else original)(ids))
    burner = threading.Thread(target=burn, args=(beside, compiled), daemon=True)
    burner.start()
    with no_compiles(), running(application(beside, context)) as url:
        answers = ask_from_elsewhere(expected, url, lengths * interval, interval, lengths)
    one_thread = report("beside one thread of Python", answers)
    print(f"99 %, compile to thread: {while_compiling / one_thread:.2f}, {others / one_thread:.2f} without")

    with no_compiles(), running(application(model, context)) as url:
        report(f"{seconds:g} s after warmup, no compile", ask_from_elsewhere(expected, url, seconds, 1e-6, lengths))


def burn(beginning: Beginning, compiled: Sequence[Compiled]) -> None:
    """Run Python whenever there was a compile."""
    beginning.begun.wait()
    for one in compiled:
        time.sleep(max(0.0, beginning.at + one.begin - clock()))
        while clock() < beginning.at + one.end:
            sum(range(1000))


def report(name: str, answers: Sequence[Answer]) -> float:
    """Print what a load came to, and return the 99th percentile of its latency in seconds."""
    errors = [error for _, _, error in answers if error]
    took = sorted(seconds for _, seconds, _ in answers)
    p99 = statistics.quantiles(took, n=100, method="inclusive")[98]
    print(
        f"  {name:38}{len(took):7} answers{len(errors):3} errors{statistics.median(took) * 1e3:8.1f} ms median"
        f"{p99 * 1e3:8.1f} ms 99 %{took[-1] * 1e3:9.1f} ms longest",
        flush=True,
    )
    if errors:
        print(f"  the first error: {errors[0]}")
    return p99


def main(arguments: Sequence[str] | None = None) -> None:
    summary, _, _ = (__doc__ or "").partition(":")
    parser = argparse.ArgumentParser(description=f"{summary}.")
    parser.add_argument("--ask", nargs=4, metavar=("URL", "SECONDS", "INTERVAL", "LENGTHS"), help=argparse.SUPPRESS)
    parser.add_argument("--backend", default="inductor", help="for torch.compile; by default inductor")
    parser.add_argument("--lengths", type=int, default=20, help="how many sequence lengths come, one a second")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds from one new length to the next")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the load lasts that compiles nothing")
    options = parser.parse_args(arguments)
    if options.ask:
        url, seconds, interval, lengths = options.ask
        print(json.dumps(ask(json.load(sys.stdin), url, float(seconds), float(interval), int(float(lengths)))))
        return
    with tempfile.TemporaryDirectory() as cache:
        # No compile is taken from a cache, and nothing but the requests' threads compiles.
        os.environ |= {
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
            "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        measure(options.backend, options.lengths, options.interval, options.seconds)


if __name__ == "__main__":
    main()
