"""A DataLoader whose workers are forked while threads compile, and which call a compiled function themselves.

A worker that is forked while another thread holds torch's compile lock has it locked for good, and hangs in its first
compile: pytorch/pytorch#198246. With the library the child begins with a lock of its own.
"""

from __future__ import annotations

import argparse
import threading

import torch
from torch.utils.data import DataLoader, TensorDataset

from safecompile import thread_safe_compile


def main(backend: str) -> None:
    augment = thread_safe_compile(lambda rows: (torch.stack([x for (x,) in rows]) * 2).sin(), backend=backend)
    data = TensorDataset(torch.arange(8.0))
    model = torch.nn.Linear(3, 3)
    step = thread_safe_compile(lambda x: model(x).relu(), backend=backend, dynamic=False, recompile_limit=1000)
    step(
        torch.ones(1, 3)
    )  # what a first compile imports: a fork while a module is being imported is Python's own affair
    stop = threading.Event()

    def compile_shape_after_shape() -> None:
        rows = 1
        while not stop.is_set():
            rows += 1
            step(torch.ones(rows, 3))

    thread = threading.Thread(target=compile_shape_after_shape)
    thread.start()
    try:
        for _ in range(2):  # each time with new workers
            loader = DataLoader(
                data, batch_size=2, collate_fn=augment, num_workers=2, multiprocessing_context="fork", timeout=60
            )
            torch.testing.assert_close(torch.cat(list(loader)), (torch.arange(8.0) * 2).sin())
    finally:
        stop.set()
        thread.join()
    print("4 workers forked beside a compiling thread, 8 batches, none hung")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="aot_eager", help="for torch.compile; inductor for real use")
    main(parser.parse_args().backend)
