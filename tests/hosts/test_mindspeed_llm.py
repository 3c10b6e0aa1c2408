"""MindSpeed-LLM for real: its own validators and its own pretrain_gpt.py on CPU (tests/hosts/README.md)."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("mindspeed_cells", Path(__file__).with_name("mindspeed_cells.py"))
cells = importlib.util.module_from_spec(_spec)
sys.modules["mindspeed_cells"] = cells
_spec.loader.exec_module(cells)

MISSING = cells.missing(cells.LLM_SOURCES)
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200), pytest.mark.skipif(bool(MISSING), reason=MISSING)]


def test_the_hosts_own_validators_read_our_words_for_uneven_splits(tmp_path):
    cases = [([1, 3], 1), ([4, 3, 5, 2], 1), ([2, 1, 3, 2], 2), ([1, 1, 1, 2, 2, 1, 3, 1], 4)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(cells.HERE / "llm_words.py")],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=cells.TIMEOUT_S,
        cwd=tmp_path,
        env=cells.environment(cells.LLM_SOURCES),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [counts for counts, _ in cases]
