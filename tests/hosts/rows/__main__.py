"""``python tests/hosts/rows CHECKOUT --count N``: train drawn rows by drawn plans, and compare losses with one process.

``--seed`` and ``--first`` choose the draws (``draw``); every row that deviates is printed with its words.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "helpers")]

from forked_host import environment  # noqa: E402


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument(
        "--kind",
        choices=("plans", "hybrid", "mindspeed", "resume", "context", "search", "digests"),
        default="plans",
        help="what is compared",
    )
    parser.add_argument("--path", default="", help="more folders for PYTHONPATH, separated by ':'")
    options = parser.parse_args()
    words = [options.kind, str(options.checkout.resolve()), *map(str, (options.seed, options.first, options.count))]
    command = [sys.executable, "-W", "ignore", str(HERE / "train.py"), *words]
    sys.exit(subprocess.call(command, env=environment(options.checkout.resolve(), options.path)))


if __name__ == "__main__":
    main()
