"""What every strategy, bound and heuristic of the split contributes: the same cases with all of them, and without each.

python tests/benchmarks/split/ablation.py [--limit 3] [--cases 12] [--only NAME...]

A part is taken out in this process by replacing the function that runs it. It is tried on the kinds of cases that reach
it: interleaved pipelines, modules side by side, chains, small problems, long steps. Seconds are of the processor, in
which the time limit is counted, too. Step: mean over the cases beside the step with everything.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from enumeration import draw
from grid import problem_of
from model import our_file
from random_modules import random_problem
from virtual_stages import random_case

from mindspeed_autoparallel.errors import AutoParallelError
from mindspeed_autoparallel.planner.split import SplitProblem, solve, solver
from mindspeed_autoparallel.planner.split.bounds import divisions, relaxation
from mindspeed_autoparallel.planner.split.heuristics import layer_moves, local_search
from mindspeed_autoparallel.planner.split.model import cut_model
from mindspeed_autoparallel.planner.split.strategies import chain_solver, virtual_stages
from mindspeed_autoparallel.profiles import read_profile

NUM_BESIDE, NUM_CHAINS, NUM_SMALL = 6, 8, 10
TIGHT = (5, 17, 20, 95, 116, 155)
"""Cases of ``virtual_stages.py`` on 16 ranks with three or four virtual stages each, in tight memory."""


class Part(NamedTuple):
    """``replaced``: object, attribute, and what stands there without the part."""

    name: str
    kind: str
    replaced: tuple[tuple[Any, str, Any], ...]


class Solved(NamedTuple):
    """One case; ``step`` is None where nothing was found."""

    step: int | None
    gap_percent: float
    cpu_s: float


def cases(num_virtual: int) -> dict[str, list[SplitProblem]]:
    """Return the problems by kind; ``num_virtual``: interleaved ones."""
    longer = [one for one in map(random_case, range(200)) if one.num_stages == 4 and one.num_chunks == 2][:3]
    return {
        "interleaved": [random_case(seed) for seed in range(0, 96, 96 // num_virtual)],
        "tight": [random_case(seed) for seed in TIGHT],
        "side by side": [random_problem(random.Random(seed), chained=False) for seed in range(NUM_BESIDE)],
        "chain": [*hard_chains(), *(random_problem(random.Random(seed), chained=True) for seed in range(NUM_CHAINS))],
        "small": [draw(seed)[0] for seed in range(NUM_SMALL)],
        "long step": [replace(one, num_microbatches=24_000) for one in longer],
    }


def hard_chains() -> list[SplitProblem]:
    """Return 32 + 80 layers on 16 stages with 8 microbatches, from tight memory to medium: the longest of ``grid.py``."""
    with tempfile.TemporaryDirectory() as folder:
        profile = read_profile(our_file(Path(folder), 32, 80), p2p_gbps=25.0)
    return [problem_of(profile, 16, 8, share)[0] for share in (0.0, 0.25, 0.5)]


def parts() -> list[Part]:
    """Return everything that can be taken out."""

    def without(name: str) -> tuple[tuple[Any, str, Any], ...]:
        return ((solver, "PORTFOLIO", tuple(one for one in solver.PORTFOLIO if one.name != name)),)

    def nothing(*_: Any, **__: Any) -> None:
        return None

    def improved(problem: Any, chain: Any, ends: Any, cuts: Any, deadline: float) -> Any:
        cut, length = relaxation.cut_of(problem, chain.placement(ends))
        cuts[cut] = None
        return ends, int(length)

    solving = virtual_stages._Solve
    return [
        Part("strategy: chain", "chain", without("chain")),
        Part("strategy: enumeration", "small", without("enumeration")),
        Part("strategy: side by side", "side by side", without("side by side")),
        Part("strategy: long step", "long step", without("long step")),
        Part("strategy: row", "interleaved", without("row")),
        Part("chain: halves at the bottleneck", "chain", ((chain_solver, "halves", nothing),)),
        Part("chain: moves of a layer", "chain", ((chain_solver, "improve", improved),)),
        Part("chain: cuts of slow stages", "chain", ((chain_solver, "first_cuts", lambda problem: {}),)),
        Part(
            "beside: divided at the bottleneck", "side by side", ((divisions, "_divided_at_bottleneck", lambda *_: []),)
        ),
        Part("beside: moves of layers", "side by side", ((layer_moves.LayerMoves, "perturb", nothing),)),
        Part("row: cuts of ranks", "interleaved", ((relaxation, "rank_cuts", lambda problem: []),)),
        Part(
            "row: bound by whole ranks",
            "interleaved",
            ((virtual_stages, "whole_ranks_bound", lambda problem, low, high: low),),
        ),
        Part("row: relaxed below the plan", "interleaved", ((solving, "_relax_again", nothing),)),
        Part("row: mixtures of whole ranks", "interleaved", ((solving, "_mix_whole_ranks", nothing),)),
        Part("row: whole layers", "interleaved", ((solving, "_search_whole_layers", nothing),)),
        Part("row: perturbations", "interleaved", ((local_search.LocalSearch, "improve", nothing),)),
        Part("row: search below a target", "tight", ((solving, "_has_many_stages", False),)),
    ]


@contextlib.contextmanager
def taken_out(part: Part) -> Iterator[None]:
    """Run without ``part``."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in part.replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def solved(problem: SplitProblem, limit: float) -> Solved:
    """Solve one case."""
    begun = time.process_time()
    try:
        found = solve(problem, time_limit_s=limit)
    except AutoParallelError:
        return Solved(None, 100.0, time.process_time() - begun)
    return Solved(found.step_time, (1 - found.lower_bound / found.step_time) * 100, time.process_time() - begun)


def row(name: str, kind: str, results: list[Solved], whole: list[Solved]) -> str:
    """Return a row of the table."""
    both = [(one.step, other.step) for one, other in zip(results, whole, strict=True) if one.step and other.step]
    slower = [(one / other - 1) * 100 for one, other in both]
    gaps, lost = [one.gap_percent for one in results], sum(one.step is None for one in results)
    proved = sum(gap <= 0 for gap in gaps)
    return (
        f"| {name} | {kind} | {statistics.mean(slower or [0]):+.3f} | {max(slower or [0]):+.3f} | {proved} of {len(results)} | "
        f"{statistics.mean(gaps):.2f} | {max(gaps):.2f} | {sum(one.cpu_s for one in results) / len(results):.2f} | {lost or ''} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=float, default=3.0)
    parser.add_argument("--cases", type=int, default=12)
    parser.add_argument("--only", nargs="*", default=[])
    arguments = parser.parse_args()
    # One thread that reads this clock: processor time, so that other work on the machine changes little.
    time.monotonic = time.process_time
    cut_model.CLOCK = 1
    problems = cases(arguments.cases)
    chosen: list[Part] = [
        part for part in parts() if not arguments.only or any(word in part.name for word in arguments.only)
    ]
    run: Callable[[str], list[Solved]] = lambda kind: [solved(one, arguments.limit) for one in problems[kind]]
    whole = {kind: run(kind) for kind in dict.fromkeys(part.kind for part in chosen)}
    print("| without | cases | step: mean, % | worst, % | proved | gap: mean, % | worst, % | s a case | no plan |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for kind, results in whole.items():
        print(row("nothing", kind, results, results), flush=True)
    for part in chosen:
        with taken_out(part):
            print(row(part.name, part.kind, run(part.kind), whole[part.kind]), flush=True)


if __name__ == "__main__":
    main()
