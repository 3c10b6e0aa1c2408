"""Run docs/hetero-from-zero.md as it is written, and compare what its two trainings print.

python tests/benchmarks/hetero/from_zero.py        some minutes on two cores
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/hetero-from-zero.md"
STEP = re.compile(r"iteration +(\d+)/.*?lm loss: ([0-9.E+-]+) .*?grad norm: ([0-9.]+)")
LOSS_TOLERANCE, NORM_TOLERANCE = 1e-5, 1e-3


def commands() -> str:
    """Return the page's shell blocks in order, each announced."""
    blocks = re.findall(r"```shell\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    return "set -eu\n" + "\n".join(f"echo '== block {number}'\n{block}" for number, block in enumerate(blocks, 1))


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="from-zero-") as scratch:
        # The page begins at the root of a clone, and writes into it.
        for name in ("docs", "mindspeed_autoparallel"):
            shutil.copytree(ROOT / name, Path(scratch) / name)
        environment = {
            **os.environ,
            "PYTHONPATH": scratch,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        done = subprocess.run(
            ["bash", "-c", commands()], cwd=scratch, env=environment, text=True, capture_output=True, check=False
        )
    if done.returncode:
        raise SystemExit(
            f"the page's commands ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    steps = STEP.findall(done.stdout.split("== block 4")[1])
    half = len(steps) // 2
    print("| step | loss, one process | by the plan | norm, one process | by the plan |\n" + "| --- " * 5 + "|")
    worst_loss = worst_norm = 0.0
    for (step, loss, norm), (_, other_loss, other_norm) in zip(steps[:half], steps[half:], strict=True):
        print(f"| {step} | {loss} | {other_loss} | {norm} | {other_norm} |")
        worst_loss = max(worst_loss, abs(float(other_loss) / float(loss) - 1))
        worst_norm = max(worst_norm, abs(float(other_norm) / float(norm) - 1))
    print(f"largest relative difference: losses {worst_loss:.1e}, norms {worst_norm:.1e}")
    print(done.stdout.split("plan against the first steps")[-1][:1500])
    if not steps or worst_loss > LOSS_TOLERANCE or worst_norm > NORM_TOLERANCE:
        raise SystemExit("the plan does not train as one process does")


if __name__ == "__main__":
    main()
