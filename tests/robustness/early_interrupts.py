"""Send Ctrl-C to the command at moments of its first 0.3 s: one line and exit code 130, or Python's own traceback.

  python tests/robustness/early_interrupts.py --count 20

Both ways to start it, moments at equal distances. Until Python has its handler, the signal ends the process without a
word; from there to the package's first line Python prints a traceback.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "import sys\nfrom mindspeed_autoparallel.cli.main import main\nsys.exit(main())\n"
WORDS = ("operators", "--layers", "1", "--devices", "2")
OURS = ("interrupted\n", 130)
FIRST_S = 0.3


def ended(command: list[str], moment: float | None) -> tuple[str, int, float]:
    """Return what the command printed to stderr, its exit code and its seconds; with SIGINT at ``moment``."""
    begin = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if moment is not None:
        time.sleep(moment)
        process.send_signal(signal.SIGINT)
    _, printed = process.communicate()
    return printed, process.returncode, time.monotonic() - begin


def main() -> int:
    """Print the endings; 1 where a traceback names a file of the package."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=20)
    count, wrong = parser.parse_args().count, 0
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "mindspeed-autoparallel"
        script.write_text(f"#!{sys.executable}\n{SCRIPT}")
        for way, start in (("script", [str(script)]), ("-m", ["-m", "mindspeed_autoparallel"])):
            command = [sys.executable, *start, *WORDS]
            whole = min(ended(command, None)[2] for _ in range(2))
            empty = min(ended([sys.executable, "-c", ""], None)[2] for _ in range(3))
            print(f"{way}: undisturbed {whole:.2f} s, an empty program of Python {empty:.3f} s")
            for moment in (FIRST_S * number / count for number in range(count)):
                printed, code, _ = ended(command, moment)
                kind = "own line" if (printed, code) == OURS else "done" if code == 0 else "killed silently"
                if code != 0 and printed and kind != "own line":
                    kind = f"traceback: {printed.strip().splitlines()[-1][:80]}"
                    wrong += str(ROOT / "mindspeed_autoparallel") in printed
                print(f"  after {moment:.3f} s: {kind}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
