"""The same problem as a plain MILP with start-time variables, solved by HiGHS, against `split`'s solver.

python tests/benchmarks/split/milp.py [seconds per MILP] [PP,microbatches,limit_MiB ...]   (up to half an hour with 600)

A start time for every forward and backward of every (stage, microbatch), a binary for every (layer, stage), a count of
recomputed layers for every (module, stage); stages do their operations in 1F1B order, operations wait for their
neighbours' messages. Both solvers get the same integers and run on their own, one after the other.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from model import mindspeed_file
from ortools.math_opt.python import mathopt

from mindspeed_autoparallel.planner.split import SplitProblem, solve
from mindspeed_autoparallel.planner.split.from_profile import problem_from_profile
from mindspeed_autoparallel.profiles import read_profile
from mindspeed_autoparallel.schedule import make_program

CASES = ("2,8,240000", "4,8,120000", "4,32,120000", "8,8,62000", "8,32,62000", "16,64,40000")
MS = 1_000_000


def milp(problem: SplitProblem) -> tuple[Any, Any]:
    """The model, and its step time in ms."""
    model = mathopt.Model()
    stages = range(problem.num_stages)
    layers = [k for k, segment in enumerate(problem.segments) for _ in range(segment.num_layers)]
    on = [[model.add_binary_variable() for _ in stages] for _ in layers]
    for row in on:
        model.add_linear_constraint(sum(row) == 1)
    for above, below in itertools.pairwise(on):
        # Layers come in order: the next one is on the same stage or a later one.
        for stage in stages:
            model.add_linear_constraint(sum(below[: stage + 1]) <= sum(above[: stage + 1]))
    held = [
        [sum(row[s] for k, row in zip(layers, on, strict=True) if k == seg) for s in stages]
        for seg in range(len(problem.segments))
    ]
    forward: list[Any] = [0.0] * len(stages)
    backward: list[Any] = [0.0] * len(stages)
    memory: list[Any] = [0.0] * len(stages)
    for k, segment in enumerate(problem.segments):
        plain = segment.kinds[0]
        for s in stages:
            if segment.beside is not None:
                model.add_linear_constraint(held[k][s] <= held[segment.beside][s])
            forward[s] += segment.forward / MS * held[k][s]
            backward[s] += segment.backward / MS * held[k][s]
            memory[s] += plain.memory[s] / 2**20 * held[k][s]
            again: Any = 0.0
            for kind in segment.kinds[1:]:
                count = model.add_integer_variable(lb=0, ub=segment.num_layers)
                again += count
                backward[s] += kind.extra_backward / MS * count
                memory[s] += (kind.memory[s] - plain.memory[s]) / 2**20 * count
            if len(segment.kinds) > 1:
                model.add_linear_constraint(again <= held[k][s])
    for s in stages:
        model.add_linear_constraint(memory[s] <= problem.memory_limit[s] / 2**20)
        model.add_linear_constraint(
            sum(row[s] for k, row in zip(layers, on, strict=True) if problem.segments[k].beside is None) >= 1
        )
    start = {
        (kind, s, m): model.add_variable(lb=0) for kind in "FB" for s in stages for m in range(problem.num_microbatches)
    }
    step = model.add_variable(lb=0)
    for s, actions in enumerate(make_program(problem.schedule, problem.num_stages, problem.num_microbatches)):
        length = {"F": forward[s], "B": backward[s]}
        for first, then in itertools.pairwise(actions):
            model.add_linear_constraint(
                start[then.kind, s, then.microbatch] >= start[first.kind, s, first.microbatch] + length[first.kind]
            )
        model.add_linear_constraint(step >= start["B", s, actions[-1].microbatch] + backward[s])
        for m in range(problem.num_microbatches):
            if s + 1 < problem.num_stages:
                link = problem.link[s] / MS
                model.add_linear_constraint(start["F", s + 1, m] >= start["F", s, m] + forward[s] + link)
                model.add_linear_constraint(start["B", s, m] >= start["B", s + 1, m] + backward[s + 1] + link)
    model.minimize(step)
    return model, step


def main() -> None:
    """Print a row per case."""
    limit_s = float(sys.argv[1]) if len(sys.argv) > 1 else 600.0
    with tempfile.TemporaryDirectory() as folder:
        profile = read_profile(mindspeed_file(Path(folder)), tensor_size=4, p2p_gbps=25.0)
    print("PP  microbatches  limit_MiB    MILP_s  status    MILP_ms  bound_ms   split_s  status   split_ms     ratio")
    for case in sys.argv[2:] or CASES:
        stages, microbatches, limit = map(int, case.split(","))
        problem = problem_from_profile(
            profile, num_stages=stages, num_microbatches=microbatches, memory_limit_mib=limit
        )
        begin = time.perf_counter()
        found = solve(problem)
        ours = time.perf_counter() - begin
        begin = time.perf_counter()
        model, _ = milp(problem)
        parameters = mathopt.SolveParameters(
            time_limit=timedelta(seconds=limit_s), relative_gap_tolerance=0.0, absolute_gap_tolerance=0.1
        )
        result = mathopt.solve(model, mathopt.SolverType.HIGHS, params=parameters)
        theirs = time.perf_counter() - begin
        proved = result.termination.reason == mathopt.TerminationReason.OPTIMAL
        bounds = result.termination.objective_bounds
        print(
            f"{stages:2d} {microbatches:13d} {limit:10d} {theirs:9.2f}  {'optimal ' if proved else 'time out'}"
            f" {bounds.primal_bound:8.1f} {bounds.dual_bound:9.1f} {ours:9.3f}  {found.status:8s}"
            f" {found.step_time / MS:8.1f} {'' if proved else '> '}{theirs / ours:8.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
