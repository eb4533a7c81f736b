"""A server of one compiled model, with nothing but Python and torch.

``python server.py --serve`` answers at http://127.0.0.1:8000 until Ctrl-C; without the option it asks itself, and ends.
"""

from __future__ import annotations

import argparse
import json
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from safecompile import capture_context, statistics, thread_safe_compile, warmup
from safecompile.testing import no_compiles

ROWS = (1, 2, 4)  # how many rows requests are expected to have

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--backend", default="aot_eager", help="for torch.compile; inductor for real use")
parser.add_argument("--serve", action="store_true")
options = parser.parse_args()

eager = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 3))
# A number of rows that nobody expected is compiled by the first request that has it. Others run eagerly meanwhile.
model = thread_safe_compile(eager.forward, backend=options.backend, dynamic=False, when_compiling="eager")

with torch.inference_mode():
    context = capture_context()  # of this thread, for the threads that answer
    warmup(model, [(torch.zeros(rows, 8),) for rows in ROWS])


@context.wrap
def answer_to(rows: list[list[float]]) -> list[list[float]]:
    # Made inside the context, the tensor is an inference tensor, as those of the warm-up were.
    return model(torch.tensor(rows, dtype=torch.float32)).tolist()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        rows = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps(answer_to(rows)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


server = ThreadingHTTPServer(("127.0.0.1", 8000 if options.serve else 0), Handler)  # one thread for each request


def ask(x: torch.Tensor) -> torch.Tensor:
    url = f"http://127.0.0.1:{server.server_port}"
    with urllib.request.urlopen(url, json.dumps(x.tolist()).encode(), timeout=60) as response:
        return torch.tensor(json.load(response))


if options.serve:
    server.serve_forever()
else:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    inputs = [torch.randn(rows, 8) for rows in ROWS * 20]
    with no_compiles(), ThreadPoolExecutor(8) as clients:
        for x, answer in zip(inputs, clients.map(ask, inputs), strict=True):
            torch.testing.assert_close(answer, eager(x))
    server.shutdown()
    print(f"{len(inputs)} requests answered, nothing compiled after the warm-up's {statistics().compiled} graphs")
