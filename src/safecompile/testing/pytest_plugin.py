"""Fixtures for pytest: ``pytest_plugins = ["safecompile.testing.pytest_plugin"]`` in ``conftest.py``.

Nothing loads them by itself: every run of pytest would import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

import pytest

from safecompile import testing

__all__ = ["max_compiles", "no_compiles", "pytest_runtest_call"]


@pytest.fixture
def max_compiles() -> Callable[[int], testing.MaxCompiles]:
    """Make a limit for a part of the test: call it with how many compiles are allowed, in a ``with`` statement."""
    return testing.max_compiles


@pytest.fixture
def no_compiles(request: pytest.FixtureRequest) -> None:
    """Let the test fail if anything compiles while its function runs; what fixtures compile does not count.

    As an argument of the test or by ``pytest.mark.usefixtures``.

    Raises:
        pytest.UsageError: it is asked for while the test runs already.
    """
    if "no_compiles" not in request.node.fixturenames:
        raise pytest.UsageError(
            "no_compiles counts from the start of the test: name it in the test's arguments or in usefixtures, or use "
            "`with safecompile.testing.no_compiles():`."
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Count while a test runs that has ``no_compiles``."""
    if "no_compiles" not in getattr(item, "fixturenames", ()):
        return (yield)
    # Around the call and not in the fixture: the test fails itself, and its own exception wins.
    with testing.no_compiles():
        return (yield)
