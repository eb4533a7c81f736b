"""A CUDA stream for each thread, and the order between what threads queue on their streams; on a CPU nothing needs either."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch

Event: TypeAlias = torch.cuda.Event | None
"""Comes when a device has done what was queued before it; None for a CPU, which has always done all."""


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Inside, what this thread queues on ``device``, which is its current one, goes to a stream of its own.

    What all threads share was made on the default stream, and is read there after the run: the stream begins after what was queued
    there, and what is queued there later comes after the thread's last work.
    """
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)
    own, shared = torch.cuda.Stream(device), torch.cuda.default_stream(device)
    own.wait_stream(shared)
    try:
        with torch.cuda.stream(own):
            yield
    finally:
        shared.wait_stream(own)


def mark(device: torch.device) -> Event:
    """Return an event behind all that this thread has queued on ``device``, copies from other devices to it included."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def wait(device: torch.device, events: Iterable[Event]) -> None:
    """Let what this thread does on ``device`` from now on begin after the events. Only for a CPU does the thread itself wait."""
    for event in events:
        if event is not None and device.type == "cuda":
            torch.cuda.current_stream(device).wait_event(event)
        elif event is not None:
            event.synchronize()


def read_later(tensor: torch.Tensor) -> Callable[[], list[float]]:
    """Return a function that waits for a vector's values and returns them, but for nothing that is queued on its device after now."""
    if tensor.device.type != "cuda":
        return tensor.tolist
    copied, copies = tensor.to("cpu", non_blocking=True), torch.cuda.current_stream(tensor.device).record_event()

    def read() -> list[float]:
        copies.synchronize()
        return copied.tolist()

    return read


def keep(tensors: Iterable[torch.Tensor]) -> None:
    """Let the memory of another thread's tensors be used for others only after all that this thread has queued when it lets go of them.

    torch gives memory back to the stream that it was taken on, which knows nothing of the streams that read it.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
