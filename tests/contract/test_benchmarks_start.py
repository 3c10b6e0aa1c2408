"""Benchmarks, which no other test runs, import what they name: helpers and tests move, and pages name their commands."""

import subprocess
from pathlib import Path

import pytest
from forked_python import forked_python

pytestmark = [pytest.mark.torch, pytest.mark.distributed]
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
IMPORT_ALL = """
import runpy, sys
from pathlib import Path

for file in sys.argv[1:]:
    path, before = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(Path(file).parent))
    try:
        runpy.run_path(file, run_name="imported")
    except Exception as error:
        print(f"{file}: {error!r}")
    sys.path[:] = path
    # Helpers of different folders have equal names.
    for name in set(sys.modules) - before:
        if "/tests/" in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]
print("done")
"""


def test_every_benchmark_imports_what_it_names(tmp_path):
    program = tmp_path / "import_all.py"
    program.write_text(IMPORT_ALL)
    files = [file for file in sorted(BENCHMARKS.rglob("*.py")) if '__name__ == "__main__"' in file.read_text()]
    assert len(files) > 50
    done = subprocess.run(
        [forked_python(), str(program), *map(str, files)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == ["done"], done.stdout + done.stderr[-2000:]
