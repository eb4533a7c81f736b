"""The one layer that knows torch's private names: the patch points, and their installation as a whole."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from types import CodeType

from safecompile._core.errors import PatchesInUseError, PatchMismatchError
from safecompile._core.forks import lock_across_forks, renew_property_locks
from safecompile._core.gate import Gate
from safecompile._core.lock import FXTraceLock
from safecompile._core.stacks import outwards
from safecompile._core.turns import Turns
from safecompile._patches.aot_autograd import DirectCompiles, LazyBackward
from safecompile._patches.cache_entries import CacheOrder
from safecompile._patches.capture_streams import CaptureStreams
from safecompile._patches.compile_lock import CompileLock, compile_lock
from safecompile._patches.compile_state import AnomalyMode, CompileState
from safecompile._patches.compiled_autograd import CompiledAutograd
from safecompile._patches.compiled_call import CompiledCalls
from safecompile._patches.config import ConfigCaches
from safecompile._patches.cuda_graphs import CudaGraphs
from safecompile._patches.device_guard import DeviceGuard
from safecompile._patches.export import Exports
from safecompile._patches.first_launches import FirstLaunches
from safecompile._patches.fx import FXPatches, LazyGraphModules
from safecompile._patches.helper_threads import HelperThreads
from safecompile._patches.interpreter_exit import InterpreterExit
from safecompile._patches.per_call_settings import CallSettings, FullgraphCalls, Stance
from safecompile._patches.point import PatchPoint, threads_running
from safecompile._patches.recompile_budget import RecompileBudget
from safecompile._patches.regions import TorchCheckpoint
from safecompile._patches.resume_functions import ResumeFunctions, skip_frames_of
from safecompile._patches.rewriting import looked_up
from safecompile._patches.serial_traces import SerialTraces
from safecompile._patches.single_flight import SingleFlight
from safecompile._patches.thread_global_names import THREAD_GLOBALS
from safecompile._patches.thread_globals import ThreadGlobals
from safecompile._patches.when_compiling import WhenCompiling

__all__ = ["fx_trace_lock", "gate", "patches"]

gate = Gate()
fx_trace_lock: FXTraceLock = FXTraceLock(compile_lock)

# How long an installation waits for traces and compiles that began before it.
STRAGGLERS_LIMIT = 5.0


class Patches:
    """All patch points of this process, installed and restored together."""

    def __init__(self) -> None:
        self.calls = CompiledCalls(gate, self)
        # While somebody resets Dynamo: guards the reset, and who waits for its end.
        self._reset = threading.Lock()
        self._resetting = self._epoch_before = 0
        self._held: set[int] = set()
        self._warned = self._free_threads = False
        self._mismatches: list[str] = []
        self._fx = fx = FXPatches(skip_frames_of)
        settings = CallSettings()
        at_exit = InterpreterExit(fx_trace_lock)
        single_flight = SingleFlight(gate, fx_trace_lock, self.calls, at_exit, self.reset)
        turns = Turns(lambda: fx_trace_lock.limit)
        flags = {row[0]: ThreadGlobals(*row) for row in THREAD_GLOBALS}
        self.points: tuple[PatchPoint, ...] = (
            *flags.values(),
            HelperThreads(flags["compiling-flags"], fx_trace_lock),
            fx,
            LazyGraphModules(),
            CompileLock(fx_trace_lock),
            self.calls,
            WhenCompiling(fx_trace_lock, self.calls, single_flight.begins),
            RecompileBudget(self.calls),
            single_flight,
            FullgraphCalls(),
            at_exit,
            ResumeFunctions(gate),
            LazyBackward(fx_trace_lock),
            DirectCompiles(fx_trace_lock),
            Exports(fx, settings),
            DeviceGuard(),
            TorchCheckpoint(),
            CacheOrder(),
            CompileState(),
            AnomalyMode(),
            Stance(),
            settings,
            CompiledAutograd(),
            ConfigCaches(),
            FirstLaunches(turns),
            CaptureStreams(),
            CudaGraphs(turns),  # its turns are around what the streams' point does
            SerialTraces(fx_trace_lock, self._mismatches),
        )
        self._guard = lock_across_forks()  # made after the points' own, which are taken under it
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def install(self, *, strict: bool = False) -> int:
        """Install every point that matches this torch; return the epoch, or 0 if now is not the time.

        Now is not the time when the calling thread is itself inside a trace or compile that began before:
        then torch alone decides what happens, as it would in a single thread.
        """
        if gate.epoch and not (strict and self._mismatches):
            return gate.epoch
        if fx_trace_lock.owned_by_torch() or self._fx.began_before():
            return 0
        while True:
            if self._reset.locked() and (epoch := self.wait_for_reset()):
                return epoch
            # The compile lock first: no compile is in flight while the patches change.
            with fx_trace_lock, self._guard:
                if gate.epoch:
                    if strict and self._mismatches:
                        self._complain(strict=True)
                    return gate.epoch
                if not self._resetting:  # else a reset has begun meanwhile, which has closed the gate
                    return self._install(strict=strict)

    def _install(self, *, strict: bool) -> int:
        self._warn_of_free_threads()
        rewritten = {point.module for point in self.points if isinstance(point, ThreadGlobals)}
        with looked_up(map(importlib.import_module, rewritten)):
            self._mismatches.clear()
            for point in self.points:
                if reason := _install(point):
                    self._mismatches.append(f"{point.name}: {reason}")
        if self._mismatches:
            self._complain(strict=strict)
        replaced = set[CodeType]().union(*(point.replaced_code() for point in self.points))
        if threading.get_ident() in threads_running(replaced):
            self._restore()
            return 0
        deadline = time.monotonic() + STRAGGLERS_LIMIT
        while threads_running(replaced) and time.monotonic() < deadline:
            time.sleep(0.001)
        return gate.open()

    def wait_for_reset(self) -> int:
        """Hold a call until Dynamo has been reset, unless it is part of one that the reset waits for; return the epoch."""
        me = threading.get_ident()
        epoch_before, nested = self._epoch_before, self._calls_in_flight() > 1
        while not gate.epoch and self._reset.locked():
            if nested:
                return epoch_before
            self._held.add(me)
            try:
                if self._reset.acquire(timeout=fx_trace_lock.limit):
                    self._reset.release()
            finally:
                self._held.discard(me)  # before it looks at the epoch again: a next reset counts it, or closes first
        return gate.epoch

    def reset(self, reset: Callable[[], None]) -> None:
        """Reset Dynamo when no call is in flight: it frees what they run (C2; pytorch#193697).

        Raises:
            PatchesInUseError: inside a guarded call, or calls in flight do not end within the lock's limit.
        """
        me = threading.get_ident()
        if self._resetting == me:  # one of torch's two functions calls the other
            reset()
            return
        if self._calls_in_flight():
            raise PatchesInUseError(
                "cannot reset Dynamo inside a guarded call: it would free what the call runs; reset after it."
            )
        with self._reset:
            self._resetting, self._epoch_before = me, gate.epoch
            gate.close()
            try:
                deadline = time.monotonic() + fx_trace_lock.limit
                while not self._reset_if_idle(reset):
                    if time.monotonic() > deadline:
                        raise PatchesInUseError(
                            f"cannot reset Dynamo: calls are in flight in {_names(self._busy())}; end them."
                        )
                    time.sleep(0.0005)
            finally:
                gate.open()
                self._resetting = 0  # last: who finds the gate closed does not install in the middle of a reset

    def _busy(self) -> set[int]:
        return threads_running(self.calls.codes) - self._held - {self._resetting}

    def _reset_if_idle(self, reset: Callable[[], None]) -> bool:
        if self._busy():
            return False
        with fx_trace_lock:
            # Once more: a stack that goes on while it is looked at may not be seen whole, but who is about to enter an
            # entry in Dynamo's cache has waited for the lock, or waits.
            if self._busy():
                return False
            reset()
            return True

    def _calls_in_flight(self) -> int:
        return sum(self.calls.catch(frame.f_code) for frame in outwards(sys._getframe(1)))

    def _after_fork(self) -> None:
        if any(point.active for point in self.points):
            renew_property_locks()
        for point in self.points:
            if point.active:
                point.after_fork()
        gate.forget_pending()
        if self._resetting != threading.get_ident():
            self._reset = threading.Lock()
            if self._resetting:
                self._resetting, gate.epoch = 0, self._epoch_before

    def uninstall(self) -> None:
        """Put back every attribute that still is as it was left by the installation.

        Raises:
            PatchesInUseError: a guarded call or a trace is in flight.
        """
        if gate.epoch:
            self._check_idle()  # at once, and not after waiting for a compile
        with fx_trace_lock, self._guard:
            epoch = gate.epoch
            if not epoch:
                return
            gate.close()  # from here on a new guarded call waits for the locks and installs again
            try:
                self._check_idle()
            except PatchesInUseError:
                gate.epoch = epoch
                raise
            self._restore()

    def _check_idle(self) -> None:
        busy = threads_running(self.calls.codes.union(*(point.replacing_code() for point in self.points)))
        if busy:
            raise PatchesInUseError(
                f"cannot uninstall the patches: guarded calls or traces are in flight in {_names(busy)}; wait until they "
                "have returned."
            )

    def _restore(self) -> None:
        for point in reversed(self.points):
            if point.active:
                point.restore()

    def _warn_of_free_threads(self) -> None:
        if not getattr(sys, "_is_gil_enabled", lambda: True)() and not self._free_threads:
            self._free_threads = True
            warnings.warn(
                "this interpreter runs without its global lock, on which torch.compile and the patches rely: torch "
                "refuses to compile before Python 3.13.3, and nothing of safecompile was tested in it. Set PYTHON_GIL=1.",
                RuntimeWarning,
                stacklevel=5,
            )

    def _complain(self, *, strict: bool) -> None:
        text = (
            f"{len(self._mismatches)} patch points do not match this torch; what they protect is not protected, and traces "
            f"and compiles take turns instead: {'; '.join(self._mismatches)}"
        )
        if strict:
            if not gate.epoch:
                self._restore()
            raise PatchMismatchError(f"{text}. Use a supported torch, or install() without strict.")
        if not self._warned:
            self._warned = True
            warnings.warn(text, RuntimeWarning, stacklevel=5)


def _names(threads: set[int]) -> str:
    names = {t.ident: t.name for t in threading.enumerate()}
    return ", ".join(f"thread {names.get(ident, ident)!r}" for ident in sorted(threads))


def _install(point: PatchPoint) -> str | None:
    """Install one point; return why that was not possible."""
    try:
        if not point.needed():
            return None
        mismatch = point.mismatch()
        if mismatch is None:
            point.install()
    except Exception as error:
        return repr(error)
    return mismatch


patches = Patches()
