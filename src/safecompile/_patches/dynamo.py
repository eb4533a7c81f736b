"""Dynamo: one lock with an owner, and one compile for each graph however many threads ask for it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
import threading
import warnings
import weakref
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, cast

import torch

from safecompile._core.errors import WaitCycleError
from safecompile._core.forks import lock_across_forks
from safecompile._core.gate import Gate, LookAgain
from safecompile._patches.arguments import Arguments
from safecompile._patches.company import alone
from safecompile._patches.point import PatchPoint
from safecompile._patches.rewriting import copy_of, redirecting

if TYPE_CHECKING:
    from collections.abc import Callable

    from safecompile._core.lock import FXTraceLock
    from safecompile._patches.compiled_call import CompiledCalls
    from safecompile._patches.interpreter_exit import InterpreterExit

__all__ = [
    "CacheOrder",
    "CompileLock",
    "LazyBackward",
    "ResumeFunctions",
    "SingleFlight",
    "Stance",
    "compile_lock",
    "skip_frames_of",
]

# A miss that is one only for Dynamo's lookup (a guard that another thread's settings flip) must not go on for ever.
MOST_TRIES = 100

# The references to an object of a list in a loop over it: the list's, the variable's and sys.getrefcount's own.
NOBODY_ELSE = 3

_own_lock: Any = None


def compile_lock() -> Any:
    """Return torch's compile lock, also while our own stands in its place."""
    from torch._dynamo import convert_frame

    return _own_lock or convert_frame.compile_lock


def skip_frames_of(code: CodeType) -> None:
    """Make Dynamo run frames of ``code`` as they are (but still look at what they call)."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(code)


class CompileLock(PatchPoint):
    name = "compile-lock"
    protects = "waits for a compile that nobody can see the holder of, and that never end (D1)"
    upstream = "torch/_dynamo/convert_frame.py, compile_lock"

    def __init__(self, lock: FXTraceLock) -> None:
        super().__init__()
        self._lock = lock

    def mismatch(self) -> str | None:
        from torch._dynamo import convert_frame

        has_lock = hasattr(convert_frame, "compile_lock")
        return None if has_lock else "torch._dynamo.convert_frame has no compile_lock"

    def apply(self) -> None:
        global _own_lock  # noqa: PLW0603  torch has one compile lock, too
        from torch._dynamo import convert_frame

        _own_lock = convert_frame.compile_lock
        self.replace(convert_frame, "compile_lock", self._lock)

    def restore(self) -> None:
        global _own_lock  # noqa: PLW0603
        from torch._dynamo import convert_frame

        still_ours = cast("Any", convert_frame.compile_lock) is self._lock
        super().restore()
        if still_ours:
            convert_frame.compile_lock = _own_lock  # another one than before in a forked process
        _own_lock = None

    def after_fork(self) -> None:
        """Give the process a lock that no thread holds; the one that did was not forked (D2; pytorch#198246)."""
        global _own_lock  # noqa: PLW0603
        from torch._dynamo import callback

        if not compile_lock()._is_owned():
            _own_lock = threading.RLock()
            self._lock.forget_other_threads()
            # The same for the compiles that Dynamo believes to be going on.
            pending = "_CompilationCallbackHandler__pending_callbacks_counter"
            vars(callback.callback_handler).update({pending: 0, f"{pending}_lock": threading.Lock()})
            progress_bar: Any = vars(torch.hub)["tqdm"]  # FX's interpreter makes one, shown or not
            if hasattr(progress_bar, "set_lock"):
                progress_bar.set_lock(threading.RLock())


class SingleFlight(PatchPoint):
    name = "single-flight"
    protects = "N threads that make one first call compile it up to N times (E4)"
    upstream = "pytorch#123177; torch/_dynamo/convert_frame.py, CatchErrorsWrapper.__call__"

    def __init__(
        self,
        gate: Gate,
        lock: FXTraceLock,
        calls: CompiledCalls,
        count: FullgraphCount,
        interpreter_exit: InterpreterExit,
        reset: Callable[..., None],
    ) -> None:
        super().__init__()
        self._gate, self._lock, self._calls, self._count = gate, lock, calls, count
        self._exit, self._reset_when_idle = interpreter_exit, reset
        self._codes: list[CodeType] = []
        self._most_codes = 64

    def mismatch(self) -> str | None:
        from torch._dynamo import convert_frame, eval_frame

        for owner, name in (
            (convert_frame, "CatchErrorsWrapper"),
            (convert_frame, "ConvertFrameAssert"),
            (eval_frame, "innermost_backend"),
        ):
            if not hasattr(owner, name):
                return f"{owner.__name__} has no {name}"
        return None

    def apply(self) -> None:
        from torch._dynamo import convert_frame

        own = Path(SingleFlight._convert.__code__.co_filename).parent
        self._files = (convert_frame.ConvertFrame.__call__.__code__.co_filename, str(own))
        for name in ("reset", "reset_code_caches"):
            self.wrap(torch._dynamo, name, self._reset)
        self.wrap(convert_frame.CatchErrorsWrapper, "__call__", self._call_back)
        self.wrap(convert_frame.ConvertFrameAssert, "__call__", self._convert)

    def _reset(self, reset: Callable[[], None], _: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_exporting() and threading.active_count() > 1:
            return  # a strict export begins with a reset; other threads run what it would free
        self._reset_when_idle(reset)

    def _call_back(self, call_back: Callable[..., Any], callback: Any, args: Any, kwargs: Any) -> Any:
        """Stand before Dynamo's wait for the compile lock.

        Dynamo moves the entry of a hit to the front of its list. A thread that walks the list meanwhile can miss
        an entry that is there: it would wait for the lock, and compile it once more.
        """
        retry = self._retry_frame(self._caller(sys._getframe(1)))
        if retry is not None and retry.f_locals["tries"] < MOST_TRIES and _has_entry(callback, args[0]):
            raise LookAgain
        try:
            return call_back(*args, **kwargs)
        except WaitCycleError as error:
            if error.waiter != threading.get_ident():
                raise
            code = args[0].f_code
            warnings.warn(
                f"{code.co_name} ({code.co_filename}:{code.co_firstlineno}) runs eagerly, this once: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            return self._run_once_as_it_is("its compile would wait for ever")

    def _convert(self, convert: Callable[..., Any], converter: Any, args: Any, kwargs: Any) -> Any:
        """Stand around one conversion. torch holds the compile lock here."""
        frame = args[0]
        code = frame.f_code
        retry = self._retry_frame(self._caller(sys._getframe(1)))
        if retry is not None:
            if not self._gate.admit(code, retry.f_locals["seen"]):
                raise LookAgain
        elif self._finished_meanwhile(converter, frame):
            return self._run_once_as_it_is("compiled by another thread")
        self._exit.before_compile()
        with self._lock.doing(f"compiling {code.co_name} ({code.co_filename}:{code.co_firstlineno})"):
            arguments = Arguments(frame.f_locals)
            try:
                result = _converted(convert, args, kwargs)
            except Exception as error:
                blamed = arguments.blame(error, code.co_name)
                if blamed is None:
                    raise
                raise blamed from error
        entry = getattr(result, "guarded_code", None)
        self._keep(code, getattr(entry, "code", None))
        if entry is not None:
            self._gate.finish(code, _inserted(entry.guard_manager))
        return result

    def _keep(self, *codes: CodeType | None) -> None:
        """Hold code until nobody else does, and let go of it here.

        torch would free what a captured traceback has last under a mutex that others wait for with the interpreter
        lock; what Dynamo does when the code is freed can let them run.
        """
        self._codes += filter(None, codes)
        if len(self._codes) > self._most_codes:
            self._codes = [code for code in self._codes if sys.getrefcount(code) > NOBODY_ELSE]
            self._most_codes = 2 * len(self._codes) + 64

    def _caller(self, frame: FrameType) -> FrameType:
        """Return the frame that has called the converted one, from a frame of Dynamo's callback."""
        while frame.f_code is not _RESUME_CODE and frame.f_code.co_filename.startswith(self._files):
            frame = cast("FrameType", frame.f_back)
        return frame

    def _retry_frame(self, caller: FrameType) -> FrameType | None:
        """Return the frame that will call again on ``LookAgain``, if nothing of the user's runs in between.

        By the identity of frames and not by code and name: a plain compiled object over the same code,
        called in the eager part of a guarded call, must not unwind that part.
        """
        while _calls_forward_first(caller):
            caller = cast("FrameType", caller.f_back)
        return caller if caller.f_code is _RESUME_CODE or self._calls.catch(caller.f_code) else None

    def _finished_meanwhile(self, converter: Any, frame: Any) -> bool:
        """Look in Dynamo's cache again, for a frame that cannot be called again (a function called in an eager part)."""
        from torch._C._autograd import _top_saved_tensors_default_hooks

        if not self._gate.finished_elsewhere(frame.f_code):
            return False
        if _top_saved_tensors_default_hooks(True) is not None:
            # In a checkpoint the frame must save the same tensors as in the recomputation, which is compiled.
            return False
        return _has_entry(converter, frame)

    def _run_once_as_it_is(self, why: str) -> Any:
        from torch._dynamo import types

        self._count.excuse()
        skip = types.FrameExecStrategy(types.FrameAction.SKIP, types.FrameAction.SKIP)  # type: ignore[attr-defined]
        return types.ConvertFrameReturn(frame_exec_strategy=skip, apply_to_code=False, skip_reason=why)


def _calls_forward_first(frame: FrameType) -> bool:
    """Tell whether ``frame`` is ``nn.Module``'s own around a forward, and no hook stands before that."""
    from torch.nn.modules import module

    if frame.f_code.co_filename != module.__file__ or "self" not in frame.f_locals:
        return False
    names = ("forward_pre_hooks", "backward_pre_hooks", "backward_hooks")
    return not any(getattr(frame.f_locals["self"], f"_{n}") or getattr(module, f"_global_{n}") for n in names)


def _converted(convert: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Convert the frame; do it again if another thread has changed a setting that the guards look at."""
    from torch._C._dynamo.guards import GlobalStateGuard

    while True:
        state = GlobalStateGuard()
        try:
            return convert(*args, **kwargs)
        except Exception:
            if state.check() or alone():
                raise


def _has_entry(callback: Any, frame: Any) -> bool:
    """Tell whether Dynamo's cache has an entry for this frame."""
    from torch._C._dynamo import eval_frame as c_eval_frame
    from torch._dynamo.eval_frame import innermost_backend

    backend = innermost_backend(callback)
    get_region = getattr(c_eval_frame, "get_eval_frame_isolate_recompiles_id", lambda: -1)
    regions = (-1, get_region())
    return any(
        entry.backend == backend
        and getattr(entry, "isolate_recompiles_id", -1) in regions
        and entry.guard_manager.check(frame.f_locals)
        for entry in c_eval_frame._debug_get_cache_entry_list(frame.f_code)
    )


def _inserted(guard_manager: Any) -> Callable[[], bool]:
    reference = weakref.ref(guard_manager)

    def inserted() -> bool:
        manager = reference()
        return manager is None or manager.cache_entry is not None

    return inserted


class CacheOrder(PatchPoint):
    name = "cache-order"
    protects = "a recomputation runs another compiled variant than its forward, after other threads' new shapes (E6)"
    upstream = "pytorch#166926; torch/csrc/dynamo/extra_state.cpp, _set_lru_cache"

    def needed(self) -> bool:
        from torch._C._dynamo import eval_frame

        return hasattr(eval_frame, "_set_lru_cache")  # torch 2.10 and newer

    def mismatch(self) -> str | None:
        return None

    def apply(self) -> None:
        self._look_at_the_oldest_first(True)

    def restore(self) -> None:
        if self.active:
            self._look_at_the_oldest_first(False)
        super().restore()

    def _look_at_the_oldest_first(self, on: bool) -> None:
        from torch._C._dynamo import eval_frame

        eval_frame._set_lru_cache(not on)  # type: ignore[attr-defined]


class Stance(PatchPoint):
    name = "stance"
    protects = "set_stance in one thread decides for all, and is left behind by out-of-order exits (S7, P2)"
    upstream = "torch/_dynamo/eval_frame.py, _set_stance"

    def __init__(self) -> None:
        super().__init__()
        self._guard = lock_across_forks()
        self._default: Any = None
        self._own: dict[int, Any] = {}

    def mismatch(self) -> str | None:
        from torch._dynamo import eval_frame

        has = hasattr(eval_frame, "_set_stance") and hasattr(eval_frame, "_stance")
        return None if has else "torch._dynamo.eval_frame has no _set_stance"

    def apply(self) -> None:
        from torch._dynamo import eval_frame

        self._default = eval_frame._stance
        original = copy_of(eval_frame._set_stance)
        self.recode(cast("Any", eval_frame._set_stance), redirecting(functools.partial(self._set, original)))
        # In place of the one stance only while some thread has its own: warm calls read it.
        self._each = type("StanceOfThisThread", (), {"__getattr__": lambda _, name: getattr(self._mine(), name)})()

    def restore(self) -> None:
        from torch._dynamo import eval_frame

        if self.active and eval_frame._stance is self._each:
            eval_frame._stance = self._mine()
        self._own.clear()
        super().restore()

    def _mine(self) -> Any:
        return self._own.get(threading.get_ident(), self._default)

    def _set(self, original: Callable[[Any], Any], stance: Any) -> Any:
        from torch._dynamo import eval_frame

        with self._guard:
            original(eval_frame._stance)  # refuses inside a compiled region
            prior = self._mine()
            alive = {thread.ident for thread in threading.enumerate()}
            self._own = {ident: own for ident, own in self._own.items() if ident in alive}
            self._own[threading.get_ident()] = stance
            if stance == self._default:
                del self._own[threading.get_ident()]
            eval_frame._stance = self._each if self._own else self._default
            return prior


class _Call(threading.local):
    ticket: int | None = None
    excused = False


class FullgraphCount(PatchPoint):
    name = "fullgraph-count"
    protects = 'a fullgraph=True call beside others dies with "found no compiled frames" (S7)'
    upstream = "torch/_dynamo/eval_frame.py, set_fullgraph_compiled_frame_count"

    def __init__(self) -> None:
        super().__init__()
        self._call = _Call()
        self._tickets = itertools.count()

    def needed(self) -> bool:
        from torch._dynamo import eval_frame

        return hasattr(eval_frame, "set_fullgraph_compiled_frame_count")

    def mismatch(self) -> str | None:
        return None

    def apply(self) -> None:
        from torch._dynamo import eval_frame

        self.wrap(eval_frame, "set_fullgraph_compiled_frame_count", self._set)

    def _set(self, set_count: Callable[[int], int], _: Any, args: Any, kwargs: Any) -> int:
        """Start (0) or end (-1) the count of a call. The process has one count; only an undisturbed one is believed."""
        mine = self._call.ticket
        starts = args[0] == 0
        if starts == (mine is not None):
            return 0 if starts else -1  # inside a call that is counted already, or after its end
        if starts:
            self._call.excused = False
            next(self._tickets)  # before, so that others see that their count is disturbed
            set_count(0)
            self._call.ticket = next(self._tickets)
            return -1
        self._call.ticket = None
        count = set_count(-1)
        undisturbed = mine is not None and next(self._tickets) == mine + 1
        return count if undisturbed and not self._call.excused else max(count, 1)

    def excuse(self) -> None:
        """Let the calling thread's call end without a compiled frame: it was run as it is, this once."""
        self._call.excused = True


class ResumeFunctions(PatchPoint):
    name = "resume-functions"
    protects = "what follows a graph break is compiled by every thread that gets there (E4)"
    upstream = "torch/_dynamo/output_graph.py, install_global_unsafe"

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self._gate = gate

    def mismatch(self) -> str | None:
        from torch._dynamo.output_graph import OutputGraph

        has_method = hasattr(OutputGraph, "install_global_unsafe")
        return None if has_method else "torch._dynamo.output_graph.OutputGraph has no install_global_unsafe"

    def apply(self) -> None:
        from torch._dynamo.output_graph import OutputGraph

        skip_frames_of(_RESUME_CODE)
        self.wrap(OutputGraph, "install_global_unsafe", self._install_global)

    def _install_global(self, install: Callable[..., None], _: Any, args: Any, kwargs: Any) -> None:
        def wrapped(name: str, value: Any) -> None:
            if name.startswith("__resume_at_"):
                if value.__name__ == name:
                    value = _resumable(self._gate, value)
                else:  # resume functions with free variables are made by a factory at run time
                    value = functools.partial(_resumable_from, self._gate, value)
            install(name, value)

        wrapped(*args, **kwargs)


def _resumable(gate: Gate, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a resume function so that it can be called again: none of it has run when Dynamo calls back."""

    def resume(*args: Any, **kwargs: Any) -> Any:
        callback, tries = get_eval_frame_callback(), 0
        while True:
            seen = gate.epoch  # noqa: F841  the gate reads it, and tries, from this frame
            try:
                return function(*args, **kwargs)
            except LookAgain:
                tries += 1
                # Dynamo switches itself off for the thread when its callback raises.
                set_eval_frame(callback)

    from torch._C._dynamo.eval_frame import get_eval_frame_callback, set_eval_frame

    # The rest of an outer function may be traced together with an inner one's: then without this wrapper.
    resume._torchdynamo_inline = function  # type: ignore[attr-defined]
    return resume


def _resumable_from(gate: Gate, factory: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    return _resumable(gate, factory(*args))


_RESUME_CODE = next(
    constant for constant in _resumable.__code__.co_consts if getattr(constant, "co_name", "") == "resume"
)


class LazyBackward(PatchPoint):
    name = "lazy-backward"
    protects = "threads whose first backwards meet compile the same backward several times (E4, E5)"
    upstream = "torch/_functorch/_aot_autograd/runtime_wrappers.py; pytorch#170605"

    def __init__(self, lock: FXTraceLock) -> None:
        super().__init__()
        self._lock = lock

    def mismatch(self) -> str | None:
        from torch._functorch._aot_autograd import runtime_wrappers

        names = ("_AutogradBackwardCompiler", "AOTDispatchAutograd")
        return None if any(hasattr(runtime_wrappers, name) for name in names) else f"AOTAutograd has none of {names}"

    def apply(self) -> None:
        from torch._functorch._aot_autograd import runtime_wrappers

        if hasattr(runtime_wrappers, "_AutogradBackwardCompiler"):
            self.wrap(runtime_wrappers._AutogradBackwardCompiler, "get_or_compile", self._get_or_compile)
        else:  # torch 2.12 and older
            self.wrap(runtime_wrappers.AOTDispatchAutograd, "post_compile", self._post_compile)

    def _get_or_compile(self, compile_it: Callable[..., Any], compiler: Any, args: Any, kwargs: Any) -> Any:
        if compiler.compiled_bw is not None:
            return compiler.compiled_bw
        # Only the compile is under the lock, not the backward; torch looks again under it.
        with self._lock, self._lock.doing("compiling a backward"):
            return compile_it(*args, **kwargs)

    def _post_compile(self, post_compile: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
        """Give the function that is being made a backward compiler that compiles once; torch does not look again."""

        def once(value: Any) -> Any:
            if getattr(value, "bw_compiler", None) is None:
                return value
            done: list[Any] = []

            def compile_once(*args: Any, **kwargs: Any) -> Any:
                with self._lock, self._lock.doing("compiling a backward"):
                    if not done:
                        done.append(value.bw_compiler(*args, **kwargs))
                    return done[0]

            return dataclasses.replace(value, bw_compiler=compile_once)

        return post_compile(*map(once, args), **{name: once(value) for name, value in kwargs.items()})
