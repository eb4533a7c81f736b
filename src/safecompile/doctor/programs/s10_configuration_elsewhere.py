"""A worker thread compiles with the default configuration, whatever the main thread has set.

Values set on `torch._dynamo.config` and `torch._inductor.config` belong to the thread since torch 2.12; neither new
threads, pools nor autograd's threads get them. With safecompile: `capture_context`.
"""

from __future__ import annotations

from safecompile.doctor._program import Case, elsewhere, fault, program

__all__ = ["run"]


@program(
    "S10",
    "configuration set on the main thread does not reach workers",
    kind="silent",
    upstream="pytorch#186537",
    versions="2.12 and newer",
)
def run(case: Case) -> None:
    import torch._dynamo

    config = torch._dynamo.config
    config.automatic_dynamic_shapes = False
    carried = case.carry()
    if elsewhere(lambda: carried(lambda: config.automatic_dynamic_shapes)):
        fault("automatic_dynamic_shapes is False on the main thread, and True in a worker")
