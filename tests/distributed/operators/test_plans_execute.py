"""Random plans and the plans of all modes run on four processes as one process does, and send what is predicted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = [pytest.mark.distributed, pytest.mark.torch]


def test_sixty_random_plans_and_all_modes_match_one_process_and_their_predicted_bytes():
    worker = Path(__file__).with_name("plan_worker.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(worker)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    rows = json.loads(lines[0][len("RESULT ") :])
    assert len(rows) == 63
    assert [row for row in rows if row[1] > 1e-12] == []
    assert [row for row in rows if not row[2]] == []
    assert sum(row[3][0] > 0 and row[3][1] > 0 for row in rows) > 50
