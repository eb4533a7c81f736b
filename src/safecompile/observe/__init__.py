"""What happens around compiles, as it happens: events to subscribe to, and a picture of them."""

from __future__ import annotations

from safecompile._core import events
from safecompile._core.events import Call, Compile, EagerRun, RecompileLimit, Wait
from safecompile.observe import _log, _reasons
from safecompile.observe._subscription import Subscription, subscribe
from safecompile.observe._timeline import timeline

__all__ = [
    "Call",
    "Compile",
    "EagerRun",
    "RecompileLimit",
    "Subscription",
    "Wait",
    "subscribe",
    "timeline",
]

events.explain = _reasons.reasons
events.write_log = _log.write
