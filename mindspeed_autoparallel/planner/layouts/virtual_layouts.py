"""Layouts with virtual stages, in two steps: first a quick bound, then a plan.

The bound comes from the linear relaxation and from whole layers per rank. The search of a plan uses the true message
sizes, which depend on where the last module begins; the rows of a bound do not contain this.
"""

from __future__ import annotations

import time
from math import ceil, comb, inf

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.evaluate import Evaluation, evaluated
from mindspeed_autoparallel.planner.layouts.bounds import tail_bound_us, tied_us_of
from mindspeed_autoparallel.planner.layouts.layout_solver import Attempts, LayoutResult, lowered, simple_splits
from mindspeed_autoparallel.planner.layouts.options import SolveOptions
from mindspeed_autoparallel.planner.layouts.short_rows import MOST_EVENTS_OF_CUTS
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.planner.problem_building import build_problem, split_placement
from mindspeed_autoparallel.planner.split import NoneBelow, StoppedEarly
from mindspeed_autoparallel.planner.split.bounds.relaxation import relaxed_cuts
from mindspeed_autoparallel.planner.split.bounds.whole_layers import raised_bound
from mindspeed_autoparallel.planner.split.bounds.whole_ranks import ranks_reach, whole_ranks_bound
from mindspeed_autoparallel.planner.split.model.cuts import Cut
from mindspeed_autoparallel.planner.split.state import Beginning
from mindspeed_autoparallel.planner.stage_times import NS_PER_US
from mindspeed_autoparallel.spec import Model

FEW_VIRTUAL_STAGES, FEW_LAYERS = 8, 40
"""Up to these sizes interleaved layouts of one module are proved quickly."""
ATTEMPTS = 3
"""Attempts of a search, each with less memory than the one before."""
ROUNDS = 8
"""Rounds of the relaxation; each adds critical paths."""


def bound_layout(candidate: Candidate, options: SolveOptions) -> LayoutResult:
    """Return a bound without a plan: by each rank alone, with whole layers, without replaying a schedule."""
    look = _Look(candidate, options)
    relaxed = relaxed_cuts(look.problem, look.deadline, look.below, most_rounds=1)
    if relaxed is None:
        return LayoutResult(proved_infeasible=True)
    bound = relaxed[1]
    if look.below is not None and bound < look.below:
        bound = whole_ranks_bound(look.problem, bound, look.below)
    return look.result(bound)


def follow_paths(candidate: Candidate, bound_us: float, options: SolveOptions) -> LayoutResult:
    """Return a bound of at least ``bound_us`` without a plan, from critical paths of plans faster than
    ``cutoff_us``."""
    look = _Look(candidate, options)
    paths = _relaxed_below(look)
    if paths is None and look.below is None:
        return LayoutResult(proved_infeasible=True)
    low = max(0.0, (bound_us - look.tied_us) * NS_PER_US)
    return look.result(max(low, paths[1] if paths is not None else look.below or 0.0))


def improve_layout(candidate: Candidate, options: SolveOptions, known: ModulePlacement | None = None) -> LayoutResult:
    """Return a bound from some critical paths and, unless it reaches ``cutoff_us``, a good plan.

    The bound is that of the plan's search where its problem has every plan of the layout.

    ``known``: a placement to start from, whether it fits or not.
    """
    look = _Look(candidate, options)
    relaxed = _relaxed_below(look)
    if relaxed is None or (look.below is not None and relaxed[1] >= look.below):
        return LayoutResult(proved_infeasible=True) if look.below is None else look.result(look.below)
    placement = None if known is None else split_placement(candidate, known)
    begin = Beginning(cuts=tuple(relaxed[0]), placement=placement)
    best, bound = _searched(look, options, begin, known)
    return look.result(max(relaxed[1], bound), best)


def prove_layout(candidate: Candidate, bound_us: float, options: SolveOptions) -> LayoutResult:
    """Return a bound from whole layers of at least ``bound_us``, without a plan."""
    look = _Look(candidate, options)
    if look.below is None:
        return LayoutResult(lower_bound_us=bound_us)
    low = min(look.below, max(0.0, (bound_us - look.tied_us) * NS_PER_US))
    return look.result(raised_bound(look.problem, low, look.below, look.deadline))


def _relaxed_below(look: _Look) -> tuple[dict[Cut, None], float] | None:
    """Return some critical paths, and a bound of plans faster than the known one; ``None``: there are none."""
    if look.below is not None and not ranks_reach(look.problem, look.below):
        return None
    return relaxed_cuts(look.problem, look.deadline, look.below, most_rounds=ROUNDS)


class _Look:
    """A layout's relaxed rows, and the step time to beat."""

    def __init__(self, candidate: Candidate, options: SolveOptions) -> None:
        self.candidate = candidate
        self.deadline, self.cutoff_us = time.monotonic() + options.time_limit_s, options.cutoff_us
        self.tied_us = tied_us_of(candidate)
        self.pipeline_cutoff_us = self.cutoff_us - tail_bound_us(candidate)
        self.below = self.ticks(self.cutoff_us)
        self.problem = build_problem(
            candidate, candidate.limits, safe=False, pipeline_cutoff_us=self.pipeline_cutoff_us, with_tails=True
        )

    def ticks(self, step_us: float) -> int | None:
        """Return a step time in the problem's ticks, or ``None`` if it is infinite."""
        return ceil((step_us - self.tied_us) * NS_PER_US) if step_us < inf else None

    def result(self, bound: float, best: Evaluation | None = None) -> LayoutResult:
        """Return a bound in ticks and a plan in the form of the outer search."""
        beaten = self.below is not None and bound >= self.below
        return LayoutResult(
            lower_bound_us=self.cutoff_us if beaten else bound / NS_PER_US + self.tied_us,
            evaluation=best,
            beaten=beaten,
            timed_out=time.monotonic() > self.deadline,
        )


def _searched(
    look: _Look, options: SolveOptions, begin: Beginning, known: ModulePlacement | None
) -> tuple[Evaluation | None, float]:
    """Return the best plan with true message sizes, searched with less and less memory until one fits, and a bound in
    ticks."""
    candidate, model = look.candidate, look.candidate.profile.model
    attempts = Attempts(candidate=candidate, deadline=look.deadline, cutoff_us=look.pipeline_cutoff_us, begin=begin)
    simple = [*simple_splits(candidate).values(), *([] if known is None else [evaluated(candidate, known)])]
    for split in simple:
        if split.step_us < look.cutoff_us or not options.only_faster:
            attempts.take(split)
    fastest = min(simple, key=lambda split: split.step_us, default=None)
    attempts.last_module_from = 0 if fastest is None else first_of_last_module(model, fastest.placement)
    limits, bound = candidate.limits, 0.0
    for _ in range(ATTEMPTS):
        best_us = min(look.cutoff_us, attempts.best.step_us if attempts.best is not None else inf)
        problem, below = attempts.problem(limits, safe=False), look.ticks(best_us)
        own = 0.0
        solved: Evaluation | None = None
        try:
            bound_us, solved = attempts.solve(problem, below, options)
            own = bound_us * NS_PER_US
        except NoneBelow:
            own = below or 0.0
        except StoppedEarly as error:
            own = error.lower_bound
        except InfeasiblePlan:
            break
        if problem == look.problem:
            bound = own
        if solved is None or solved.fits or time.monotonic() > look.deadline:
            break
        attempts.last_module_from = first_of_last_module(model, solved.placement)
        limits = lowered(limits, solved)
    return attempts.best, bound


def first_of_last_module(model: Model, placement: ModulePlacement) -> int:
    """Return the virtual stage on which the last module begins."""
    return next(v for v, count in enumerate(placement.layers[model.modules[-1].name]) if count)


def takes_long(candidate: Candidate) -> bool:
    """Return whether a layout with virtual stages takes long to prove."""
    layout, model = candidate.layout, candidate.profile.model
    num = layout.num_virtual_stages
    splits = comb(model.num_layers - 1, num - 1) if model.is_chain else inf
    if splits * 2 * num * candidate.num_microbatches <= MOST_EVENTS_OF_CUTS:
        return False
    return layout.virtual_size > 1 and (
        len(model.modules) > 1 or model.num_layers > FEW_LAYERS or layout.num_virtual_stages > FEW_VIRTUAL_STAGES
    )
