"""Solve one layout: find the best placement whose exact peak fits, and a bound that holds for every placement."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace
from math import ceil, inf

from mindspeed_autoparallel.cost.step import embedding_us
from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.evaluate import Evaluation, evaluate
from mindspeed_autoparallel.planner.layouts.bounds import tail_bound_us
from mindspeed_autoparallel.planner.layouts.options import SolveOptions
from mindspeed_autoparallel.planner.layouts.short_rows import search_short_row
from mindspeed_autoparallel.planner.placement import RECOMPUTED_KINDS, ModulePlacement
from mindspeed_autoparallel.planner.problem_building import build_problem, module_placement
from mindspeed_autoparallel.planner.rank_memory import fits_rank
from mindspeed_autoparallel.planner.split import NoneBelow, SplitProblem, StoppedEarly, baselines, solve
from mindspeed_autoparallel.planner.split.state import Beginning
from mindspeed_autoparallel.planner.stage_times import NS_PER_US
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Cluster, Layout
from mindspeed_autoparallel.spec.plan import ROUNDING

MAX_TIGHTENINGS = 6


@dataclass(frozen=True, kw_only=True)
class LayoutResult:
    """Result of solving one layout."""

    lower_bound_us: float
    """Lower bound of the whole step over every placement that fits."""
    placement: ModulePlacement | None
    evaluation: Evaluation | None
    proved_infeasible: bool = False
    beaten: bool = False
    """Proved: no plan that fits is faster than the known one."""
    timed_out: bool = False


def limits_of(profile: Profile, cluster: Cluster, layout_size: int) -> tuple[int, ...]:
    """Return the bytes that each pipeline rank may use."""
    return (cluster.memory_limit_bytes or profile.device.memory_capacity_bytes,) * layout_size


def solve_layout(
    profile: Profile, cluster: Cluster, candidate: Candidate, global_batch_size: int, options: SolveOptions
) -> LayoutResult:
    """Solve the relaxed memory rows for the bound; if their plan exceeds the exact peak, tighten them until
    one fits."""
    deadline, cutoff_us = time.monotonic() + options.time_limit_s, options.cutoff_us
    tied_us = embedding_us(profile.model, candidate.measurement, candidate.layout, cluster, profile.device)
    attempts = Attempts(
        profile=profile,
        cluster=cluster,
        candidate=candidate,
        global_batch_size=global_batch_size,
        deadline=deadline,
        cutoff_us=cutoff_us - tail_bound_us(profile, cluster, candidate),
    )
    only_faster = options.only_faster and cutoff_us < inf
    below = ceil((cutoff_us - tied_us) * NS_PER_US) if only_faster else None
    for simple in () if only_faster else simple_splits(profile, cluster, candidate, global_batch_size):
        attempts.take(simple.placement, simple.evaluation)
    if attempts.best is not None:
        cutoff_us = min(cutoff_us, attempts.best[1].step.total_us)
        attempts.cutoff_us = cutoff_us - tail_bound_us(profile, cluster, candidate)
    limits = limits_of(profile, cluster, candidate.layout.pipeline_size)
    relaxed = attempts.problem(limits, safe=False)
    try:
        bound_us, found = attempts.solve(relaxed, below, options)
    except NoneBelow:
        return LayoutResult(lower_bound_us=cutoff_us, placement=None, evaluation=None, beaten=True)
    except StoppedEarly as error:
        bound_us = error.lower_bound / NS_PER_US + tied_us
        return LayoutResult(lower_bound_us=min(cutoff_us, bound_us), placement=None, evaluation=None, timed_out=True)
    except InfeasiblePlan:
        return LayoutResult(lower_bound_us=0.0, placement=None, evaluation=None, proved_infeasible=True)
    if not found.fits:
        attempts.tighten(limits, found, below, options)
    best, lower_us = attempts.best, bound_us + tied_us
    known_us = min(cutoff_us, best[1].step.total_us if best is not None else inf)
    if lower_us < known_us * (1 - ROUNDING):
        short = search_short_row(profile, cluster, candidate, global_batch_size, relaxed, deadline, known_us)
        if short is not None:
            best = short.best or best
            known_us = min(known_us, best[1].step.total_us if best is not None else inf)
            lower_us = max(lower_us, known_us if short.complete else short.plain_us)
            if best is None and known_us == inf and short.complete:
                return LayoutResult(lower_bound_us=0.0, placement=None, evaluation=None, proved_infeasible=True)
    return LayoutResult(
        lower_bound_us=min(cutoff_us, lower_us),
        placement=best[0] if best else None,
        evaluation=best[1] if best else None,
        beaten=best is None and only_faster and lower_us >= cutoff_us,
        timed_out=time.monotonic() > deadline,
    )


@dataclass(kw_only=True)
class Attempts:
    """The solutions of one layout's problems, and the best plan among them that fits."""

    profile: Profile
    cluster: Cluster
    candidate: Candidate
    global_batch_size: int
    deadline: float
    cutoff_us: float
    """Pipeline time of a known plan, in microseconds."""
    best: tuple[ModulePlacement, Evaluation] | None = None
    begin: Beginning | None = None
    """The last solution with virtual stages."""
    last: ModulePlacement | None = None
    """The last solution, whether it fits or not."""
    last_module_from: int | None = None
    """Virtual stage on which the last module begins, if only such plans are searched."""

    def problem(self, limits: tuple[int, ...], *, safe: bool) -> SplitProblem:
        """Return the layout's split problem with ``limits`` in bytes by pipeline rank."""
        return build_problem(
            self.profile,
            self.cluster,
            self.candidate,
            limits,
            safe=safe,
            pipeline_cutoff_us=self.cutoff_us,
            with_tails=True,
            last_module_from=self.last_module_from,
        )

    def take(self, placement: ModulePlacement, found: Evaluation) -> None:
        """Keep the plan if it fits and is faster than all before."""
        if found.fits and (self.best is None or found.step.total_us < self.best[1].step.total_us):
            self.best = placement, found

    def solve(self, problem: SplitProblem, below: int | None, options: SolveOptions) -> tuple[float, Evaluation]:
        """Return the problem's bound in microseconds, and its plan, evaluated exactly."""
        seconds = max(0.1, self.deadline - time.monotonic())
        solution = solve(
            problem, time_limit_s=seconds, seed=options.seed, below=below, effort=options.effort, begin=self.begin
        )
        if solution.cuts:
            self.begin = Beginning(placement=solution.placement, cuts=solution.cuts)
        placement = module_placement(self.profile, self.candidate.measurement, solution.placement)
        found = evaluate(
            self.profile, self.cluster, self.candidate.layout, placement, self.global_batch_size, with_timeline=False
        )
        self.take(placement, found)
        self.last = placement
        return solution.lower_bound / NS_PER_US, found

    def tighten(self, limits: tuple[int, ...], found: Evaluation, below: int | None, options: SolveOptions) -> None:
        """Solve the safe rows, then the relaxed ones with less and less memory, until a plan fits."""
        with contextlib.suppress(InfeasiblePlan):
            self.solve(self.problem(limits, safe=True), below, options)
        for _ in range(MAX_TIGHTENINGS):
            if found.fits or time.monotonic() > self.deadline:
                break
            over = [max(0, rank.peak_bytes - rank.limit_bytes) for rank in found.memory]
            limits = tuple(max(0, limit - excess) for limit, excess in zip(limits, over, strict=True))
            try:
                _, found = self.solve(self.problem(limits, safe=False), below, options)
            except InfeasiblePlan:
                break


@dataclass(frozen=True, kw_only=True)
class SimpleSplit:
    """A baseline split, evaluated exactly."""

    name: str
    placement: ModulePlacement
    evaluation: Evaluation


def simple_splits(
    profile: Profile,
    cluster: Cluster,
    candidate: Candidate,
    global_batch_size: int,
    known: tuple[ModulePlacement, Evaluation] | None = None,
) -> tuple[SimpleSplit, ...]:
    """Return the even and the greedy split of a layout, with as much recomputation as their memory requires.

    ``known``: an evaluated placement of the layout; no placement is evaluated twice.
    """
    layout = candidate.layout
    # Simple rules count layers, and keep the embedding and the output layer with theirs.
    scarce = layout.num_virtual_stages > profile.model.num_layers
    plain = replace(candidate, layout=replace(layout, standalone_ends=layout.standalone_ends and scarce))
    problem = build_problem(profile, cluster, plain, limits_of(profile, cluster, layout.pipeline_size), safe=True)
    found: list[SimpleSplit] = []
    for simple in baselines(problem):
        placement = module_placement(profile, candidate.measurement, simple.placement)
        if known is None or known[0] != placement:
            try:
                result = evaluate(profile, cluster, layout, placement, global_batch_size, with_timeline=False)
            except ConfigError:
                continue
            known = placement, result
        found.append(SimpleSplit(name=simple.name, placement=placement, evaluation=known[1]))
    return tuple(found)


def with_least_recompute(
    profile: Profile, cluster: Cluster, layout: Layout, placement: ModulePlacement, global_batch_size: int
) -> tuple[ModulePlacement, Evaluation]:
    """Return the same split, with no layer recomputed that its rank has memory to keep.

    Stages are processed in order, the most expensive kind first. A schedule is monotone in its stage times, so the step
    does not get longer, unless a reduction overlaps the backward: then the placement stays unchanged.
    """
    before = evaluate(profile, cluster, layout, placement, global_batch_size, with_timeline=False)
    num_microbatches = layout.num_microbatches(global_batch_size)
    best = placement
    for v in range(layout.num_virtual_stages):
        for module in profile.model.modules:
            for kind in RECOMPUTED_KINDS:
                kept, most = 0, best.recompute.get(module.name, {}).get(kind, (0,) * layout.num_virtual_stages)[v]
                # Bisection: the more layers are kept, the more memory is needed.
                while kept < most:
                    trial = -(-(kept + most) // 2)
                    candidate = _keeping(best, module.name, kind, v, trial)
                    if fits_rank(profile, cluster, layout, candidate, num_microbatches, v % layout.pipeline_size):
                        kept = trial
                    else:
                        most = trial - 1
                best = _keeping(best, module.name, kind, v, kept)
    if best == placement:
        return placement, before
    after = evaluate(profile, cluster, layout, best, global_batch_size, with_timeline=False)
    if after.fits and after.step.total_us <= before.step.total_us:
        return best, after
    return placement, before


def _keeping(placement: ModulePlacement, module: str, kind: str, stage: int, count: int) -> ModulePlacement:
    """Return the placement with ``count`` layers fewer recomputed as ``kind`` on a virtual stage."""
    if not count:
        return placement
    kinds = placement.recompute[module]
    row = tuple(number - count * (v == stage) for v, number in enumerate(kinds[kind]))
    return replace(placement, recompute={**placement.recompute, module: {**kinds, kind: row}})
