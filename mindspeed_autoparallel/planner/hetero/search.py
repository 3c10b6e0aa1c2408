"""The best layouts of encoders and backbone together, with a bound that holds for all of them.

A step is the encoders' phases plus the backbone's pipeline beside the memory they hold. Best first by bound: cheap
bound of the backbone layout, then every choice of encoder layouts beside it, then linear relaxation, then the exact
solve.
Proofs: docs/decisions/0063-planning-hetero.md.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.planner.evaluate import Evaluation
from mindspeed_autoparallel.planner.hetero.assembly import assemble
from mindspeed_autoparallel.planner.hetero.backbone import (
    BackboneSolver,
    Reserved,
    backbone_profile,
    least_of,
    limit_of,
    outside_pipeline_fits,
)
from mindspeed_autoparallel.planner.hetero.encoders import MEMORY_MODES, EncoderCosts
from mindspeed_autoparallel.planner.hetero.space import costs_of, records, split_modules
from mindspeed_autoparallel.planner.inner import LayoutResult
from mindspeed_autoparallel.planner.space import SpaceOptions, enumerate_layouts
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Cluster, Layout, Plan
from mindspeed_autoparallel.spec.hetero import HeteroRecord
from mindspeed_autoparallel.spec.plan import ROUNDING, SearchRecord, Verdict
from mindspeed_autoparallel.units import format_bytes

EXACT = 1e-9
NOT_FOUND = "no split was found that fits beside the encoders, and none was proved impossible."
SOLVE_S = 10.0
"""Most seconds for one pipeline; what stays open is in the gap."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """One choice of all layouts, solved."""

    solver: BackboneSolver
    record: HeteroRecord
    result: LayoutResult
    step_us: float
    lower_bound_us: float

    @property
    def reserved(self) -> Reserved:
        return reserved_by(self.record)

    @property
    def layout(self) -> Layout:
        """Of the backbone, with the encoders' own."""
        return with_modules(self.solver.candidate.layout, self.record)


@dataclass
class _State:
    solved: list[Found] = field(default_factory=list)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    """By the backbone's label: what became of it."""
    open_us: list[float] = field(default_factory=list)
    """Bounds of choices that were not settled."""
    least_reserved_bytes: int | None = None

    @property
    def best_us(self) -> float:
        return min((found.step_us for found in self.solved), default=float("inf"))

    @property
    def num_layouts(self) -> int:
        """Backbone layouts with a plan."""
        return sum(verdict.outcome == "solved" for verdict in self.verdicts.values())


def search_hetero(
    profile: Profile,
    cluster: Cluster,
    global_batch_size: int,
    *,
    time_limit_s: float = 600.0,
    top_k: int = 3,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
    layouts: list[Layout] | None = None,
    options: SpaceOptions | None = None,
    memory_modes: Sequence[str] = MEMORY_MODES,
    balance: str = "local",
    encoder_tensor_sizes: Mapping[str, Sequence[int]] | None = None,
) -> Plan:
    """The fastest plan in which every encoder has a layout of its own, with its proof.

    ``layouts``: only these of the backbone; ``encoder_tensor_sizes``: only these of an encoder, by name. Raises
    ``InfeasiblePlan`` or ``ConfigError``.
    """
    if global_batch_size < 1:
        raise ConfigError(f"the global batch size must be at least 1, got {global_batch_size}.")
    if not 0 < time_limit_s < float("inf"):
        raise ConfigError(f"the time limit must be above 0 s, got {time_limit_s:g}.")
    started = time.monotonic()
    say = progress or (lambda text: None)
    encoders, _ = split_modules(profile)
    backbone = backbone_profile(profile)
    only = encoder_tensor_sizes or {}
    costs = [costs_of(profile, module, cluster, only.get(module.name))[0] for module in encoders]
    options = options or SpaceOptions()
    # Virtual stages of the backbone only where they were asked for.
    options = replace(options, virtual_sizes=options.virtual_sizes or (1,))
    candidates, ruled_out = enumerate_layouts(backbone, cluster, global_batch_size, options, layouts)
    if not candidates:
        reasons = "; ".join(sorted({verdict.reason for verdict in ruled_out})[:3]) or "no size divides the cluster."
        raise ConfigError(f"no backbone layout is possible for a global batch of {global_batch_size}: {reasons}")
    solvers = [BackboneSolver(backbone, cluster, global_batch_size, candidate, seed) for candidate in candidates]
    say(f"hetero: {len(solvers)} backbone layouts, {sum(map(len, costs))} encoder sizes to search")
    state = _State()
    _run(solvers, costs, state, started + time_limit_s, top_k, memory_modes, balance, say)
    if not state.solved:
        raise _infeasible(profile, cluster, state)
    ranking = sorted(state.solved, key=lambda found: (found.step_us, found.layout.label()))
    best = ranking[0]
    bound_us = min([best.step_us, *state.open_us, *(found.lower_bound_us for found in ranking)])
    gap = max(0.0, 1 - bound_us / best.step_us) if best.step_us else 0.0
    verdicts = (*ruled_out, *state.verdicts.values())
    record = SearchRecord(
        status="optimal" if gap <= ROUNDING else "feasible",
        lower_bound_us=bound_us,
        gap_fraction=gap,
        num_configurations=len(verdicts),
        num_solved=len({found.solver.candidate.layout.label() for found in ranking}),
        seconds=time.monotonic() - started,
        verdicts=verdicts,
    )
    say(f"best hetero: {best.layout.label()}, {best.step_us / 1000:.2f} ms, gap {gap:.3%}, {record.seconds:.1f} s")
    return assemble(profile, best, _others(ranking, top_k), record)


def reserved_by(record: HeteroRecord) -> Reserved:
    """What the encoders of ``record`` hold while the pipeline runs."""
    return Reserved(everywhere_bytes=record.reserved_bytes, first_stage_bytes=record.first_stage_bytes)


def with_modules(layout: Layout, record: HeteroRecord) -> Layout:
    """The backbone's layout with the encoders' own."""
    return replace(layout, modules={phase.module: phase.layout for phase in record.encoders})


def _run(
    solvers: list[BackboneSolver],
    costs: list[list[EncoderCosts]],
    state: _State,
    deadline: float,
    top_k: int,
    memory_modes: Sequence[str],
    balance: str,
    say: Callable[[str], None],
) -> None:
    """Work the queue: (bound, order, solver, record or None, relaxed), smallest bound first."""
    queue: list[tuple[float, int, BackboneSolver, HeteroRecord | None, bool]] = []
    order = 0
    for solver in solvers:
        bound = solver.cheap_bound_us + _least_encoder_us(costs, solver)
        heapq.heappush(queue, (bound, order, solver, None, False))
        order += 1
    alternatives = top_k
    """Layouts that may still be solved to be named beside the best."""
    while queue:
        bound, _, solver, record, relaxed = heapq.heappop(queue)
        if bound >= state.best_us * (1 - EXACT):
            # The rest can only be alternatives: one more layout or a few, without choices beside a layout that has one.
            enough = alternatives <= 0 or state.num_layouts > top_k or _has_plan(state, solver)
            if enough or time.monotonic() > deadline:
                _bounded(state, solver, bound)
                continue
            alternatives -= relaxed
        elif time.monotonic() > deadline:
            state.open_us.append(bound)
            _note(state, solver, "unsolved", "the time limit came first.", bound)
            continue
        if record is None:
            for reach, made in _choices(state, solver, costs, bound, deadline, memory_modes, balance):
                heapq.heappush(queue, (reach, order, solver, made, False))
                order += 1
        elif not relaxed:
            better = solver.bound_us(reserved_by(record), deadline) + record.total_us
            if better == float("inf"):
                _note_short(state, solver, record)
            else:
                order += 1
                heapq.heappush(queue, (max(bound, better), order, solver, record, True))
        else:
            _solve(state, solver, record, bound, deadline, say)


def _choices(
    state: _State,
    solver: BackboneSolver,
    costs: list[list[EncoderCosts]],
    bound: float,
    deadline: float,
    memory_modes: Sequence[str],
    balance: str,
) -> list[tuple[float, HeteroRecord]]:
    """What encoders can do beside one layout of the backbone, each with its bound; none where the layout is settled."""
    choices = records(costs, solver.candidate, solver.cluster, memory_modes, balance)
    reserved = least_of([reserved_by(made) for made in choices])
    if state.solved:
        bound = max(bound, solver.bound_us(reserved, deadline) + min(made.total_us for made in choices))
        if state.best_us * (1 - EXACT) <= bound < float("inf"):
            _bounded(state, solver, bound)
            return []
    # Beside the least memory that any choice takes: often the plan for all of them, else a bound for all.
    least = solver.solve(reserved, _seconds_until(deadline)) if bound < float("inf") else None
    if least is None or least.proved_infeasible:
        _note_short(state, solver, min(choices, key=lambda made: made.reserved_bytes))
        return []
    return [(max(bound, least.lower_bound_us + made.total_us), made) for made in choices]


def _solve(
    state: _State,
    solver: BackboneSolver,
    record: HeteroRecord,
    bound: float,
    deadline: float,
    say: Callable[[str], None],
) -> None:
    """Solve one choice; where an encoder does not fit beside the plan's state, again with room kept for it."""
    reserved = reserved_by(record)
    result = solver.solve(reserved, _seconds_until(deadline))
    if result.proved_infeasible:
        _note_short(state, solver, record)
        return
    lower = max(bound, result.lower_bound_us + record.total_us)
    found = result.evaluation
    limit = limit_of(solver.backbone, solver.cluster)
    if found is not None and not outside_pipeline_fits(found, limit, reserved, record.transient_bytes):
        if solver.no_split_leaves(reserved, record.transient_bytes):
            _note_short(state, solver, record)
            return
        result, found = _roomier(solver, record, deadline)
    if found is None:
        state.open_us.append(lower)
        _note(state, solver, "unsolved", NOT_FOUND, lower)
        return
    step = found.step.total_us + record.total_us
    lower = min(step, lower)
    if step < state.best_us:
        say(f"{with_modules(solver.candidate.layout, record).label()}: {step / 1000:.2f} ms")
    state.solved.append(Found(solver=solver, record=record, result=result, step_us=step, lower_bound_us=lower))
    before = state.verdicts.get(solver.candidate.layout.label())
    if before is None or before.step_us is None or step < before.step_us:
        state.verdicts[solver.candidate.layout.label()] = Verdict(
            layout=with_modules(solver.candidate.layout, record),
            outcome="solved",
            reason=f"solved; bound {lower / 1000:.3f} ms.",
            lower_bound_us=lower,
            step_us=step,
        )


def _roomier(solver: BackboneSolver, record: HeteroRecord, deadline: float) -> tuple[LayoutResult, Evaluation | None]:
    """A split whose state leaves room for the encoders to run: with more and more of that room kept in the pipeline."""
    reserved, limit = reserved_by(record), limit_of(solver.backbone, solver.cluster)
    for quarter in range(1, 5):
        room = record.transient_bytes * quarter // 4
        more = replace(reserved, everywhere_bytes=reserved.everywhere_bytes + room)
        result = solver.solve(more, _seconds_until(deadline))
        found = result.evaluation
        if found is None:
            break
        if outside_pipeline_fits(found, limit, reserved, record.transient_bytes):
            return result, found
    return result, None


def _seconds_until(deadline: float) -> float:
    """For one solve."""
    return max(0.1, min(SOLVE_S, deadline - time.monotonic()))


def _least_encoder_us(costs: list[list[EncoderCosts]], solver: BackboneSolver) -> float:
    """No choice of sizes takes the encoders less: every sample is encoded once, by the best batch there is."""
    total = 0.0
    for own in costs:
        least = []
        for cost in own:
            width = cost.point.tensor_size * cost.point.context_size
            share = solver.global_batch_size * width / solver.cluster.num_devices
            least.append(share * cost.least_us_per_sample(solver.global_batch_size))
        total += min(least)
    return total


def _has_plan(state: _State, solver: BackboneSolver) -> bool:
    known = state.verdicts.get(solver.candidate.layout.label())
    return known is not None and known.outcome == "solved"


def _bounded(state: _State, solver: BackboneSolver, bound: float) -> None:
    reason = f"at least {bound / 1000:.2f} ms; the best plan takes {state.best_us / 1000:.2f} ms."
    _note(state, solver, "bounded", reason, bound)


def _note(state: _State, solver: BackboneSolver, outcome: str, reason: str, bound: float | None) -> None:
    """A verdict, unless the layout has one; that nothing fits is the weakest."""
    label = solver.candidate.layout.label()
    known = state.verdicts.get(label)
    if known is None or known.outcome == "memory":
        state.verdicts[label] = Verdict(
            layout=solver.candidate.layout, outcome=outcome, reason=reason, lower_bound_us=bound
        )


def _note_short(state: _State, solver: BackboneSolver, record: HeteroRecord) -> None:
    reserved = record.reserved_bytes
    if state.least_reserved_bytes is None or reserved < state.least_reserved_bytes:
        state.least_reserved_bytes = reserved
    _note(state, solver, "memory", "no split fits the memory beside any choice of the encoders.", None)


def _others(ranking: list[Found], top_k: int) -> list[Found]:
    """The next best, one per layout of the backbone."""
    seen = {ranking[0].solver.candidate.layout.label()}
    found = []
    for other in ranking[1:]:
        label = other.solver.candidate.layout.label()
        if label not in seen:
            seen.add(label)
            found.append(other)
    return found[:top_k]


def _infeasible(profile: Profile, cluster: Cluster, state: _State) -> InfeasiblePlan:
    limit = limit_of(profile, cluster)
    late = any(verdict.reason != NOT_FOUND for verdict in state.verdicts.values() if verdict.outcome == "unsolved")
    if late:
        return InfeasiblePlan("no hetero plan was found in time, and none was proved impossible. Raise the time limit.")
    unsure = " (not proved)" if state.open_us else ""
    held = (
        ""
        if state.least_reserved_bytes is None
        else (f" The encoders alone hold {format_bytes(state.least_reserved_bytes)} on every device at the least.")
    )
    return InfeasiblePlan(
        f"no hetero plan fits in {format_bytes(limit)} per device: in no layout does the backbone fit beside the "
        f"encoders, with any recomputation{unsure}.{held} Use more devices, a smaller global batch, or plan without "
        "--hetero-parallel."
    )
