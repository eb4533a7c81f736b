"""What happens around compiles, as it happens: events to subscribe to, and a picture of them."""

from __future__ import annotations

from safecompile._core import events
from safecompile._core.events import Call, Compile, EagerRun, RecompileLimit, Wait
from safecompile.observe import _reasons

__all__ = ["Call", "Compile", "EagerRun", "RecompileLimit", "Wait"]

events.explain = _reasons.reasons
