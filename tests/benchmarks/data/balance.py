"""Measure how evenly work lies on replicas, before and after, and what deciding costs.

PYTHONPATH=. python tests/benchmarks/data/balance.py [steps]
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import numpy
from shapes import SHAPES

from mindspeed_autoparallel.data.partition import cost_of, partition
from mindspeed_autoparallel.data.work import ModuleWork, WorkModel

# A decoder of width 4,096 (7e9 parameters), an encoder of width 1,280 (0.6e9): operations of a sample in 1e9.
DECODER = ModuleWork(name="text_decoder", rows="tokens", linear=14.0, quadratic=2 * 32 * 4096 * 1e-9 * 2)
ENCODER = ModuleWork(name="image_encoder", rows="patches", linear=1.3, quadratic=4 * 32 * 1280 * 1e-9)
MODELS = {
    "one phase": WorkModel(phases=((DECODER, ENCODER),)),
    "two phases": WorkModel(phases=((DECODER,), (ENCODER,))),
}


def main() -> None:
    """Print one row per shape, number of replicas and kind of layout."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    print(f"512 samples, {steps} steps; the same number of samples on every replica")
    print(
        "| shape | phases | replicas | in order | max/mean | bound: max/mean | above the bound, mean, worst | ms, median, worst |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, draw in SHAPES.items():
        for kind, model in MODELS.items():
            if name == "text" and kind == "two phases":
                continue
            for replicas in (8, 16, 32, 64):
                rows = []
                for seed in range(steps):
                    weights = model.of(draw(512, seed))
                    bins = numpy.arange(512) % replicas
                    mean = weights.sum() / replicas
                    began = time.process_time()
                    found = partition(weights, replicas, 512 // replicas)
                    took = 1000 * (time.process_time() - began)
                    rows.append(
                        (
                            cost_of(weights, bins, replicas) / mean,
                            found.cost / mean,
                            found.lower_bound / mean,
                            found.gap,
                            took,
                        )
                    )
                before, after, bound, gap, took = zip(*rows, strict=True)
                print(
                    f"| {name} | {kind} | {replicas} | {statistics.mean(before):.3f} | {statistics.mean(after):.4f} | "
                    f"{statistics.mean(bound):.4f} | {100 * statistics.mean(gap):.2f} %, {100 * max(gap):.2f} % | "
                    f"{statistics.median(took):.2f}, {max(took):.2f} |"
                )


if __name__ == "__main__":
    main()
