"""Kill a rank of a real hetero training that was started without torchrun, and tell when the others name it.

  python tests/robustness/dying_rank.py [PROCESSES] [RANK]

Two processes train image and audio encoder with TP 1 and the text decoder with TP 2; four have it on two stages.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "distributed" / "hetero"), str(TESTS / "helpers")]
import test_host as host  # noqa: E402

from mindspeed_autoparallel.runtime.launch.ports import reserved_port  # noqa: E402

LONGEST_S = 90.0
TWO = {"image": {"tp": 1}, "audio": {"tp": 1}, "text": {"tp": 2}}


def start(folder: Path, size: int, dying: int, port: int) -> list[subprocess.Popen[bytes]]:
    """Start the ranks as a loop in a shell would; rank N prints into ``logN``."""
    model = host.model_file(folder, "model", TWO if size == 2 else host.DP4_OVER_TP2PP2)
    words = [*host.TRAINING, "--mm-model", model, "--mm-data", host.data_file(folder), "--train-iters=1000"]
    own = {
        "OMP_NUM_THREADS": "1", "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu", "PYTHONPATH": f"{TESTS.parent}:{TESTS.parent}/docs/examples",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DYING_RANK": str(dying),
        "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
    }  # fmt: skip
    command = [sys.executable, str(TESTS / "distributed" / "hetero" / "dying_program.py"), *words, "--hetero-parallel"]
    ranks = []
    for rank in range(size):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (folder / f"log{rank}").open("wb") as log:
            ranks.append(subprocess.Popen(command, env={**os.environ, **own, **place}, stdout=log, stderr=log))
    return ranks


def main() -> int:
    """Print the seconds from the death to each other rank's line; 1 where one never names it."""
    given = [int(word) for word in sys.argv[1:3]]
    size, dying = given + [2, 1][len(given) :]
    with tempfile.TemporaryDirectory() as name, reserved_port() as port:
        ranks = start(Path(name), size, dying, port)
        try:
            ranks[dying].wait()
            died, named = time.monotonic(), {}
            others = [rank for rank in range(size) if rank != dying]
            while len(named) < len(others) and time.monotonic() < died + LONGEST_S:
                for rank in others:
                    text = (Path(name) / f"log{rank}").read_text(errors="replace")
                    if rank not in named and re.search(rf"^\[rank \d\] rank {dying} .*", text, re.M):
                        named[rank] = round(time.monotonic() - died, 1)
                time.sleep(0.2)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    print(f"rank {dying} of {size} ended with {ranks[dying].returncode}; named by rank after s: {named}")
    return 0 if len(named) == size - 1 else 1


if __name__ == "__main__":
    sys.exit(main())
