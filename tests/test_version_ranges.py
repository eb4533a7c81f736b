"""Which patch points this torch needs: all that its faults ask for, and none whose fault was repaired upstream."""

from __future__ import annotations

import importlib.util
import json

import torch

from tests.helpers.subprocess_run import run_forked
from tests.helpers.torch_version import TORCH

FOR_A_GPU = bool(torch.version.cuda or torch.version.hip)

# All others are needed by every torch so far.
ONLY_SOME_NEED = {
    "error-on-graph-break": TORCH >= (2, 9),  # there is no such setting before
    "fullgraph-calls": (2, 9) <= TORCH < (2, 15),  # each thread has a count of its own from 2.15 on
    "call-settings": TORCH < (2, 12),  # each thread has a configuration of its own from 2.12 on
    "config-caches": TORCH >= (2, 12),
    # 2.6 and 2.8 do not ask for the guard; builds without CUDA, and machines with a GPU, have no such fault.
    "device-guard": TORCH >= (2, 9) and torch.version.cuda is not None and not torch.cuda.is_available(),
    "capture-streams": torch.version.cuda is not None,
    "cuda-graphs": FOR_A_GPU,
    "first-launches": FOR_A_GPU and importlib.util.find_spec("triton") is not None,
    "serial-traces": False,  # in the place of points that do not match
}

INSTALLED = """
import json, safecompile
safecompile.install(strict=True)
print(json.dumps({point.name: point.installed for point in safecompile.statistics().patches}))
"""


def test_every_point_matches_and_those_whose_fault_this_torch_has_are_installed() -> None:
    installed = json.loads(run_forked(INSTALLED).check().stdout)
    assert installed == {name: ONLY_SOME_NEED.get(name, True) for name in installed}
    assert ONLY_SOME_NEED.keys() <= installed.keys()
