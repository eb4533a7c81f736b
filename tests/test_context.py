"""`capture_context`: a worker computes under the settings of the thread that captured them."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config

from safecompile import ContextConflictError, capture_context, thread_safe_compile
from tests.helpers.backends import CountingBackend
from tests.helpers.threads import gather_threads, run_threads, switch_interval
from tests.helpers.torch_version import RECOMPILE_LIMIT, TORCH

SECONDS = 30.0
THREAD_OWN_CONFIG = TORCH >= (2, 12)


def in_worker(function: Callable[[], Any]) -> Any:
    (result,) = run_threads([function])
    return result


def configuration() -> tuple[Any, ...]:
    return (
        getattr(torch._dynamo.config, RECOMPILE_LIMIT),
        torch._inductor.config.freezing,
        torch._inductor.config.triton.cudagraphs,
        torch._functorch.config.activation_memory_budget,
    )


def default_device_in_force() -> torch.device | None:
    if TORCH < (2, 8):  # it tells what set_default_device was given, and not that of a `with torch.device(...)`
        return torch.empty(0).device
    try:
        return torch.get_default_device()
    except AttributeError:  # torch 2.8, once set_default_device(None) was called
        return torch.device("cpu")


def settings_in_force() -> dict[str, Any]:
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "device": default_device_in_force(),
        "device of new": torch.empty(1).device,
        "dtype": torch.get_default_dtype(),
        # Before torch 2.12 it is the process's: there is nothing to carry.
        "config": configuration() if THREAD_OWN_CONFIG else None,
    }


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)
        kept: Any = vars(torch)["_GLOBAL_DEVICE_CONTEXT"]
        if getattr(kept, "device_context", device) is None:  # get_default_device() of torch 2.8 and older raises then
            del kept.device_context


@contextlib.contextmanager
def config() -> Iterator[None]:
    with (
        torch._dynamo.config.patch({RECOMPILE_LIMIT: 77}),
        torch._inductor.config.patch({"freezing": True, "triton.cudagraphs": True}),
        torch._functorch.config.patch(activation_memory_budget=0.5),
    ):
        yield


@contextlib.contextmanager
def all_at_once() -> Iterator[None]:
    with config(), torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", torch.float16):
        yield


SETTINGS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "inference_mode with grad": lambda: torch.inference_mode(mode=False),
    "autocast": lambda: torch.autocast("cpu"),
    "autocast float16": lambda: torch.autocast("cpu", torch.float16),
    "autocast without cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "device as context": lambda: torch.device("meta"),
    "default device": lambda: default_device("meta"),
    "configuration": config,
    "all at once": all_at_once,
}


@pytest.fixture(params=SETTINGS)
def setting(request: pytest.FixtureRequest) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    return SETTINGS[request.param]


Setting = Callable[[], contextlib.AbstractContextManager[Any]]


# ---------------------------------------------------------------------------------------------------------- carried


def test_a_worker_computes_under_the_captured_settings_and_gets_its_own_back(setting: Setting) -> None:
    with setting():
        context, mine = capture_context(), settings_in_force()

    def work() -> None:
        before = settings_in_force()
        with context as entered:
            assert entered is context
            assert settings_in_force() == mine
        assert settings_in_force() == before
        assert context.run(settings_in_force) == mine
        assert settings_in_force() == before

    in_worker(work)


def test_a_workers_own_settings_are_put_back(setting: Setting) -> None:
    context, mine = capture_context(), settings_in_force()

    def work() -> None:
        with setting():
            before = settings_in_force()
            assert context.run(settings_in_force) == mine
            assert settings_in_force() == before

    in_worker(work)


@pytest.mark.parametrize("name", ["no_grad", "inference_mode", "autocast", "device as context", "default device"])
def test_control_a_worker_without_the_context_has_other_settings(name: str) -> None:
    with SETTINGS[name]():
        mine = settings_in_force()
        assert in_worker(settings_in_force) != mine


@pytest.mark.skipif(not THREAD_OWN_CONFIG, reason="before torch 2.12 the configuration is the process's")
def test_control_a_worker_without_the_context_has_the_default_configuration() -> None:
    default = configuration()
    with config():
        assert configuration() == (77, True, True, 0.5)
        assert in_worker(configuration) == default


@pytest.mark.skipif(not THREAD_OWN_CONFIG, reason="before torch 2.12 the configuration is the process's")
def test_a_value_assigned_on_the_main_thread_reaches_the_worker() -> None:
    before = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = 78
    try:
        context = capture_context()
        assert in_worker(lambda: context.run(lambda: torch._dynamo.config.recompile_limit)) == 78
        assert in_worker(lambda: torch._dynamo.config.recompile_limit) == before
    finally:
        torch._dynamo.config.recompile_limit = before


@pytest.mark.skipif(not THREAD_OWN_CONFIG, reason="before torch 2.12 the configuration is the process's")
def test_a_value_that_is_a_list_is_the_one_that_was_captured() -> None:
    with torch._dynamo.config.patch(reorderable_logging_functions={print}):
        context = capture_context()
        torch._dynamo.config.reorderable_logging_functions.add(lambda _: None)
    seen = in_worker(lambda: context.run(lambda: set(torch._dynamo.config.reorderable_logging_functions)))
    assert seen == {print}


@pytest.mark.skipif(THREAD_OWN_CONFIG, reason="from torch 2.12 on the configuration is the thread's")
def test_a_configuration_of_the_process_is_left_alone() -> None:
    before = configuration()
    with config():
        context = capture_context()
    assert in_worker(lambda: context.run(configuration)) == configuration() == before


def context_with_default_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return capture_context()
    finally:
        torch.set_default_dtype(before)


def test_the_default_dtype_is_carried_and_put_back() -> None:
    context = context_with_default_dtype(torch.float64)
    assert in_worker(lambda: context.run(lambda: torch.ones(1).dtype)) == torch.float64
    assert torch.get_default_dtype() == torch.float32


def carry_a_number_of_intra_op_threads() -> tuple[tuple[int, int, int], int]:
    """Carry the number 2 from one thread to another, whose own is 3.

    Returns:
        The worker's number before, under and after the context, and the number of a thread that is started later.
    """
    set_by_worker, captured = threading.Event(), threading.Event()
    contexts: list[Any] = []

    def work() -> tuple[int, int, int]:
        torch.get_num_threads()  # a thread's first use of torch takes over the process's number
        torch.set_num_threads(3)
        set_by_worker.set()
        assert captured.wait(SECONDS)
        return torch.get_num_threads(), contexts[0].run(torch.get_num_threads), torch.get_num_threads()

    def capture() -> None:
        assert set_by_worker.wait(SECONDS)
        torch.set_num_threads(2)
        contexts.append(capture_context())
        captured.set()

    before = torch.get_num_threads()
    try:
        seen, _ = run_threads([work, capture])
        assert seen is not None
        return seen, in_worker(torch.get_num_threads)
    finally:
        torch.set_num_threads(before)


def test_the_number_of_intra_op_threads_is_carried_and_put_back() -> None:
    seen, _ = carry_a_number_of_intra_op_threads()
    assert seen == (3, 2, 3)


def test_the_number_put_back_last_is_that_of_threads_started_later() -> None:
    # torch's own way: whichever thread sets the number sets it for itself and for all threads that start later.
    _, of_new_thread = carry_a_number_of_intra_op_threads()
    assert of_new_thread == 3


def test_the_autocast_cache_is_carried_to_a_worker_that_autocasts_alike() -> None:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        context = capture_context()

    def work() -> bool:
        with torch.autocast("cpu", torch.bfloat16):
            return context.run(torch.is_autocast_cache_enabled)

    assert in_worker(work) is False


# ---------------------------------------------------------------------------------------------------------- ways


def test_arguments_and_result_pass_through_run() -> None:
    def function(a: int, *, b: int) -> tuple[int, int]:
        return a, b

    assert capture_context().run(function, 1, b=2) == (1, 2)


def in_force_for_good() -> dict[str, Any]:
    """Return what a thread has that applies the settings of this one."""
    settings = settings_in_force()
    on, _ = settings["autocast"]
    return {**settings, "autocast cache": settings["autocast cache"] and not on}


def test_a_pool_can_apply_it_in_each_of_its_threads(setting: Setting) -> None:
    with setting():
        context, mine = capture_context(), in_force_for_good()
    together = threading.Barrier(3)

    def work(_: int) -> dict[str, Any]:
        together.wait(SECONDS)
        return settings_in_force()

    with ThreadPoolExecutor(3, initializer=context.apply) as pool:
        assert list(pool.map(work, range(3))) == [mine] * 3
        assert list(pool.map(work, range(3))) == [mine] * 3
    after = in_worker(settings_in_force)
    assert after == settings_in_force()


def products_before_and_after_a_step(start: Callable[[], Any]) -> list[float]:
    """Multiply by a weight in a thread that `start` has prepared, change the weight, and multiply again."""
    weight, x = torch.nn.Parameter(torch.ones(4, 4)), torch.ones(1, 4)

    def work() -> list[float]:
        kept = start()
        before = (x @ weight).mean().item()
        with torch.no_grad():
            weight.fill_(5.0)
        after = (x @ weight).mean().item()
        del kept
        return [before, after]

    products: list[float] = in_worker(work)
    return products


def test_weights_that_change_after_autocast_was_applied_for_good_are_seen() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        context = capture_context()
    assert products_before_and_after_a_step(context.apply) == [4.0, 20.0]


def test_control_autocast_that_never_ends_computes_with_weights_as_they_were() -> None:
    def start() -> Any:
        entered = torch.autocast("cpu", torch.bfloat16)
        entered.__enter__()
        return entered

    assert products_before_and_after_a_step(start) == [4.0, 4.0]


def test_a_thread_may_apply_one_after_another(setting: Setting) -> None:
    with setting():
        context, mine = capture_context(), in_force_for_good()
    other = capture_context()

    def work() -> None:
        for _ in range(2):
            other.apply()
            context.apply()
            gc.collect()
            assert settings_in_force() == mine

    in_worker(work)
    assert in_worker(settings_in_force) == settings_in_force()


def test_blocks_may_be_nested_in_each_other_and_in_themselves() -> None:
    with torch.no_grad():
        outer, in_outer = capture_context(), settings_in_force()
    with all_at_once():
        inner, in_inner = capture_context(), settings_in_force()

    def work() -> None:
        before = settings_in_force()
        with outer:
            with inner:
                with outer, outer:
                    assert settings_in_force() == in_outer
                assert settings_in_force() == in_inner
            assert settings_in_force() == in_outer
        assert settings_in_force() == before

    in_worker(work)


def test_an_error_in_the_block_puts_the_settings_back_and_goes_on(setting: Setting) -> None:
    with setting():
        context = capture_context()

    def work() -> None:
        before = settings_in_force()
        with pytest.raises(KeyError, match="mine"), context:
            raise KeyError("mine")
        assert settings_in_force() == before

    in_worker(work)


def test_threads_may_use_one_context_at_the_same_time(setting: Setting) -> None:
    with setting():
        context, mine = capture_context(), settings_in_force()
    inside = threading.Barrier(4)

    def work(index: int) -> None:
        before = settings_in_force()
        with context:
            inside.wait(SECONDS)
            assert settings_in_force() == mine
            inside.wait(SECONDS)
        assert settings_in_force() == before
        for _ in range(5):
            assert context.run(settings_in_force) == mine
        assert settings_in_force() == before

    with switch_interval():
        run_threads(work, 4)


def test_threads_may_use_different_contexts_at_the_same_time() -> None:
    contexts: list[Any] = []
    for make in (torch.no_grad, torch.inference_mode, SETTINGS["autocast"], SETTINGS["configuration"]):
        with make():
            contexts.append((capture_context(), settings_in_force()))
    inside = threading.Barrier(len(contexts))

    def work(index: int) -> None:
        context, mine = contexts[index]
        with context:
            inside.wait(SECONDS)
            assert settings_in_force() == mine
            inside.wait(SECONDS)

    run_threads(work, len(contexts))


def enter_beside(first: Any, second: Any) -> tuple[torch.dtype | BaseException | None, torch.dtype]:
    """Enter a context on one thread, and another one on a second thread meanwhile.

    Returns:
        The default dtype that the second thread saw after the first had left its block, or what it raised; and the
        default dtype in the first thread's block after the second had entered its own, or failed to.
    """
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()

    def work() -> torch.dtype:
        with first:
            first_in.set()
            assert second_in.wait(SECONDS)
            seen = torch.get_default_dtype()
        first_out.set()
        return seen

    def enter() -> torch.dtype:
        assert first_in.wait(SECONDS)
        try:
            with second:
                second_in.set()
                assert first_out.wait(SECONDS)
                return torch.get_default_dtype()
        finally:
            second_in.set()

    seen, entered = gather_threads([work, enter])
    assert isinstance(seen, torch.dtype), seen
    return entered, seen


def test_another_default_dtype_is_refused_while_a_thread_is_inside_a_context() -> None:
    before = settings_in_force()
    with torch.no_grad():
        of_this = context_with_default_dtype(torch.float64)
    error, seen = enter_beside(of_this, context_with_default_dtype(torch.float16))
    assert isinstance(error, ContextConflictError)
    first_line = str(error).splitlines()[0]
    assert "torch.float16" in first_line and "torch.float64" in first_line
    assert seen == torch.float64
    assert settings_in_force() == before


def test_a_refused_worker_keeps_its_own_settings() -> None:
    with all_at_once():
        context = context_with_default_dtype(torch.float16)

    def work() -> None:
        before = settings_in_force()
        with pytest.raises(ContextConflictError), context:
            pass
        with pytest.raises(ContextConflictError):
            context.apply()
        assert settings_in_force() == before

    with context_with_default_dtype(torch.float64):
        in_worker(work)
    in_worker(lambda: context.run(lambda: None))  # and is let in afterwards


def test_a_context_without_a_default_dtype_of_its_own_is_in_conflict_too() -> None:
    error, seen = enter_beside(context_with_default_dtype(torch.float64), capture_context())
    assert isinstance(error, ContextConflictError) and seen == torch.float64


def test_blocks_with_one_default_dtype_may_overlap_and_the_last_one_out_puts_it_back() -> None:
    dtype, seen = enter_beside(context_with_default_dtype(torch.float64), context_with_default_dtype(torch.float64))
    assert dtype == seen == torch.float64
    assert torch.get_default_dtype() == torch.float32


def test_default_dtypes_may_be_nested_in_one_thread() -> None:
    double, half = context_with_default_dtype(torch.float64), context_with_default_dtype(torch.float16)

    def work() -> list[torch.dtype]:
        seen = []
        with double:
            with half, half:
                seen.append(torch.get_default_dtype())
                seen.append(double.run(torch.get_default_dtype))
                seen.append(torch.get_default_dtype())
            seen.append(torch.get_default_dtype())
        return [*seen, torch.get_default_dtype()]

    float16, float32, float64 = torch.float16, torch.float32, torch.float64
    assert in_worker(work) == [float16, float64, float16, float64, float32]


def applied_then_dropped() -> tuple[bool, bool]:
    """Apply a context on a worker, drop the last reference here; return the worker's inference mode, this thread's grad mode."""
    with torch.inference_mode():
        contexts = [capture_context()]
    applied, dropped = threading.Event(), threading.Event()

    def work() -> bool:
        contexts[0].apply()
        applied.set()
        assert dropped.wait(SECONDS)
        return torch.is_inference_mode_enabled()

    def drop() -> bool:
        assert applied.wait(SECONDS)
        with torch.no_grad():
            contexts.clear()
            gc.collect()
            dropped.set()
            return torch.is_grad_enabled()

    inference, grad = run_threads([work, drop])
    return inference, grad


def test_applied_settings_last_though_the_context_is_dropped() -> None:
    inference, _ = applied_then_dropped()
    assert inference is True


def test_dropping_a_context_that_a_worker_applied_changes_nothing_in_this_thread() -> None:
    _, grad = applied_then_dropped()
    assert grad is False


# ---------------------------------------------------------------------------------------------------------- compiling


VARIANTS: dict[str, Setting] = {
    name: SETTINGS[name]
    for name in ("no_grad", "inference_mode", "autocast", "autocast without cache", "configuration", "default device")
}


def warm(setting: Setting) -> tuple[Callable[[torch.Tensor], torch.Tensor], CountingBackend, torch.Tensor, Any, Any]:
    backend = CountingBackend()
    linear = torch.nn.Linear(4, 4)

    @thread_safe_compile(backend=backend)
    def f(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = linear(x)
        return y

    x = torch.randn(2, 4)
    with setting():
        y = f(x)
        context = capture_context()
    assert backend.count == 1
    return f, backend, x, y, context


def kind(y: torch.Tensor) -> tuple[torch.dtype, bool, bool]:
    return y.dtype, y.requires_grad, y.is_inference()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", VARIANTS)
def test_a_worker_compiles_no_variant_of_its_own(name: str) -> None:
    f, backend, x, y, context = warm(VARIANTS[name])

    def work(_: int) -> torch.Tensor:
        result: torch.Tensor = context.run(f, x)
        return result

    # torch keeps what set_default_device was given in a process-wide name, too, on which Dynamo guards.
    still = VARIANTS[name] if name == "default device" else contextlib.nullcontext
    with still(), switch_interval():
        results = run_threads(work, 3)
    assert backend.count == 1
    assert all(kind(result) == kind(y) for result in results)
    assert all(torch.equal(result, y) for result in results)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", ["no_grad", "inference_mode", "autocast"])
def test_control_a_worker_without_the_context_compiles_a_variant_of_its_own(name: str) -> None:
    f, backend, x, y, _ = warm(VARIANTS[name])
    result = in_worker(lambda: f(x))
    assert backend.count == 2
    assert kind(result) != kind(y)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.skipif(not THREAD_OWN_CONFIG, reason="before torch 2.12 the configuration is the process's")
def test_a_worker_recompiles_as_often_as_the_captured_configuration_lets_it() -> None:
    def drive() -> str:
        backend = CountingBackend()
        f = thread_safe_compile(lambda x: x + 1, backend=backend, fullgraph=True, dynamic=False)
        try:
            for size in range(2, 14):
                f(torch.ones(size))
        except Exception as error:
            return type(error).__name__
        return f"{backend.count} graphs"

    with torch._dynamo.config.patch(recompile_limit=77):
        context = capture_context()
    assert in_worker(lambda: context.run(drive)) == "12 graphs"
    # The control: without the context the worker has the default limit.
    assert in_worker(drive) == "FailOnRecompileLimitHit"
