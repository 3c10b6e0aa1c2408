"""Plans per second of CPU: many at once beside one replay after another, equal results checked.

python tests/benchmarks/split/batch_simulator.py [plans at once]   (about a minute)
"""

from __future__ import annotations

import sys
import time

import numpy

from mindspeed_autoparallel.schedule import BatchSimulator, StepTimes, make_program, simulate

CASES = ((8, 4, 32, "freed"), (8, 4, 32, "eager"), (16, 2, 64, "freed"), (4, 2, 128, "freed"), (16, 1, 64, "blocking"))
ONE_BY_ONE = 20


def main() -> None:
    """Print a row per case."""
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 1024
    drawn = numpy.random.default_rng(0)
    print("PP  VPP  microbatches  messages  batch_per_s  one_by_one_per_s  ratio")
    for stages, chunks, microbatches, sends in CASES:
        program = make_program("interleaved" if chunks > 1 else "1f1b", stages, microbatches, chunks)
        virtual = stages * chunks
        link = drawn.integers(0, 50, virtual - 1).tolist()
        forward, backward = (drawn.integers(1, 10**6, (number, virtual)) for _ in range(2))
        batch = BatchSimulator(program, sends, link)
        begun = time.process_time()
        together = batch.step_times(forward, backward)
        fast = number / (time.process_time() - begun)
        begun = time.process_time()
        alone = [
            simulate(
                program, StepTimes(forward=forward[k].tolist(), backward=backward[k].tolist(), link=link), sends=sends
            ).step_time
            for k in range(ONE_BY_ONE)
        ]
        slow = ONE_BY_ONE / (time.process_time() - begun)
        assert alone == together[:ONE_BY_ONE].tolist()
        print(
            f"{stages:2d} {chunks:4d} {microbatches:13d}  {sends:8s} {fast:12.0f} {slow:17.0f} {fast / slow:6.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
