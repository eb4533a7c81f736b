"""P5: what the requests of a server wait for when a new shape comes now and then."""

from __future__ import annotations

import random
import statistics
import threading
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.pieces.variants import CountingBackend, Function, clock, compile_as, define, prepare, together

EAGER = "safecompile_eager"  # safecompile with when_compiling="eager"
TOLERANCE = 1e-4  # compiled code adds up in another order
SMALLEST = 8


@dataclass(frozen=True)
class Answer:
    waited: float  # from when the request was due
    took: float
    compiled: bool  # a graph for its shape was there when the call began
    error: str


def load(*, variant: str, backend: str, clients: int, rate: float, shapes: int, interval: float) -> dict[str, Any]:
    """Let clients, a thread each, make `rate` requests a second of one function; each `interval` there is a new shape.

    Half of the requests have the newest shape. They are due at fixed times: one that finds its client still waiting
    waits as well, as it would in a server's queue, and its time counts from when it was due. All begin with the first
    shape compiled. An answer is compared with what the function gives as it is.
    """
    import torch

    options: dict[str, Any] = {"when_compiling": "eager"} if variant == EAGER else {}
    variant = "safecompile" if variant == EAGER else variant
    prepare(variant, backend)
    counting, original = CountingBackend(backend), _function()
    function = compile_as(variant, original, backend=counting, dynamic=False, **options)
    inputs = [torch.rand(SMALLEST + index, SMALLEST + index) for index in range(shapes)]
    expected = [original(x) for x in inputs]
    answers: list[list[Answer]] = [[] for _ in range(clients)]
    begins = threading.Barrier(clients)

    def client(index: int) -> None:
        with _turn:  # what comes later is measured
            function(inputs[0])
        begins.wait()
        begin, choose, number = clock(), random.Random(index), 0
        while (due := (number + index / clients) / rate) < shapes * interval:
            newest = int(due / interval)
            shape = choose.choice((newest, choose.randint(0, newest)))
            time.sleep(max(0.0, begin + due - clock()))
            started, compiled = clock(), tuple(inputs[shape].shape) in counting.shapes
            error = _error(function, inputs[shape], expected[shape])
            ended = clock()
            answers[index].append(Answer(ended - begin - due, ended - started, compiled, error))
            number += 1

    together(clients, client)
    return _summary([answer for of_client in answers for answer in of_client], counting)


def _summary(answers: list[Answer], counting: CountingBackend) -> dict[str, Any]:
    waited = [answer.waited for answer in answers]
    errors = [answer.error for answer in answers if answer.error]
    return {
        "answers": len(answers),
        "median": statistics.median(waited),
        "p99": statistics.quantiles(waited, n=100, method="inclusive")[-1],
        "longest": max(waited),
        "longest_compiled": max((answer.took for answer in answers if answer.compiled), default=0.0),
        "compiles": len(counting.shapes),
        "shapes_compiled": len(set(counting.shapes)),
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
    }


def _function() -> Function:
    body = f"torch.tanh(x @ x) * {random.uniform(1, 2)} + {random.uniform(1, 2)}"
    return define(f"import torch\ndef function(x):\n    return {body}")


def _error(function: Function, x: Any, expected: Any) -> str:
    import torch

    try:
        result = function(x)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if torch.allclose(result, expected, rtol=TOLERANCE, atol=TOLERANCE):
        return ""
    return f"differs by up to {(result - expected).abs().max():g}"


_turn = threading.Lock()
