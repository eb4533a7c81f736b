"""Custom operators whose results' sizes depend on data, traced by several threads."""

from __future__ import annotations

from tests.helpers.subprocess_run import run_forked

PROGRAM = """
import sys, threading, torch, safecompile
from torch.fx.experimental.proxy_tensor import make_fx
from tests.helpers.threads import gather_threads

both_inside, contexts = threading.Barrier(2, timeout=30), {}

@torch.library.custom_op("safecompile_tests::places", mutates_args=())
def places(x: torch.Tensor) -> torch.Tensor:
    return x.nonzero()

@places.register_fake
def _(x):
    both_inside.wait()
    contexts[threading.get_ident()] = context = torch.library.get_ctx()
    both_inside.wait()
    return x.new_empty((context.new_dynamic_size(), x.dim()), dtype=torch.int64)

def trace(index):
    return make_fx(lambda x: places(x) + index, tracing_mode="symbolic")(torch.eye(3)).code

if sys.argv[1] == "library":
    safecompile.install(strict=True)
codes = gather_threads(trace, 2)
if len(set(contexts.values())) < 2:
    print(codes, file=sys.stderr)
    sys.exit(3)
assert torch.library.get_ctx() is None
assert not any(isinstance(code, BaseException) for code in codes), codes
"""


def test_the_fake_kernel_of_a_custom_operator_has_the_context_of_its_own_trace() -> None:
    run_forked(PROGRAM, ["library"]).check()


def test_control_with_torch_alone_it_has_the_context_of_another_threads_trace() -> None:
    assert run_forked(PROGRAM, ["alone"]).rc == 3
