"""Solve one layout: find the best placement whose exact peak fits, and a bound that holds for every placement."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace
from math import ceil, inf

from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.evaluate import Evaluation, evaluated
from mindspeed_autoparallel.planner.layouts.bounds import tail_bound_us, tied_us_of
from mindspeed_autoparallel.planner.layouts.options import SolveOptions
from mindspeed_autoparallel.planner.layouts.short_rows import search_short_row
from mindspeed_autoparallel.planner.placement import RECOMPUTED_KINDS, ModulePlacement
from mindspeed_autoparallel.planner.problem_building import build_problem, module_placement
from mindspeed_autoparallel.planner.rank_memory import fits_rank
from mindspeed_autoparallel.planner.split import NoneBelow, SplitProblem, StoppedEarly, baselines, solve
from mindspeed_autoparallel.planner.split.state import Beginning
from mindspeed_autoparallel.planner.stage_times import NS_PER_US
from mindspeed_autoparallel.spec.plan_records import ROUNDING

MAX_TIGHTENINGS = 6


@dataclass(frozen=True, kw_only=True)
class LayoutResult:
    """Result of solving one layout."""

    lower_bound_us: float = 0.0
    """Lower bound of the whole step over every placement that fits."""
    evaluation: Evaluation | None = None
    """The best plan found."""
    proved_infeasible: bool = False
    beaten: bool = False
    """Proved: no plan that fits is faster than the known one."""
    timed_out: bool = False


def solve_layout(candidate: Candidate, options: SolveOptions) -> LayoutResult:
    """Solve the relaxed memory rows for the bound; if their plan exceeds the exact peak, tighten them until
    one fits."""
    deadline, cutoff_us = time.monotonic() + options.time_limit_s, options.cutoff_us
    tied_us, tail_us = tied_us_of(candidate), tail_bound_us(candidate)
    attempts = Attempts(candidate=candidate, deadline=deadline, cutoff_us=cutoff_us - tail_us)
    only_faster = options.only_faster and cutoff_us < inf
    below = ceil((cutoff_us - tied_us) * NS_PER_US) if only_faster else None
    for simple in () if only_faster else simple_splits(candidate).values():
        attempts.take(simple)
    if attempts.best is not None:
        cutoff_us = min(cutoff_us, attempts.best.step_us)
        attempts.cutoff_us = cutoff_us - tail_us
    relaxed = attempts.problem(candidate.limits, safe=False)
    try:
        bound_us, found = attempts.solve(relaxed, below, options)
    except NoneBelow:
        return LayoutResult(lower_bound_us=cutoff_us, beaten=True)
    except StoppedEarly as error:
        bound_us = error.lower_bound / NS_PER_US + tied_us
        return LayoutResult(lower_bound_us=min(cutoff_us, bound_us), timed_out=True)
    except InfeasiblePlan:
        return LayoutResult(proved_infeasible=True)
    if not found.fits:
        attempts.tighten(found, below, options)
    best, lower_us = attempts.best, bound_us + tied_us
    known_us = min(cutoff_us, best.step_us if best is not None else inf)
    if lower_us < known_us * (1 - ROUNDING):
        short = search_short_row(candidate, relaxed, deadline, known_us)
        if short is not None:
            best = short.best or best
            known_us = min(known_us, best.step_us if best is not None else inf)
            lower_us = max(lower_us, known_us if short.complete else short.plain_us)
            if best is None and known_us == inf and short.complete:
                return LayoutResult(proved_infeasible=True)
    return LayoutResult(
        lower_bound_us=min(cutoff_us, lower_us),
        evaluation=best,
        beaten=best is None and only_faster and lower_us >= cutoff_us,
        timed_out=time.monotonic() > deadline,
    )


@dataclass(kw_only=True)
class Attempts:
    """The solutions of one layout's problems, and the best plan among them that fits."""

    candidate: Candidate
    deadline: float
    cutoff_us: float
    """Pipeline time of a known plan, in microseconds."""
    best: Evaluation | None = None
    begin: Beginning | None = None
    """The last solution with virtual stages."""
    last_module_from: int | None = None
    """Virtual stage on which the last module begins, if only such plans are searched."""

    def problem(self, limits: tuple[int, ...], *, safe: bool) -> SplitProblem:
        """Return the layout's split problem with ``limits`` in bytes by pipeline rank."""
        return build_problem(
            self.candidate,
            limits,
            safe=safe,
            pipeline_cutoff_us=self.cutoff_us,
            with_tails=True,
            last_module_from=self.last_module_from,
        )

    def take(self, found: Evaluation) -> None:
        """Keep the plan if it fits and is faster than all before."""
        if found.fits and (self.best is None or found.step_us < self.best.step_us):
            self.best = found

    def solve(self, problem: SplitProblem, below: int | None, options: SolveOptions) -> tuple[float, Evaluation]:
        """Return the problem's bound in microseconds, and its plan, evaluated exactly."""
        seconds = max(0.1, self.deadline - time.monotonic())
        solution = solve(
            problem, time_limit_s=seconds, seed=options.seed, below=below, effort=options.effort, begin=self.begin
        )
        if solution.cuts:
            self.begin = Beginning(placement=solution.placement, cuts=solution.cuts)
        found = evaluated(self.candidate, module_placement(self.candidate, solution.placement))
        self.take(found)
        return solution.lower_bound / NS_PER_US, found

    def tighten(self, found: Evaluation, below: int | None, options: SolveOptions) -> None:
        """Solve the safe rows, then the relaxed ones with less and less memory, until a plan fits."""
        limits = self.candidate.limits
        with contextlib.suppress(InfeasiblePlan):
            self.solve(self.problem(limits, safe=True), below, options)
        for _ in range(MAX_TIGHTENINGS):
            if found.fits or time.monotonic() > self.deadline:
                break
            limits = lowered(limits, found)
            try:
                _, found = self.solve(self.problem(limits, safe=False), below, options)
            except InfeasiblePlan:
                break


def lowered(limits: tuple[int, ...], found: Evaluation) -> tuple[int, ...]:
    """Return ``limits`` by rank, lower by what ``found`` exceeds its memory."""
    over = [max(0, rank.peak_bytes - rank.limit_bytes) for rank in found.memory]
    return tuple(max(0, limit - excess) for limit, excess in zip(limits, over, strict=True))


def simple_splits(candidate: Candidate, known: Evaluation | None = None) -> dict[str, Evaluation]:
    """Return the even and the greedy split of a layout by name, with as much recomputation as their memory requires.

    ``known``: an evaluated placement of the layout; no placement is evaluated twice.
    """
    layout = candidate.layout
    # Simple rules count layers, and keep the embedding and the output layer with theirs.
    scarce = layout.num_virtual_stages > candidate.profile.model.num_layers
    plain = replace(candidate, layout=replace(layout, standalone_ends=layout.standalone_ends and scarce))
    problem = build_problem(plain, candidate.limits, safe=True)
    found: dict[str, Evaluation] = {}
    for simple in baselines(problem):
        placement = module_placement(candidate, simple.placement)
        if known is None or known.placement != placement:
            try:
                known = evaluated(candidate, placement)
            except ConfigError:
                continue
        found[simple.name] = known
    return found


def with_least_recompute(candidate: Candidate, placement: ModulePlacement) -> Evaluation:
    """Return the same split, with no layer recomputed that its rank has memory to keep.

    Stages are processed in order, the most expensive kind first. A schedule is monotone in its stage times, so the step
    does not get longer, unless a reduction overlaps the backward: then the placement stays unchanged.
    """
    before, layout = evaluated(candidate, placement), candidate.layout
    best = placement
    for v in range(layout.num_virtual_stages):
        for module in candidate.profile.model.modules:
            for kind in RECOMPUTED_KINDS:
                kept, most = 0, best.recompute.get(module.name, {}).get(kind, (0,) * layout.num_virtual_stages)[v]
                # Bisection: the more layers are kept, the more memory is needed.
                while kept < most:
                    trial = -(-(kept + most) // 2)
                    if fits_rank(candidate, _keeping(best, module.name, kind, v, trial), v % layout.pipeline_size):
                        kept = trial
                    else:
                        most = trial - 1
                best = _keeping(best, module.name, kind, v, kept)
    if best == placement:
        return before
    after = evaluated(candidate, best)
    return after if after.fits and after.step_us <= before.step_us else before


def _keeping(placement: ModulePlacement, module: str, kind: str, stage: int, count: int) -> ModulePlacement:
    """Return the placement with ``count`` layers fewer recomputed as ``kind`` on a virtual stage."""
    if not count:
        return placement
    kinds = placement.recompute[module]
    row = tuple(number - count * (v == stage) for v, number in enumerate(kinds[kind]))
    return replace(placement, recompute={**placement.recompute, module: {**kinds, kind: row}})
