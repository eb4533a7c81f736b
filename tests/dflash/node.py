"""A process of several, started by torchrun: the demo, with faults and orders of events that a test asks for.

    torchrun ... -- node.py OUT FAULTS OPTIONS...

``FAULTS`` is a JSON object. At its end a process writes what it has into the folder ``OUT``: the weights of each of its replicas, and how
many graphs it compiled.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import backend

RANK = int(os.environ["RANK"])
OUT, FAULTS = Path(sys.argv[1]), json.loads(sys.argv[2])


def wait_for(name: str) -> None:
    """Wait until a process has said that something has come to pass."""
    while not (OUT / name).exists():
        time.sleep(0.01)


def slow(module: Any, inputs: list[torch.Tensor]) -> Any:
    """Compile for training once another node waits for this one's gradients: an evaluation before it keeps the others from training."""
    if FAULTS.get("compiles_when_others_wait") == RANK and trainings:
        wait_for("waits")
    if FAULTS.get("compiles_forever") == RANK:
        threading.Event().wait()
    return torch._dynamo.lookup_backend(usual)(module, inputs)


usual = backend.BACKEND
torch._dynamo.register_backend(slow, name="slow")
backend.BACKEND = "slow"

import demo  # noqa: E402  # its functions take the backend when they are defined
import nodes  # noqa: E402
import recorder  # noqa: E402
import train  # noqa: E402
from replica import Numbers, Replica  # noqa: E402

trainings: list[train.Training] = []


def before(owner: Any, name: str, act: Callable[..., None]) -> None:
    """Call ``act`` before a method, with what the method is given."""
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        act(*args, **kwargs)
        return method(*args, **kwargs)

    setattr(owner, name, call)


def after_step(of: recorder.Recorder, step: int, numbers: Numbers) -> None:
    for what, number in (("kill", signal.SIGKILL), ("terminate", signal.SIGTERM)):
        if FAULTS.get(what) == [RANK, step + 1] and not (OUT / what).exists():
            (OUT / what).touch()
            os.kill(os.getpid(), number)


def waits(self: nodes.Nodes, tensors: Any, what: str) -> None:
    if FAULTS.get("compiles_when_others_wait", RANK) != RANK:
        (OUT / "waits").touch()


before(train.Training, "run", lambda training, *rest: trainings.append(training))
before(recorder.Recorder, "step", after_step)
before(nodes.Connected, "mean_", waits)
if FAULTS.get("no_mean"):
    nodes.Connected.mean_ = lambda *rest: None  # type: ignore[method-assign]
if FAULTS.get("no_comparison"):
    demo.Run._compare = lambda *rest: None  # type: ignore[method-assign]
if FAULTS.get("no_offset"):
    make = Replica.__init__

    def unnumbered(self: Replica, *args: Any) -> None:
        make(self, *args)
        self.number = self.index

    Replica.__init__ = unnumbered  # type: ignore[method-assign,assignment]
if FAULTS.get("forgets_optimizer") == RANK:
    restore = Replica.restore

    def forgetful(self: Replica, snapshot: Any) -> None:
        restore(self, snapshot._replace(optimizer={n: torch.zeros_like(t) for n, t in snapshot.optimizer.items()}))

    Replica.restore = forgetful  # type: ignore[method-assign]

code = demo.main([*sys.argv[3:], *FAULTS.get("options", {}).get(str(RANK), [])])
if trainings:
    for replica in trainings[0].replicas:
        save_file(replica.drafter.state_dict(), OUT / f"weights-{replica.number}.safetensors")
    (OUT / f"graphs-{RANK}").write_text(str(trainings[0].compiled))
demo.leave(code)
