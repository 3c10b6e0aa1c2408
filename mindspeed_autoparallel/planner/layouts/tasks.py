"""Work on one layout for another process: its input and its result are plain JSON values."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from math import inf

from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.evaluate import Evaluation, evaluated
from mindspeed_autoparallel.planner.layouts.bounds import tail_bound_us
from mindspeed_autoparallel.planner.layouts.layout_solver import simple_splits, solve_layout
from mindspeed_autoparallel.planner.layouts.options import SolveOptions
from mindspeed_autoparallel.planner.layouts.plain import plain_recipe
from mindspeed_autoparallel.planner.layouts.rank_bounds import rank_bound_us
from mindspeed_autoparallel.planner.layouts.virtual_layouts import (
    bound_layout,
    follow_paths,
    improve_layout,
    prove_layout,
)
from mindspeed_autoparallel.planner.paired_costs import searched_costs
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.planner.rank_memory import point_of
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Cluster, Layout

SIMPLE, PLAIN, RANKS, BOUND, PATHS = "simple", "plain", "ranks", "bound", "paths"
IMPROVE, PROVE, SOLVE, TIME = "improve", "prove", "solve", "time"


@dataclass(frozen=True, kw_only=True)
class Request:
    """Input shared by all tasks of a search."""

    profile: Profile
    cluster: Cluster
    global_batch_size: int
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task on a layout."""

    kind: str
    """``simple``: the best even or greedy split that fits. ``plain``: the plain recipe. ``ranks``: a bound by ranks
    alone. ``solve``: the best plan, proved as far as effort allows. ``time``: evaluate ``placement``. Only with virtual
    stages: ``bound``: a bound without a plan; ``paths``, ``prove``: a higher bound; ``improve``: a good plan without a
    bound."""
    layout: Layout
    seconds: float
    cutoff_us: float | None = None
    """Step time of a known plan, or ``None``."""
    only_faster: bool = False
    """Search only for a faster plan."""
    effort: float | None = None
    """Limit of the integer solver that does not depend on the machine; ``None``: no limit."""
    placement: ModulePlacement | None = None
    """Placement that ``time`` evaluates, or from which ``improve`` starts (same layout, other groups or memory)."""
    memory_limit_bytes: int | None = None
    """Memory limit of a device in place of the request's."""
    bound_us: float = 0.0
    """Known lower bound of the layout's plans."""
    batches: int = 1
    """Global batches of the request in a step."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a task. Every run gives the same result unless time ends first."""

    lower_bound_us: float = 0.0
    placement: ModulePlacement | None = None
    step_us: float | None = None
    """Step time of the placement, which fits unless ``fits`` is false."""
    fits: bool = True
    proved_infeasible: bool = False
    beaten: bool = False
    """Proved: no plan that fits is faster than the known one."""
    timed_out: bool = False
    processor_s: float = field(default=0.0, compare=False)
    """Processor seconds spent, in whichever process."""


@dataclass(frozen=True, kw_only=True)
class SolvedLayout:
    """A layout with its plan, which fits unless ``outcome.fits`` is false."""

    candidate: Candidate
    outcome: Outcome

    @property
    def step_us(self) -> float:
        """Return the plan's step time."""
        assert self.outcome.step_us is not None
        return self.outcome.step_us


def perform(request: Request, task: Task) -> Outcome:
    """Run one task in this process."""
    begun = time.process_time()
    outcome = _performed(request, task)
    return replace(outcome, processor_s=time.process_time() - begun)


def _performed(request: Request, task: Task) -> Outcome:
    layout, batch, cluster = task.layout, task.batches * request.global_batch_size, request.cluster
    if task.memory_limit_bytes is not None:
        cluster = replace(cluster, memory_limit_bytes=task.memory_limit_bytes)
    measurement = point_of(request.profile, layout)
    assert measurement is not None
    measurement = searched_costs(request.profile, measurement, layout)
    candidate = Candidate(
        profile=request.profile,
        cluster=cluster,
        layout=layout,
        measurement=measurement,
        num_microbatches=layout.num_microbatches(batch),
    )
    cutoff_us = inf if task.cutoff_us is None else task.cutoff_us
    if task.kind == SIMPLE:
        fitting = [split for split in simple_splits(candidate).values() if split.fits]
        return _outcome(min(fitting, key=lambda split: split.step_us, default=None))
    if task.kind == RANKS:
        ranks_us = rank_bound_us(candidate)
        tail_us = tail_bound_us(candidate)
        return Outcome(lower_bound_us=ranks_us + tail_us if ranks_us < inf else 0.0, proved_infeasible=ranks_us == inf)
    if task.kind == TIME:
        assert task.placement is not None
        return _outcome(evaluated(candidate, task.placement))
    if task.kind == PLAIN:
        return _outcome(plain_recipe(candidate, cutoff_us))
    options = SolveOptions(
        time_limit_s=task.seconds,
        seed=request.seed,
        cutoff_us=cutoff_us,
        only_faster=task.only_faster,
        effort=task.effort,
    )
    if task.kind == BOUND:
        result = bound_layout(candidate, options)
    elif task.kind == PATHS:
        result = follow_paths(candidate, task.bound_us, options)
    elif task.kind == PROVE:
        result = prove_layout(candidate, task.bound_us, options)
    elif task.kind == IMPROVE:
        result = improve_layout(candidate, options, task.placement)
    else:
        result = solve_layout(candidate, options)
    return replace(
        _outcome(result.evaluation),
        lower_bound_us=result.lower_bound_us,
        proved_infeasible=result.proved_infeasible,
        beaten=result.beaten,
        timed_out=result.timed_out,
    )


def _outcome(found: Evaluation | None) -> Outcome:
    return Outcome() if found is None else Outcome(placement=found.placement, step_us=found.step_us, fits=found.fits)
