"""CPU time of one simulated step: the replay alone, its graph being compiled once per schedule.

python tests/benchmarks/split/simulator.py   (a few seconds)
"""

from __future__ import annotations

import random
import statistics
import time

from mindspeed_autoparallel.schedule import StepTimes, make_program, simulate

CASES = (
    ("1f1b", 16, 512, 1, False),
    ("1f1b", 16, 512, 1, True),
    ("gpipe", 16, 512, 1, False),
    ("interleaved", 16, 256, 2, False),
)


def main() -> None:
    """Print a row per case."""
    drawn = random.Random(0)
    print("schedule     stages  microbatches  chunks  messages    first_ms  median_ms")
    for schedule, stages, microbatches, chunks, rendezvous in CASES:
        seconds = []
        for _ in range(21):
            times = StepTimes(
                forward=[drawn.randint(10**6, 2 * 10**6) for _ in range(stages * chunks)],
                backward=[drawn.randint(2 * 10**6, 4 * 10**6) for _ in range(stages * chunks)],
                link=[10**5] * (stages * chunks - 1),
            )
            begin = time.process_time()
            simulate(make_program(schedule, stages, microbatches, chunks), times, rendezvous=rendezvous)
            seconds.append(time.process_time() - begin)
        messages = "waited for" if rendezvous else "travel"
        print(
            f"{schedule:12s} {stages:6d} {microbatches:13d} {chunks:7d}  {messages:10s} "
            f"{seconds[0] * 1000:9.1f} {statistics.median(seconds[1:]) * 1000:10.1f}"
        )


if __name__ == "__main__":
    main()
