from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.helpers.toolchain import missing_for_inductor

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest_plugins = ["tests.helpers.hang_timeout"]

# Begun first, as each goes to one worker whole: one that is begun last leaves the other worker with nothing to do.
LONG_FILES = {"test_stress.py", "test_interpreter_exit.py", "test_direct_compiles.py", "test_demo.py", "test_doctor.py"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    missing = {
        "inductor": missing_for_inductor(),
        "gpu": None if torch.cuda.is_available() else "needs a CUDA device, and torch sees none",
        "nodes": None if "nodes" in config.getoption("markexpr") else "takes minutes: make nodes",
    }
    items.sort(key=lambda item: item.path.name not in LONG_FILES)
    for item in items:
        for name, reason in missing.items():
            if reason is not None and item.get_closest_marker(name) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def device_guard_of_the_main_thread() -> None:
    from tests.helpers.device_guard import ask_for_the_device_guard

    ask_for_the_device_guard()


@pytest.fixture(autouse=True)
def threads_start_with_as_many_intra_op_threads() -> Iterator[None]:
    """Let no test decide for the next: who sets their number for a thread does so for all that start later, too."""
    yield
    import torch

    torch.set_num_threads(torch.get_num_threads())


@pytest.fixture(autouse=True)
def dynamic_shapes_are_as_they_were() -> Iterator[None]:
    """Fail the test that leaves their settings changed, as overlapping calls of torch alone do, and not one after it."""
    from torch._dynamo import config

    def now() -> tuple[bool, bool]:
        return config.automatic_dynamic_shapes, config.assume_static_by_default

    before = now()
    yield
    after = now()
    config.automatic_dynamic_shapes, config.assume_static_by_default = before
    assert after == before


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Start with nothing compiled, and leave nothing compiled and nothing patched behind."""
    import torch

    import safecompile

    torch._dynamo.reset()
    try:
        yield
    finally:
        # First, while what it would restore is still there: it raises when the test has left guarded calls running.
        try:
            safecompile.uninstall()
        finally:
            torch._dynamo.reset()


@pytest.fixture
def nothing_compiled(uninstalled_at_the_end: None) -> Iterator[None]:
    """Start with nothing compiled; the patches stay for the other tests of the module, for installing takes a second."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def uninstalled_at_the_end() -> Iterator[None]:
    import safecompile

    yield
    safecompile.uninstall()


@pytest.fixture
def nothing_is_known() -> None:
    """Let each checkpointed region be looked at for the first time: what it draws is learned by its code."""
    from safecompile._patches import regions

    regions._known.clear()


@pytest.fixture(params=["alone", "among threads"])
def company(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test alone in the process, and once more with another thread."""
    from tests.helpers.regions import COMPANIES

    with COMPANIES[request.param]():
        yield request.param
