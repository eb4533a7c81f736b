"""The model checker, for all that has no torch."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import frontrun  # type: ignore[import-untyped]
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Keep the collector away: what hypothesis has it call would be scheduled inside the checker's own scheduler."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def explore(monkeypatch: pytest.MonkeyPatch, no_collection: None) -> Callable[..., Any]:
    """The model checker: all orders of the bytecodes that matter, with at most two switches away from a runnable thread."""
    monkeypatch.setenv("FRONTRUN_ACTIVE", "1")

    def run(setup: Callable[[], Any], workers: Any, invariant: Callable[[Any], bool], **options: Any) -> Any:
        return frontrun.explore(
            setup=setup,
            workers=workers,
            invariant=invariant,
            clock="virtual",
            detect_io=False,
            reproduce_on_failure=0,
            total_timeout=60,
            **options,
        )

    return run
