"""Kills with a fixed seed, one of every conversion or two; ``python tests/robustness/kills.py --long`` is the whole, with searches and trainings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from how_many import how_many

pytestmark = [pytest.mark.torch]
pytest.importorskip("safetensors")


@pytest.mark.timeout(900)
def test_conversions_killed_at_random_moments_leave_nothing_half_and_run_again():
    if not Path("/proc/self/environ").exists():
        pytest.skip("processes are found in /proc")
    script, count = Path(__file__).with_name("kills.py"), how_many(5, 10)
    run = subprocess.run(
        [sys.executable, str(script), "--count", str(count), "--seed", "1"],
        capture_output=True,
        text=True,
        timeout=850,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert f"{count} kills" in run.stdout and f"\n{count} resumed" in run.stdout
