"""The entries of Dynamo's cache: compiled code, the guards that say when it may be used, and the backend it is from."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

__all__ = ["entries", "remember"]

# By the guard manager, for torch 2.6, whose entries do not tell.
_backends: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def entries(callback: Any, frame: Any) -> Iterator[Any]:
    """Return the entries that a frame may use if their guards hold."""
    from torch._C._dynamo import eval_frame

    backend = _backend(callback)
    get_region = getattr(eval_frame, "get_eval_frame_isolate_recompiles_id", lambda: -1)
    regions = (-1, get_region())
    for entry in eval_frame._debug_get_cache_entry_list(frame.f_code):
        made_by = getattr(entry, "backend", None) or _backends.get(entry.guard_manager)
        if made_by == backend and getattr(entry, "isolate_recompiles_id", -1) in regions:
            yield entry


def remember(guard_manager: Any, callback: Any) -> None:
    """Note which backend an entry is from that is about to be made."""
    _backends[guard_manager] = _backend(callback)


def _backend(callback: Any) -> Any:
    name = "_torchdynamo_orig_backend"
    if not hasattr(callback, name):
        name = "_torchdynamo_orig_callable"  # older torch
    while hasattr(callback, name):
        callback = getattr(callback, name)
    return callback
