"""Names and calls in tests that the package has no longer: what a rename leaves behind, since tests are not typed.

python tests/helpers/stale_names.py    mypy over tests/, of which only that counts; its cache is the package's
"""

from __future__ import annotations

import re
import subprocess
import sys

COUNTS = re.compile(
    r"\[call-arg\]$|"
    r'error: Module "mindspeed_autoparallel[^"]*" has no attribute|'
    r'error: "(?!None")[A-Z]\w*" has no attribute|'
    r'module named "mindspeed_autoparallel'
)
STAND_INS = "tests/hosts/stand_ins/"
"""They set attributes on modules that are made as they run."""


def main() -> int:
    """Print what is stale; return how a shell is told."""
    command = [sys.executable, "-m", "mypy", "--explicit-package-bases", "tests"]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode not in (0, 1):
        print(run.stdout + run.stderr, file=sys.stderr)
        return run.returncode
    found = [line for line in run.stdout.splitlines() if COUNTS.search(line) and not line.startswith(STAND_INS)]
    print("\n".join(found) or "Success: tests call the package as it is")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
