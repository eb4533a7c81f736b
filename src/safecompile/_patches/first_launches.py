"""The first launches of kernels that are tuned when they are first used."""

from __future__ import annotations

import importlib.util
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from safecompile._core.forks import lock_across_forks
from safecompile._core.turns import Turn, Turns
from safecompile._patches.point import PatchPoint


class FirstLaunches(PatchPoint):
    """Lets threads that launch a kernel first wait until one of them has tuned it. Later launches wait for nobody."""

    name = "first-launches"
    protects = (
        "threads that launch a kernel for the first time tune it several times, each beside the others, and fail (E9): "
        '"too many values to unpack", "\'NoneType\' object is not a mapping"'
    )
    upstream = "torch/_inductor/runtime/triton_heuristics.py, CachingAutotuner.run; triton/runtime/autotuner.py"
    relies_on = (
        "torch._inductor.runtime.triton_heuristics:CachingAutotuner.autotune_to_one_config",
        "torch._inductor.runtime.triton_heuristics:CachingAutotuner.coordinate_descent_tuning",
        "triton.runtime.autotuner:Autotuner.run",
    )

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns
        self._guard = lock_across_forks()
        self._tuned: weakref.WeakSet[Any] = weakref.WeakSet()
        self._final: weakref.WeakSet[Any] = weakref.WeakSet()

    def needed(self) -> bool:
        return bool(torch.version.cuda or torch.version.hip) and importlib.util.find_spec("triton") is not None

    def apply(self) -> None:
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner
        from torch._inductor.select_algorithm import AlgorithmSelectorCache

        if hasattr(CachingAutotuner, "_make_launchers"):  # newer than torch 2.6
            self.wrap(CachingAutotuner, "_make_launchers", self._make_launchers)
        self.wrap(CachingAutotuner, "autotune_to_one_config", self._tune)
        self.wrap(CachingAutotuner, "coordinate_descent_tuning", self._descend)
        self.wrap(_autotuner(), "run", self._run)
        self.replace(_autotuner(), "nargs", _Arguments())
        # Tuning of a compile: it draws random inputs and waits for the device, which no recording stands.
        for name in ("get_inputs", "benchmark_in_current_process"):
            if hasattr(AlgorithmSelectorCache, name):
                self.wrap(AlgorithmSelectorCache, name, self._benchmark)

    def _make_launchers(self, make: Callable[..., None], tuner: Any, args: Any, kwargs: Any) -> None:
        if tuner not in self._tuned:  # else a late thread would put all of them back
            make(*args, **kwargs)

    def _tune(self, tune: Callable[..., None], tuner: Any, args: Any, kwargs: Any) -> None:
        with self._turns[tuner.triton_meta["device"]]:
            if len(tuner.launchers) == 1:  # another thread has done it
                return
            self._tuned.add(tuner)
            try:
                tune(*args, **kwargs)
            except BaseException:
                self._tuned.discard(tuner)
                raise

    def _descend(self, descend: Callable[..., Any], tuner: Any, args: Any, kwargs: Any) -> Any:
        if tuner in self._final:  # a kind of kernel that is not tuned so, which torch asks for in each launch
            return descend(*args, **kwargs)
        with self._turns[tuner.triton_meta["device"]]:
            (launcher,) = tuner.launchers
            if getattr(launcher.config, "found_by_coordesc", False):
                return launcher
            tuner.launchers = [best] = [descend(launcher, *args[1:], **kwargs)]
            if best is launcher:
                self._final.add(tuner)
            return best

    def _benchmark(self, benchmark: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return benchmark(*args, **kwargs)
        with self._turns[torch.cuda.current_device()]:
            return benchmark(*args, **kwargs)

    def _run(self, run: Callable[..., Any], tuner: Any, args: Any, kwargs: Any) -> Any:
        if type(tuner.cache) is dict:
            with self._guard:
                if type(tuner.cache) is dict:  # no other thread has replaced it
                    tuner.cache = _Tuned(tuner.cache, self._turns)
        try:
            return run(*args, **kwargs)
        finally:
            tuner.cache.launched()


def _autotuner() -> Any:
    return importlib.import_module("triton.runtime.autotuner").Autotuner


class _Tuned(dict[Any, Any]):
    """What Triton's autotuner has found. Who looks for what is not there has the device's turn until it has launched."""

    def __init__(self, known: dict[Any, Any], turns: Turns) -> None:
        super().__init__(known)
        self._turns = turns
        self._here = threading.local()

    def __contains__(self, key: object) -> bool:
        if super().__contains__(key):
            return True
        turn = self._turns[torch.cuda.current_device()]
        turn.acquire()
        vars(self._here).setdefault("taken", []).append(turn)
        return super().__contains__(key)

    def launched(self) -> None:
        taken: list[Turn] = vars(self._here).pop("taken", [])
        for turn in taken:
            turn.release()


class _Arguments:
    """A launch's arguments, which an autotuner keeps in itself and forgets at the end, each thread's for itself."""

    def __init__(self) -> None:
        self._here = threading.local()

    def __get__(self, tuner: Any, _: Any = None) -> Any:
        return self if tuner is None else vars(self._here).get(str(id(tuner)))

    def __set__(self, tuner: Any, arguments: Any) -> None:
        if arguments is None:
            vars(self._here).pop(str(id(tuner)), None)
        else:
            vars(self._here)[str(id(tuner))] = arguments
