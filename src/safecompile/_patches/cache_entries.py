"""The entries of Dynamo's cache: compiled code, the guards that say when it may be used, and the backend it is from."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

from torch.utils._python_dispatch import BaseTorchDispatchMode, TorchDispatchMode, _get_current_dispatch_mode_stack

from safecompile._patches.point import PatchPoint
from safecompile._patches.random_numbers import RegionMode

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


def has_entry(callback: Any, frame: Any) -> bool:
    """Tell whether Dynamo's cache has an entry for this frame."""
    return any(entry.guard_manager.check(frame.f_locals) for entry in entries(callback, frame))


def entry_in(conversion: Any) -> Any:
    """Return the entry that a conversion has made, or ``None``."""
    entry = getattr(conversion, "guarded_code", conversion)  # older torch returns the entry itself, or a flag
    return entry if hasattr(entry, "guard_manager") else None


def remember(guard_manager: Any, callback: Any) -> None:
    """Note which backend an entry is from that is about to be made."""
    _backends[guard_manager] = _backend(callback)


def _backend(callback: Any) -> Any:
    name = _next_inwards(callback)
    while hasattr(callback, name):
        callback = getattr(callback, name)
    return callback


def converter_of(callback: Any) -> Any:
    """Return the object of Dynamo's that converts the frames which a callback of its is called for."""
    converter = getattr(callback, _next_inwards(callback), None)
    return getattr(converter, "_inner_convert", converter)


def _next_inwards(callback: Any) -> str:
    name = "_torchdynamo_orig_backend"
    return name if hasattr(callback, name) else "_torchdynamo_orig_callable"  # older torch


class _Asked(threading.local):
    older = False


class CacheOrder(PatchPoint):
    name = "cache-order"
    protects = "a recomputation runs another compiled variant than its forward, after other threads' new shapes (E6)"
    upstream = "pytorch#166926; torch/csrc/dynamo/extra_state.cpp, _set_lru_cache"
    _in_region = False  # whether the call that is compiled runs under a region's mode; guarded by the compile lock

    def __init__(self) -> None:
        super().__init__()
        self._asked = _Asked()

    def apply(self) -> None:
        from torch._C._dynamo import eval_frame
        from torch._dynamo import convert_frame, guards

        if hasattr(eval_frame, "_set_lru_cache"):  # torch 2.10 and newer
            eval_frame._set_lru_cache(False)
        else:
            self.wrap(convert_frame.ConvertFrameAssert, "__call__", self._convert)
        if not hasattr(TorchDispatchMode, "ignore_compile_internals"):  # torch 2.8 and older
            self.wrap(convert_frame, "_disable_current_modes", self._disable_modes)
            self.wrap(guards.CheckFunctionManager, "__init__", self._make_guards)

    def restore(self) -> None:
        from torch._C._dynamo import eval_frame

        if self.active and hasattr(eval_frame, "_set_lru_cache"):
            eval_frame._set_lru_cache(True)
        super().restore()

    def _convert(self, convert: Callable[..., Any], converter: Any, args: Any, kwargs: Any) -> Any:
        """Let a new entry be used only where none of the older ones may be: Dynamo looks at the newest first."""
        older = [weakref.ref(entry.guard_manager) for entry in entries(converter, args[0])]
        conversion = convert(*args, **kwargs)
        entry = entry_in(conversion)
        if older and entry is not None:

            def none_is_older(values: dict[str, Any]) -> bool:
                if self._asked.older:  # an older one that gives way to one still older: that will be asked as well
                    return True
                self._asked.older = True
                try:
                    return not any(manager.check(values) for manager in (reference() for reference in older) if manager)
                finally:
                    self._asked.older = False

            entry.guard_manager.root.add_lambda_guard(none_is_older, ["no older entry may be used"])
        return conversion

    def _disable_modes(self, disable: Callable[[], Any], _: Any, args: Any, kwargs: Any) -> Any:
        """Stand before one compile, which sees no modes."""
        self._in_region = any(isinstance(mode, RegionMode) for mode in _get_current_dispatch_mode_stack())
        return disable()

    def _make_guards(self, make: Callable[..., None], _: Any, args: Any, kwargs: Any) -> None:
        """Make the guards of an entry under a mode if the calls are: a tensor is another one for them under a mode.

        Otherwise no call under a mode has an entry. Each is compiled, up to the limit, from which on it runs eagerly: a
        recomputation would save other tensors than its forward.
        """
        with BaseTorchDispatchMode() if self._in_region else nullcontext():  # type: ignore[no-untyped-call]
            make(*args, **kwargs)
