from __future__ import annotations

import json
import sys

from benchmarks.pieces import run

if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], json.loads(sys.argv[2]))))
