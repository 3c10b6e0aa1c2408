"""What no plan of whole layers beats, asked step by step: is there one below a step between the bound and a plan known?

Such a step leaves so little room on ranks and at boundaries that a question is answered in a second where the optimum
itself is out of reach. No schedule is searched, and no plan is found.
"""

from __future__ import annotations

import time

from mindspeed_autoparallel.planner.split import SplitProblem
from mindspeed_autoparallel.planner.split.cut_model import ROUNDING, Cut, CutModel
from mindspeed_autoparallel.planner.split.layer_row import fits_a_row
from mindspeed_autoparallel.planner.split.relaxation import cut_of, relaxed_cuts
from mindspeed_autoparallel.planner.split.whole_ranks import rank_caps, roomy_stages

FIRST_SHARE, LEAST_SHARE = 0.4, 0.05
"""Of the way from the bound to what is to be beaten: where the first question is asked, and where none is any more."""
CLOSER, FURTHER = 0.5, 1.5
"""Change of the share after a question that stayed open, and after one that was answered."""
NODES, ROUNDS, PLANS = 200, 8, 4
"""Of the search for whole layers, and of the relaxation, for one question; fractional answers that it learns from."""


def raised_bound(problem: SplitProblem, low: float, high: int, deadline: float) -> float:
    """Return a step that no plan beats, at least ``low`` and at most ``high``, in ticks; raised until ``deadline``."""
    share, cuts = FIRST_SHARE, dict[Cut, None]()
    while fits_a_row(problem) and low < high and share >= LEAST_SHARE and time.monotonic() < deadline:
        target = high if high - low <= 1 else min(high, int(low + share * (high - low)) + 1)
        if _none_below(problem, target, cuts, deadline):
            low, share = target, min(1.0, share * FURTHER)
        else:
            share *= CLOSER
    return low


def _none_below(problem: SplitProblem, step: int, cuts: dict[Cut, None], deadline: float) -> bool:
    """Return whether it is proved that every plan takes ``step`` or more; ``cuts`` grows by the paths learned."""
    caps = rank_caps(problem, step)
    if caps is None:
        return True
    relaxed = relaxed_cuts(problem, deadline, step, tuple(cuts), ROUNDS, caps)
    if relaxed is None or relaxed[1] >= step:
        return True
    cuts.update(relaxed[0])
    plain = roomy_stages(problem, step)
    for _ in range(PLANS):
        model = CutModel(problem, whole=True)
        model.cap(caps)
        for cut in cuts:
            model.add(cut)
        model.run_plainly(plain)
        status, _ = model.solve(deadline, NODES, step * (1 + 2 * ROUNDING))
        if status == "infeasible":
            return True
        if status == "unknown" or time.monotonic() > deadline:
            return False
        counts = tuple(tuple(tuple(round(v) for v in row) for row in kinds) for kinds in model.values())
        path, _ = cut_of(problem, counts)
        if path in cuts:
            return False
        cuts[path] = None
    return False
