"""Interleaved splits: plan, bound and CPU time beside a plain local search over the same costs.

python tests/benchmarks/split/virtual_stages.py 100 --seconds 10 --limit 20 --rows rows.jsonl

``--rows`` keeps what each case gave, so that a run that was stopped goes on with the cases left (``--most-seconds`` stops
it between two of them), and prints the distribution of all that are there.

The local search times whole neighbourhoods with the batch simulator and knows neither cuts nor bounds: boundaries i to
j shifted by one, from four starts, then shaken and repeated. It takes layers whole, so it is run on loose memory only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy

from mindspeed_autoparallel.planner.split import LayerKind, Segment, SplitProblem, solve
from mindspeed_autoparallel.planner.split.model import cut_model
from mindspeed_autoparallel.planner.split.model.layer_row import LayerRow
from mindspeed_autoparallel.planner.split.model.problem import fullest_moments
from mindspeed_autoparallel.schedule import BatchSimulator, make_program

SAME_PERCENT = 0.1
TIGHT = 0.5
"""Of what all layers held whole and spread evenly would need."""


def random_case(seed: int) -> SplitProblem:
    """Return 50 to 112 layers of two or three kinds on 4 to 16 ranks with 2 to 4 chunks; every third is tight."""
    drawn = random.Random(seed)
    while True:
        stages, chunks, layers = drawn.choice([4, 8, 16]), drawn.choice([2, 3, 4]), drawn.randint(50, 112)
        if stages * chunks <= layers:
            break
    microbatches = drawn.choice([n for n in (24, 32, 48, 64, 96, 128) if n % stages == 0])
    virtual, number = stages * chunks, drawn.choice([2, 3])
    moments = fullest_moments(make_program("interleaved", stages, microbatches, chunks))
    borders = [0, *sorted(drawn.sample(range(4, layers - 4), number - 1)), layers]
    segments = []
    for index, count in enumerate(high - low for low, high in itertools.pairwise(borders)):
        forward, saved = drawn.randint(5_000, 40_000), drawn.randint(100, 400)
        kinds = [LayerKind(name="none", memory=(saved,) * virtual, saved=saved)]
        for name, share, kept in (("selective", 4, saved * 2 // 3), ("full", 1, saved // 10)):
            kinds.append(replace(kinds[0], name=name, extra_backward=forward // share, saved=kept))
        segments.append(
            Segment(
                name=f"module{index}",
                num_layers=count,
                forward=forward,
                backward=2 * forward,
                kinds=tuple(kinds),
                predecessors=(index - 1,) if index else (),
            )
        )
    whole = sum(s.num_layers * s.kinds[0].saved for s in segments) / stages
    fullest = max(sum(moment) for moment in moments[0]) / chunks + 1
    limit = int(whole * fullest * (TIGHT if seed % 3 == 2 else 1000))
    return SplitProblem(
        segments=tuple(segments),
        num_stages=stages,
        num_chunks=chunks,
        num_microbatches=microbatches,
        schedule="interleaved",
        memory_limit=(limit,) * stages,
        link=(200,) * (virtual - 1),
        sends="eager",
        in_flight=moments,
    )


def local_search(problem: SplitProblem, seconds: float) -> float:
    """Return the best step that plain local search finds in so much CPU time."""
    row = LayerRow(problem)
    program = make_program("interleaved", problem.num_stages, problem.num_microbatches, problem.num_chunks)
    simulator = BatchSimulator(program, problem.sends, problem.link)
    i, j = numpy.triu_indices(problem.num_virtual - 1)
    places = numpy.arange(problem.num_virtual + 1)
    shifts = ((places > i[:, None]) & (places <= j[:, None] + 1)).astype(int)
    moves, drawn = numpy.concatenate([shifts, -shifts]), numpy.random.default_rng(1)
    end = time.process_time() + seconds
    best, best_ends = numpy.inf, None
    starts = []
    for lighter in (0.0, 0.1, 0.2, 0.3):
        share = numpy.ones(problem.num_virtual)
        share[-problem.num_stages :] *= 1 - lighter
        share[: problem.num_stages] *= 1 - lighter / 2
        starts.append(row.even((row.forward + row.backward).astype(float), share))
    while time.process_time() < end:
        ends = starts.pop() if starts else best_ends
        for _ in range(0 if len(starts) or best_ends is None else drawn.integers(2, 7)):
            moved = ends + moves[drawn.integers(len(moves))]
            ends = moved if row.is_cut(moved[None])[0] else ends
        step = numpy.inf
        while time.process_time() < end:
            around = ends + moves
            around = around[row.is_cut(around)]
            steps = simulator.step_times(row.forward_times(around), row.backward_times(around))
            if steps.min() >= step:
                break
            step, ends = steps.min(), around[int(steps.argmin())]
        if step < best:
            best, best_ends = step, ends
    return float(best)


def measured(seed: int, seconds: float, limit: float) -> dict[str, Any]:
    """Return one case: its sizes, and what solver and local search found in how much CPU time."""
    problem, tight = random_case(seed), seed % 3 == 2
    layers, begun = sum(s.num_layers for s in problem.segments), time.process_time()
    found = solve(problem, time_limit_s=limit)
    spent = time.process_time() - begun
    beside = local_search(problem, seconds) if seconds and not tight else None
    return {
        "seed": seed,
        "stages": problem.num_stages,
        "chunks": problem.num_chunks,
        "microbatches": problem.num_microbatches,
        "layers": layers,
        "per_chunk": round(layers / problem.num_virtual, 2),
        "memory": "tight" if tight else "loose",
        "status": found.status,
        "gap_percent": (1 - found.lower_bound / found.step_time) * 100,
        "cpu_s": spent,
        "slower_percent": None if beside is None else (found.step_time / beside - 1) * 100,
        "seconds": seconds,
        "limit": limit,
    }


def show(row: dict[str, Any]) -> None:
    """Print a case."""
    slower = "" if row["slower_percent"] is None else f"{row['slower_percent']:+.3f}"
    print(
        f"{row['seed']:4d} {row['stages']:3d} {row['chunks']:4d} {row['microbatches']:13d} {row['layers']:7d} "
        f"{row['per_chunk']:10.1f}  {row['memory']:6s}  {row['status']:8s} {row['gap_percent']:8.3f} "
        f"{row['cpu_s']:8.2f}  {slower:>14s}",
        flush=True,
    )


def show_all(rows: list[dict[str, Any]]) -> None:
    """Print the distribution, and that of cases whose chunks hold three layers or more."""
    for name, some in (("all", rows), ("3 layers a chunk or more", [row for row in rows if row["per_chunk"] >= 3])):
        if not some:
            continue
        gaps, times = [row["gap_percent"] for row in some], [row["cpu_s"] for row in some]
        slower = [row["slower_percent"] for row in some if row["slower_percent"] is not None]
        print(f"{name}: {len(some)} cases, {sum(row['status'] == 'optimal' for row in some)} proved")
        print(f"  gap: median {statistics.median(gaps):.2f} %, worst {max(gaps):.2f} %")
        print(f"  CPU: median {statistics.median(times):.1f} s, worst {max(times):.1f} s")
        if slower:
            fine = sum(x <= SAME_PERCENT for x in slower)
            print(f"  beside local search: {min(slower):+.3f} to {max(slower):+.3f} %, {fine} of {len(slower)} fine")


def main() -> None:
    """Print a row per case, and the distribution."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--limit", type=float, default=20.0)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--most-seconds", type=float, default=float("inf"))
    arguments = parser.parse_args()
    begun = time.monotonic()
    clock = time.monotonic
    # One thread that looks at this clock: CPU time, so that other work on the machine changes little.
    time.monotonic = time.process_time
    cut_model.CLOCK = 1
    rows = []
    if arguments.rows is not None and arguments.rows.exists():
        rows = [json.loads(line) for line in arguments.rows.read_text().splitlines()]
    done = {row["seed"] for row in rows}
    print("seed  PP  VPP  microbatches  layers  per_chunk  memory  status      gap_%    cpu_s  local_search_%")
    for seed in range(arguments.first, arguments.first + arguments.cases):
        if seed not in done and clock() - begun < arguments.most_seconds:
            rows.append(measured(seed, arguments.seconds, arguments.limit))
            if arguments.rows is not None:
                with arguments.rows.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
            show(rows[-1])
    show_all(rows)


if __name__ == "__main__":
    main()
