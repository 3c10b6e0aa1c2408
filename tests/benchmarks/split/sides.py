"""Tight memory: is the gap between the best plan and the bound due to the plan or to the bound?

python tests/benchmarks/split/sides.py 12 --stages 4 --chunks 3 --long 30

Cases with about two layers a virtual stage, as the tight ones of ``virtual_stages.py``, on few ranks, where a long solve
brackets the optimum. Printed per case, in percent of the best plan known: how much lower the highest bound known is; how
much slower the plan is, and how much lower its bound, after a short solve (6 s for 48 virtual stages, in proportion for
fewer); and how much lower the linear relaxation and mixtures of whole ranks are.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from dataclasses import replace

from mindspeed_autoparallel.planner.split import LayerKind, Segment, SplitProblem, solve
from mindspeed_autoparallel.planner.split.bounds.rank_mixture import RankMixture
from mindspeed_autoparallel.planner.split.bounds.relaxation import relaxed_cuts
from mindspeed_autoparallel.planner.split.model import cut_model
from mindspeed_autoparallel.planner.split.model.problem import fullest_moments
from mindspeed_autoparallel.planner.split.model.solution import batch_simulator
from mindspeed_autoparallel.planner.split.settings import SETTINGS
from mindspeed_autoparallel.schedule import make_program

MIXTURE_SECONDS = 20.0


def tight_case(seed: int, stages: int, chunks: int) -> SplitProblem:
    """Return two or three modules of 2 to 2.3 layers a virtual stage, in half of the memory that they need whole."""
    drawn = random.Random(seed)
    virtual, microbatches = stages * chunks, 4 * stages
    layers, number = drawn.choice([24, 25, 26, 27, 28]) * virtual // 12, drawn.choice([2, 3])
    moments = fullest_moments(make_program("interleaved", stages, microbatches, chunks))
    borders = [0, *sorted(drawn.sample(range(4, layers - 4), number - 1)), layers]
    segments: list[Segment] = []
    for index, count in enumerate(high - low for low, high in itertools.pairwise(borders)):
        forward, saved = drawn.randint(5_000, 40_000), drawn.randint(100, 400)
        kinds = [LayerKind(name="none", memory=(saved,) * virtual, saved=saved)]
        for name, share, kept in (("selective", 4, saved * 2 // 3), ("full", 1, saved // 10)):
            kinds.append(replace(kinds[0], name=name, extra_backward=forward // share, saved=kept))
        before = (index - 1,) if index else ()
        segments.append(
            Segment(
                name=f"module{index}", num_layers=count, forward=forward, backward=2 * forward, kinds=tuple(kinds),
                predecessors=before,
            )
        )  # fmt: skip
    whole = sum(s.num_layers * s.kinds[0].saved for s in segments) / stages
    fullest = max(sum(moment) for moment in moments[0]) / chunks + 1
    return SplitProblem(
        segments=tuple(segments), num_stages=stages, num_chunks=chunks, num_microbatches=microbatches,
        schedule="interleaved", memory_limit=(int(whole * fullest * 0.5),) * stages, link=(200,) * (virtual - 1),
        in_flight=moments,
    )  # fmt: skip


def measured(problem: SplitProblem, long: float) -> list[float]:
    """Return the numbers of one case, in percent of the best plan; NaN where ranks hold too much to list."""
    found = solve(problem, time_limit_s=long)
    quick = solve(problem, time_limit_s=problem.num_virtual / 8)
    best = min(found.step_time, quick.step_time)
    relaxed = relaxed_cuts(problem, time.monotonic() + long)
    assert relaxed is not None  # a plan exists
    until, most = time.monotonic() + MIXTURE_SECONDS, 11 * problem.num_virtual
    mixture = RankMixture(problem, batch_simulator(problem)).bound(0, best + 1, until, most)
    mixed = float("nan") if mixture is None else mixture
    bounds = (max(found.lower_bound, quick.lower_bound), quick.lower_bound, relaxed[1], mixed)
    proved, after, linear, ranks = ((1 - bound / best) * 100 for bound in bounds)
    return [proved, (quick.step_time / best - 1) * 100, after, linear, ranks]


def main() -> None:
    """Print a row per case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=3)
    parser.add_argument("--long", type=float, default=30.0)
    arguments = parser.parse_args()
    # CPU time, so that other work on the machine changes little.
    time.monotonic = time.process_time
    cut_model.CLOCK = 1
    # On few ranks, mixtures of more columns still end within the time.
    vars(SETTINGS).update(columns_most_held=20_000, columns_most_ways=1_000_000, columns_most=20_000)
    print("seed  proved_within_%  quick: step_%  bound_%  relaxation_%  mixtures_%")
    for seed in range(arguments.first, arguments.first + arguments.cases):
        proved, step, bound, linear, ranks = measured(
            tight_case(seed, arguments.stages, arguments.chunks), arguments.long
        )
        print(f"{seed:4d} {proved:16.2f} {step:14.2f} {bound:8.2f} {linear:13.2f} {ranks:11.2f}", flush=True)


if __name__ == "__main__":
    main()
