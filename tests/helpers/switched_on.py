"""The patches that wait for their measurement on a GPU, switched on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import safecompile
from safecompile._patches import patches
from safecompile._patches.cuda_graphs import CudaGraphs
from safecompile._patches.first_launches import FirstLaunches

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)  # in the files that import it
def switched_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install them with the others, and none of them afterwards."""
    safecompile.uninstall()
    for point in patches.points:
        if isinstance(point, (CudaGraphs, FirstLaunches)):
            monkeypatch.setattr(point, "on", True)
    yield
    safecompile.uninstall()
