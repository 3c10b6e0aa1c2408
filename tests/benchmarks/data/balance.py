"""Measure how evenly work lies on replicas, before and after, and what deciding costs.

PYTHONPATH=. python tests/benchmarks/data/balance.py [steps]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[3] / "docs/examples"))
import numpy
from shapes import SHAPES

from mindspeed_autoparallel.data.balance import BatchShape, balance
from mindspeed_autoparallel.data.partition import cost_of, lower_bound, partition
from mindspeed_autoparallel.data.work import ModuleWork, WorkModel
from reference_vlm.data.evenness import evenness

# A decoder of width 4,096 (7e9 parameters), an encoder of width 1,280 (0.6e9): operations of a sample in 1e9.
DECODER = ModuleWork(name="text_decoder", rows="tokens", linear=14.0, quadratic=2 * 32 * 4096 * 1e-9 * 2)
ENCODER = ModuleWork(name="image_encoder", rows="patches", linear=1.3, quadratic=4 * 32 * 1280 * 1e-9)
MODELS = {
    "one phase": WorkModel(phases=((DECODER, ENCODER),)),
    "two phases": WorkModel(phases=((DECODER,), (ENCODER,))),
}


def single(steps: int) -> None:
    """Print one row per shape, number of replicas and kind of layout: samples are given to replicas."""
    print(
        "| shape | phases | replicas | in order | max/mean | bound: max/mean | above the bound, mean, worst | ms, median, worst |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, kind, replicas in cases((8, 16, 32, 64)):
        rows = []
        for seed in range(steps):
            weights = MODELS[kind].of(SHAPES[name](512, seed))
            bins = numpy.arange(512) % replicas
            mean = weights.sum() / replicas
            began = time.process_time()
            bins_found = partition(weights, replicas, 512 // replicas)
            took = 1000 * (time.process_time() - began)
            before, after = (cost_of(weights, one, replicas) / mean for one in (bins, bins_found))
            bound = lower_bound(weights, replicas, 512 // replicas) / mean
            rows.append((before, after, bound, after / bound - 1, took))
        before, after, bound, gap, took = zip(*rows, strict=True)
        print(
            f"| {name} | {kind} | {replicas} | {statistics.mean(before):.3f} | {statistics.mean(after):.4f} | "
            f"{statistics.mean(bound):.4f} | {100 * statistics.mean(gap):.2f} %, {100 * max(gap):.2f} % | "
            f"{statistics.median(took):.2f}, {max(took):.2f} |"
        )


def packed(steps: int) -> None:
    """Print one row per shape, number of replicas and kind of pack: four samples, or any number up to 1.25 times the
    mean pack's tokens, but at least the longest sample's."""
    print(
        "| shape | phases | replicas | packs | max/mean | above the bound, mean, worst | largest pack | ms, median, worst |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, kind, replicas in cases((8, 64)):
        for is_filled in (False, True):
            rows = []
            for seed in range(steps):
                sizes = SHAPES[name](512, seed)
                shape = BatchShape(
                    num_replicas=replicas,
                    num_microbatches=128 // replicas,
                    micro_batch_size=4,
                    is_padded=False,
                    is_filled=is_filled,
                    max_tokens=int(max(sizes[:, 0].max(), 1.25 * sizes[:, 0].mean() * 4)) if is_filled else 0,
                )
                began = time.process_time()
                samples = balance(sizes, MODELS[kind], shape)
                took = 1000 * (time.process_time() - began)
                work = numpy.append(MODELS[kind].of(sizes).sum(axis=1), 0.0)[samples].sum(axis=2)
                found = evenness(sizes, MODELS[kind], shape, samples)
                rows.append((found.imbalance, found.gap, work.max() / work.mean(), took))
            after, gap, largest, took = zip(*rows, strict=True)
            print(
                f"| {name} | {kind} | {replicas} | {'filled' if is_filled else 'of four'} | {statistics.mean(after):.4f} | "
                f"{100 * statistics.mean(gap):.2f} %, {100 * max(gap):.2f} % | {statistics.mean(largest):.2f} | "
                f"{statistics.median(took):.2f}, {max(took):.2f} |"
            )


def cases(replicas: tuple[int, ...]) -> Iterator[tuple[str, str, int]]:
    """Return shape, kind of layout and number of replicas."""
    for name in SHAPES:
        for kind in MODELS:
            if name != "text" or kind == "one phase":
                yield from ((name, kind, number) for number in replicas)


def main() -> None:
    """Print both tables."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    print(f"512 samples, {steps} steps; the same number of samples, or of packs, on every replica")
    single(steps)
    packed(steps)


if __name__ == "__main__":
    main()
