"""Random modules on 16 stages: how many are proved in how much CPU time, and what gap is left.

python tests/benchmarks/split/random_modules.py [chain | side-by-side] [instances] [limit in s]
"""

from __future__ import annotations

import random
import sys
import time

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.split import LayerKind, Segment, SplitProblem, solve

STAGES = 16
LIMIT_S = 20.0


def random_problem(drawn: random.Random, *, chained: bool) -> SplitProblem:
    """Two or three modules, one after the other or all side by side, of 40 to 60 layers whose times
    differ up to a thousandfold; none or full recomputation; tight memory."""
    microbatches = drawn.choice([8, 16, 32, 64])
    segments = []
    for index in range(drawn.choice([2, 3])):
        forward, memory = drawn.randint(10**3, 10**6), drawn.randint(10, 400)
        in_flight = [min(microbatches, STAGES - stage) for stage in range(STAGES)]
        kinds = (
            LayerKind(name="none", memory=tuple(memory * n for n in in_flight)),
            LayerKind(
                name="full",
                extra_backward=forward,
                transient=memory,
                memory=tuple(max(1, memory // 8) * n for n in in_flight),
            ),
        )
        frozen = index == 0 and drawn.random() < 0.2
        segments.append(
            Segment(
                name=f"module{index}",
                num_layers=drawn.randint(40, 60),
                forward=forward,
                backward=0 if frozen else 2 * forward,
                kinds=kinds,
                predecessors=(index - 1,) if index and chained else (),
            )
        )
    whole = sum(segment.num_layers * segment.kinds[0].memory[-1] for segment in segments)
    limit = int(whole / STAGES * min(STAGES, microbatches) * drawn.uniform(0.2, 0.7)) + 500
    return SplitProblem(
        segments=tuple(segments),
        num_stages=STAGES,
        num_microbatches=microbatches,
        memory_limit=(limit,) * STAGES,
        per_operation=drawn.choice([0, 1000]),
    )


def main() -> None:
    """Print a row per instance, and the distribution."""
    chained = sys.argv[1:2] != ["side-by-side"]
    instances = int(sys.argv[2]) if len(sys.argv) > 2 else 40
    limit_s = float(sys.argv[3]) if len(sys.argv) > 3 else LIMIT_S
    # The search has one thread and looks at this clock: CPU time, so that other work on the machine changes little.
    time.monotonic = time.process_time
    infeasible, proved, gaps = 0, [], []
    print("seed  microbatches  layers        status      gap_%    cpu_s")
    for seed in range(instances):
        problem = random_problem(random.Random(seed), chained=chained)
        layers = "+".join(str(segment.num_layers) for segment in problem.segments)
        begin = time.process_time()
        try:
            found = solve(problem, time_limit_s=limit_s)
        except InfeasiblePlan:
            infeasible += 1
            continue
        seconds = time.process_time() - begin
        gap = (1 - found.lower_bound / found.step_time) * 100
        if found.status == "optimal":
            proved.append(seconds)
        else:
            gaps.append(gap)
        print(
            f"{seed:4d} {problem.num_microbatches:13d}  {layers:12s}  {found.status:8s} {gap:8.4f} {seconds:8.3f}",
            flush=True,
        )
    print(
        f"{len(proved) + len(gaps)} with a plan, {infeasible} without; proved in 1 s: "
        f"{sum(seconds <= 1 for seconds in proved)}, in {limit_s:g} s: {len(proved)}"
    )
    if gaps:
        print("gaps left in %: " + ", ".join(f"{gap:.3f}" for gap in sorted(gaps)))


if __name__ == "__main__":
    main()
