"""The part of the fuzz suite with a fixed seed; ``python tests/robustness/fuzz.py --long`` is the whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from how_many import how_many

pytestmark = [pytest.mark.torch]
pytest.importorskip("safetensors")
COUNT = how_many(140, 280)
"""Five or ten of every target."""


@pytest.mark.timeout(900)
def test_changed_files_are_answered_or_refused_in_one_line_and_run_nothing():
    if not hasattr(os, "fork"):
        pytest.skip("every case is forked")
    script = Path(__file__).with_name("fuzz.py")
    run = subprocess.run(
        [sys.executable, str(script), "--count", str(COUNT), "--seed", "1"],
        capture_output=True,
        text=True,
        timeout=850,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert f"{COUNT} mutations" in run.stdout
