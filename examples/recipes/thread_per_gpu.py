"""One thread for each GPU, with a replica of its own; without a GPU, two replicas on the CPU."""

from __future__ import annotations

import argparse
import copy
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from safecompile import capture_context, thread_safe_compile


def train(model: nn.Module, x: Tensor, steps: int = 3) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def main(backend: str) -> None:
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    devices = gpus or [torch.device("cpu")] * 2
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    batches = [torch.randn(4, 8, device=device) for device in devices]
    expected = [train(copy.deepcopy(model).to(x.device), x) for x in batches]
    context = capture_context()

    def work(x: Tensor) -> list[Tensor]:
        if x.is_cuda:
            torch.cuda.set_device(x.device)
        # Compiled copies of one model: replicas on the same device share their graph.
        return train(thread_safe_compile(copy.deepcopy(model).to(x.device), backend=backend), x)

    with ThreadPoolExecutor(len(devices), initializer=context.apply) as pool:
        trained = list(pool.map(work, batches))
    torch.testing.assert_close(trained, expected)
    print(f"trained {len(devices)} replicas on {', '.join(map(str, devices))}, each as it is alone")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="aot_eager", help="for torch.compile; inductor for real use")
    main(parser.parse_args().backend)
