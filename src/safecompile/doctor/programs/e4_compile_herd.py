"""Threads that make one first call each compile it, and later shapes fail or run eagerly.

torch compiles one at a time, and does not look again after waiting whether somebody else has compiled the same. The
copies use up the recompile limit (8): under `fullgraph` FailOnRecompileLimitHit.
"""

from __future__ import annotations

from safecompile.doctor._program import (
    Case,
    CountingBackend,
    FaultError,
    attempt,
    example,
    fault,
    fresh,
    program,
    repeat,
    together,
)

__all__ = ["run"]


@program("E4", "N threads that make one first call compile up to N times", kind="error", upstream="pytorch#123177")
def run(case: Case) -> str:
    x, threads = example(), 12
    tries = iter(range(100))

    def once() -> None:
        number, backend = next(tries), CountingBackend()
        call = case.compile(fresh(number), backend=backend, fullgraph=True)
        failed = ""
        try:
            together(*[lambda: attempt("", lambda: call(x), (x + number).sin())] * threads)
        except FaultError as error:
            failed = str(error)
        if failed or backend.count > 1:
            fault(f"{threads} threads made the same first call: {backend.count} compiles{failed}")

    return repeat(5, once)
