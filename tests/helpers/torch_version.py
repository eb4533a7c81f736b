"""What differs between the versions of torch: which faults its own code has, and what it cannot do."""

from __future__ import annotations

import pytest
import torch

__all__ = ["RECOMPILE_LIMIT", "TORCH", "lacks", "limit", "repaired", "unheard_of"]

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

# The setting of Dynamo for how often a function may be compiled.
RECOMPILE_LIMIT = "recompile_limit" if TORCH >= (2, 7) else "cache_size_limit"


def _text(version: tuple[int, int]) -> str:
    return f"torch {version[0]}.{version[1]}"


def repaired(version: tuple[int, int], what: str) -> pytest.MarkDecorator:
    """Mark a negative control whose fault is gone in ``version`` and later: there the control must fail."""
    return pytest.mark.xfail(version <= TORCH, strict=True, reason=f"{what}: repaired in {_text(version)}")


def unheard_of(version: tuple[int, int], what: str) -> pytest.MarkDecorator:
    """Mark a negative control whose fault came with ``version``: before, the control must fail."""
    return pytest.mark.xfail(version > TORCH, strict=True, reason=f"{what}: came with {_text(version)}")


def lacks(version: tuple[int, int], what: str) -> pytest.MarkDecorator:
    """Skip a test of something that torch has from ``version`` on."""
    return pytest.mark.skipif(version > TORCH, reason=f"{what}: from {_text(version)} on")


def limit(version: tuple[int, int], what: str, *, always: bool = True) -> pytest.MarkDecorator:
    """Mark what the library cannot do with torch before ``version``, always or now and then; the docs say so."""
    return pytest.mark.xfail(version > TORCH, strict=always, reason=f"{what}: from {_text(version)} on")


# In 2.11 and before, is_compiling() is true in traced code only, and not in what a compile runs: backends, subclasses.
ASKS_IN_A_COMPILE = lacks((2, 13), "is_compiling() in the code that a compile runs")
