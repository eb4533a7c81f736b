"""First launches of kernels that are tuned when they are first used: one thread tunes, the others wait for it."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import pytest
import torch

import safecompile
from safecompile import thread_safe_compile
from safecompile._core.turns import Turns
from safecompile._patches.first_launches import FirstLaunches
from safecompile.doctor.programs import e9_triton_autotuner
from tests.helpers.threads import gather_threads, run_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of Inductor on a GPU

# Seconds for which a thread that tunes waits for others to join in, which they do on torch alone only.
JOIN = 1.0

with_and_without = pytest.mark.parametrize("library", [True, False], ids=["with the library", "control"])
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


@pytest.fixture
def point(monkeypatch: pytest.MonkeyPatch) -> Iterator[FirstLaunches]:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    point = FirstLaunches(Turns(lambda: 60.0))
    yield point
    point.restore()


class Tunings:
    """Counts measurements, and lets the first wait for a second one that is made at the same time."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self._guard, self._another = threading.Lock(), threading.Event()

    def measure(self, time: float) -> float:
        with self._guard:
            self.begun.append(threading.get_ident())
            first = len(self.begun) == 1
            if len(set(self.begun)) > 1:
                self._another.set()
        if first:
            self._another.wait(JOIN)
        return time


def inductor_tuner(tunings: Tunings, times: list[float]) -> Any:
    """Make Inductor's autotuner around launchers that take these times."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    def result(time: float) -> Any:
        config = SimpleNamespace(time=time)
        launch = MagicMock(return_value=time, config=config, store_cubin=False, cache_hash="")
        launch._expected_positional_count = None
        return SimpleNamespace(config=config, make_launcher=lambda: launch)

    class Tuner(CachingAutotuner):
        def __init__(self) -> None:
            self.compile_results = [result(time) for time in times]
            self.launchers = [one.make_launcher() for one in self.compile_results]
            self.triton_meta, self.inductor_meta = {"device": 0}, {}
            self.fn, self.coordesc_tuner, self.precompile_time_taken_ns = MagicMock(__name__="k"), MagicMock(), 0
            self.__dict__.update(device_props=SimpleNamespace(type="cuda", index=0), _plugins=[])

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return None

        def bench(self, launcher: Any, *args: Any, **kwargs: Any) -> float:
            return tunings.measure(launcher.config.time)

        def get_device_interface(self) -> Any:
            return MagicMock()

        def _pre_launch(self, *args: Any, **kwargs: Any) -> None: ...
        def _post_launch(self, *args: Any, **kwargs: Any) -> None: ...

    return Tuner()


def patch_inductor(point: FirstLaunches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apply the point where Triton is not installed, too."""
    monkeypatch.setattr("safecompile._patches.first_launches._autotuner", lambda: type("Autotuner", (), {"run": None}))
    point.install()


@with_and_without
def test_inductors_kernels_are_tuned_once(library: bool, point: FirstLaunches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: each thread measures all of them, beside the others."""
    if library:
        patch_inductor(point, monkeypatch)
    tunings = Tunings()
    tuner = inductor_tuner(tunings, [3.0, 1.0, 2.0])
    results = run_threads([lambda: tuner.run(stream=0)] * 2)
    assert results == [1.0, 1.0]
    assert len(tunings.begun) == (3 if library else 6)
    tuner.run(stream=0)
    assert len(tunings.begun) == (3 if library else 6)


@with_and_without
def test_a_thread_that_comes_late_puts_no_launchers_back(
    library: bool, point: FirstLaunches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: all launchers are there again, and the thread that has tuned finds too many to unpack."""
    if library:
        patch_inductor(point, monkeypatch)
    tuner = inductor_tuner(Tunings(), [3.0, 1.0])
    results = list(tuner.compile_results)
    tuner.autotune_to_one_config()
    if tuner.compile_results != results or not hasattr(type(tuner), "_make_launchers"):
        pytest.skip("this torch makes launchers once")
    tuner._make_launchers()
    assert len(tuner.launchers) == (1 if library else 2)


def test_a_tuning_that_fails_is_tried_again(point: FirstLaunches, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_inductor(point, monkeypatch)
    tuner = inductor_tuner(Tunings(), [3.0, 1.0])
    tuner.bench = MagicMock(side_effect=RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        tuner.run(stream=0)
    del tuner.bench
    assert tuner.run(stream=0) == 1.0


@with_and_without
def test_coordinate_descent_is_made_once(library: bool, point: FirstLaunches, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    tunings = Tunings()

    def descend(self: Any, launcher: Any, *args: Any, **kwargs: Any) -> Any:
        tunings.measure(0.0)
        launcher.config.found_by_coordesc = True
        return launcher

    monkeypatch.setattr(CachingAutotuner, "coordinate_descent_tuning", descend)
    if library:
        patch_inductor(point, monkeypatch)
    tuner = inductor_tuner(tunings, [1.0])
    tuner.inductor_meta["coordinate_descent_tuning"] = True
    assert run_threads([lambda: tuner.run(stream=0)] * 2) == [1.0, 1.0]
    assert len(tunings.begun) == (1 if library else 2)


@pytest.mark.parametrize("tuned", [True, False])
def test_a_warm_launch_waits_for_nobody(tuned: bool, point: FirstLaunches, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_inductor(point, monkeypatch)
    tuner = inductor_tuner(Tunings(), [2.0, 1.0] if tuned else [1.0])
    tuner.inductor_meta["coordinate_descent_tuning"] = not tuned
    if not tuned:  # a kind of kernel that descent leaves alone, and is asked about in each launch
        from torch._inductor.runtime.hints import HeuristicType

        tuner.heuristic_type = HeuristicType.FIXED
    tuner.run(stream=0)
    with point._turns[0]:
        assert run_threads([lambda: tuner.run(stream=0)], timeout=20) == [1.0]


def triton_tuner(tunings: Tunings) -> Any:
    """Make Triton's autotuner around a kernel that returns its arguments."""
    autotuner = importlib.import_module("triton.runtime.autotuner")

    def kernel() -> None: ...

    class Kernel:
        fn = staticmethod(kernel)

        def run(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
            return (*args, kwargs["BLOCK"])

    def bench(call: Callable[[], Any], quantiles: Any) -> list[float]:
        block = call.__closure__ and {c.cell_contents for c in call.__closure__ if isinstance(c.cell_contents, int)}
        call()
        time = tunings.measure(float(len(tunings.begun)))
        call()
        return [time + (not block)] * 3

    configs = [autotuner.Config({"BLOCK": block}) for block in (64, 128)]
    return autotuner.Autotuner(Kernel(), ["x", "n"], configs, ["n"], None, None, do_bench=bench)


@needs_triton
@with_and_without
def test_tritons_autotuner_tunes_once_and_mixes_up_no_arguments(library: bool, point: FirstLaunches) -> None:
    """Control: it tunes in each thread, or fails because another thread's launch has ended and forgotten the arguments."""
    if library:
        point.install()
    tunings = Tunings()
    tuner = triton_tuner(tunings)
    got = gather_threads([lambda number=number: tuner.run(number, 7) for number in range(2)])  # type: ignore[misc]
    if library:
        assert [one[0] for one in got] == [0, 1]  # type: ignore[index]
        assert len(tunings.begun) == 2
    else:
        assert len(tunings.begun) > 2 or any(isinstance(one, TypeError) for one in got)


@needs_triton
def test_a_warm_launch_of_tritons_autotuner_waits_for_nobody(point: FirstLaunches) -> None:
    point.install()
    tuner = triton_tuner(Tunings())
    tuner.run(1, 7)
    with point._turns[0]:
        assert run_threads([lambda: tuner.run(2, 7)[0]], timeout=20) == [2]
    assert point._turns[0].acquire(blocking=False)


@needs_triton
def test_a_first_launch_that_fails_gives_the_turn_back(point: FirstLaunches) -> None:
    point.install()
    tuner = triton_tuner(Tunings())
    tuner._do_bench = MagicMock(side_effect=RuntimeError("no memory"))
    with pytest.raises(RuntimeError, match="no memory"):
        tuner.run(1, 7)
    assert run_threads([lambda: point._turns[0].acquire(blocking=False)]) == [True]


# ------------------------------------------------------------------------------------------------------------- on a GPU

on_gpu = functools.partial(run_threads, timeout=180.0)  # a first compile there takes long


@pytest.fixture
def kernel(request: pytest.FixtureRequest) -> Any:
    """Return a Triton kernel with an autotuner; Triton reads its source from a file."""
    namespace: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.py")
        file.write_text(e9_triton_autotuner._KERNEL)
        exec(compile(e9_triton_autotuner._KERNEL, str(file), "exec"), namespace)
        yield namespace["made"]()


def add_one_with(kernel: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def add_one(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        kernel[lambda meta: (-(-x.numel() // meta["BLOCK"]),)](x, y, x.numel())
        return y

    return add_one


@pytest.mark.gpu
@pytest.mark.hang_timeout(300)
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("place", ["compiled", "after a graph break"])
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_users_kernel_in_a_guarded_callable_is_launched_first_by_four_threads(
    kernel: Any, place: str, mode: str | None
) -> None:
    add_one = add_one_with(kernel)
    if place != "compiled":
        add_one = torch.compiler.disable(add_one)
    call = thread_safe_compile(lambda x: add_one(x * 2) - 1, mode=mode)
    together = threading.Barrier(4)

    def calls(number: int) -> None:
        x = torch.full((1 << 14,), float(number), device="cuda")
        together.wait(60)
        for _ in range(10):
            torch.testing.assert_close(call(x), x * 2)

    on_gpu(calls, 4)


@pytest.mark.gpu
@pytest.mark.hang_timeout(300)
@pytest.mark.usefixtures("fresh_dynamo")
def test_kernels_are_tuned_once_by_four_threads_and_results_are_right() -> None:
    from torch._inductor import config
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    tuned: list[Any] = []
    with config.patch(max_autotune_pointwise=True, force_disable_caches=True), pytest.MonkeyPatch.context() as patched:
        benchmark = CachingAutotuner.benchmark_all_configs

        def counted(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            tuned.append(tuner)
            return benchmark(tuner, *args, **kwargs)

        patched.setattr(CachingAutotuner, "benchmark_all_configs", counted)
        call = thread_safe_compile(lambda x: (torch.sin(x) @ x).softmax(-1) + x.sum(0), options={"max_autotune": True})
        x = torch.randn(512, 512, device="cuda") / 16
        want = (torch.sin(x) @ x).softmax(-1) + x.sum(0)
        together = threading.Barrier(4)

        def first() -> None:
            together.wait(60)
            for _ in range(5):
                torch.testing.assert_close(call(x), want, atol=1e-2, rtol=1e-2)

        on_gpu([first] * 4)
    assert len(tuned) == len(set(tuned)) > 0


@pytest.mark.gpu
@pytest.mark.hang_timeout(300)
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_thread_for_each_device_launches_first(kernel: Any) -> None:
    add_one = add_one_with(kernel)
    call = thread_safe_compile(lambda x: add_one(x * 2) - 1)
    together = threading.Barrier(2)

    def calls(index: int) -> None:
        with torch.cuda.device(index):
            x = torch.full((1 << 14,), 3.0, device=f"cuda:{index}")
            together.wait(60)
            torch.testing.assert_close(call(x), x * 2)
            torch.testing.assert_close(add_one(x), x + 1)

    on_gpu(calls, 2)


@pytest.mark.gpu
@pytest.mark.hang_timeout(300)
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_users_kernel_is_launched_first_by_four_threads_outside_guarded_callables(kernel: Any) -> None:
    safecompile.install()
    add_one, together = add_one_with(kernel), threading.Barrier(4)

    def calls(number: int) -> None:
        x = torch.full((1 << 14,), float(number), device="cuda")
        together.wait(60)
        torch.testing.assert_close(add_one(x), x + 1)

    on_gpu(calls, 4)
