"""A script that waits for a peer is ended, one that works or whose workers work is not."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import multiprocessing, sys, time
from mindspeed_autoparallel.runtime.profiling import stalls
stalls._STILL_S, stalls._SAMPLE_S = 1.0, 0.05
samples, place = [], stalls._place
stalls._place = lambda thread: samples.append(thread) or place(thread)
def work(done):
    while not done(): sum(range(10000))
def seconds_pass(count, begin=time.monotonic()):
    return time.monotonic() > begin + count
def main(kind):
    if kind == "waits":
        time.sleep(30)
    elif kind == "polls":
        work(lambda: len(samples) > 45)
    else:
        worker = multiprocessing.get_context("fork").Process(target=work, args=(lambda: seconds_pass(2),))
        worker.start()
        worker.join()
    print("came to its steps")
if __name__ == "__main__":
    stalls.watch_for_stalls()
    main(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [
        ("waits", 1, "the script has waited 1 s for a peer at"),
        ("polls", 0, "came to its steps"),
        ("workers", 0, "came to its steps"),
    ],
)
def test_only_standing_still_counts(tmp_path, kind, code, said):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, tmp_path / "script.py", kind], capture_output=True, text=True, timeout=60)
    assert done.returncode == code and said in done.stdout + done.stderr, done.stdout + done.stderr
    assert kind != "polls" or "the script has been at" in done.stderr
