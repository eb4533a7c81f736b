"""A compiled function, compiled long ago, fails because another thread traces a model."""

from __future__ import annotations

import threading

import torch

tracing, go_on = threading.Event(), threading.Event()


class Model(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tracing.set()  # a large model is traced for seconds; this one waits
        go_on.wait()
        return x + 1


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


compiled = torch.compile(double, backend="eager")
print("before:", compiled(torch.ones(2)))

thread = threading.Thread(target=torch.fx.symbolic_trace, args=(Model(),))
thread.start()
tracing.wait()
try:
    print("beside a trace:", compiled(torch.ones(2)))
except RuntimeError as error:
    print("beside a trace:", error)
finally:
    go_on.set()
    thread.join()
print("after:", compiled(torch.ones(2)))
