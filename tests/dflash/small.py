"""A configuration and a text that are small enough for many runs; files change what they are about with ``replace``."""

from __future__ import annotations

import torch

from config import Config

SMALL = Config(
    device="cpu",
    targets=2,
    drafters=2,
    layers=1,
    block_size=4,
    prompt_length=8,
    response_length=8,
    sequences=4,
    uses=4,
    batch=2,
    anchors=4,
    chunk_blocks=2,
)

TEXT = torch.randint(2, 258, (4000,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
"""Token ids of random bytes."""
