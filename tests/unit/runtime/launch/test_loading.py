"""What processes load that another one has launched."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["features.apply_plan.entry", "profiling.measure.worker"])
def test_ranks_load_no_coordinator(module: str) -> None:
    script = f"import sys, mindspeed_autoparallel.runtime.{module}; print(*sys.modules, sep='\\n')"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    own = [name for name in loaded if name.startswith("mindspeed_autoparallel.runtime.launch.")]
    assert own and not {name.rpartition(".")[2] for name in own} & {"coordinator", "orders", "rendezvous"}
