"""The backbone's pipeline next to encoders that hold memory: the homogeneous problem with less memory.

Memory that encoders hold on all ranks lowers the pipeline's limit; their outputs on the first stage count as state of
the backbone's first block. So the solver, its bounds and the exact peak are those of a homogeneous plan.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mindspeed_autoparallel.cost.memory import state_bytes
from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.evaluate import Evaluation
from mindspeed_autoparallel.planner.hetero.device_work import PipelineWork
from mindspeed_autoparallel.planner.hetero.encoder_costs import EncoderCosts
from mindspeed_autoparallel.planner.hetero.space import split_modules
from mindspeed_autoparallel.planner.layouts.bounds import microbatch_work_ns, pipeline_bound_ns, tail_bound_us
from mindspeed_autoparallel.planner.layouts.layout_solver import LayoutResult, solve_layout
from mindspeed_autoparallel.planner.layouts.options import SolveOptions
from mindspeed_autoparallel.planner.layouts.virtual_layouts import bound_layout, prove_layout
from mindspeed_autoparallel.planner.problem_building import build_problem
from mindspeed_autoparallel.planner.split.bounds.relaxation import relaxed_cuts
from mindspeed_autoparallel.planner.stage_times import NS_PER_US
from mindspeed_autoparallel.profiles import Measurement, Profile, VariableData
from mindspeed_autoparallel.spec import Module, Plan


@dataclass(frozen=True, kw_only=True)
class Reserved:
    """Bytes that encoders hold while the pipeline runs."""

    everywhere_bytes: int = 0
    first_stage_bytes: int = 0

    def covers(self, other: Reserved) -> bool:
        """Return whether every field is at least that of ``other``."""
        return self.everywhere_bytes >= other.everywhere_bytes and self.first_stage_bytes >= other.first_stage_bytes


def least_of(reserved: Sequence[Reserved]) -> Reserved:
    """Return the minimum of ``reserved``, field by field."""
    return Reserved(
        everywhere_bytes=min(one.everywhere_bytes for one in reserved),
        first_stage_bytes=min(one.first_stage_bytes for one in reserved),
    )


def backbone_profile(profile: Profile, *, with_generator: bool = True) -> Profile:
    """Return a profile of the pipeline's modules only; a generator may be one of them."""
    encoders, rest = split_modules(profile)
    rest = rest if with_generator else rest[:1]
    gone, kept = {module.name for module in encoders}, {module.name for module in rest}
    modules = _without(rest, gone)
    return replace(
        profile,
        model=replace(profile.model, modules=modules),
        variable_data=_columns(profile.variable_data, kept),
        measurements=tuple(_only(measurement, kept) for measurement in profile.measurements),
    )


def backbone_plan(plan: Plan) -> Plan:
    """Return the pipeline's part of a hetero plan; its step time remains that of the whole plan."""
    assert plan.hetero is not None
    own = {phase.module for phase in plan.hetero.encoders}
    modules = _without(plan.model.modules, own)
    return replace(
        plan, hetero=None, layout=replace(plan.layout, modules={}), model=replace(plan.model, modules=modules)
    )


def _without(modules: Sequence[Module], gone: set[str]) -> tuple[Module, ...]:
    """Return the modules that are not in ``gone``, without dependencies on modules in it."""
    return tuple(
        replace(module, predecessors=tuple(name for name in module.predecessors if name not in gone))
        for module in modules
        if module.name not in gone
    )


def _only(measurement: Measurement, names: set[str]) -> Measurement:
    return replace(measurement, modules={n: cost for n, cost in measurement.modules.items() if n in names})


def _columns(data: VariableData | None, names: set[str]) -> VariableData | None:
    if data is None:
        return None
    columns = [index for index, name in enumerate(data.modules) if name in names]
    if not columns:
        return None
    return VariableData(
        modules=tuple(data.modules[index] for index in columns),
        samples=tuple(tuple(row[index] for index in columns) for row in data.samples),
    )


def beside(candidate: Candidate, reserved: Reserved) -> Candidate | None:
    """Return the pipeline next to ``reserved``; ``None`` if no memory is left."""
    left = candidate.limit_bytes - reserved.everywhere_bytes
    backbone, measurement = candidate.profile, candidate.measurement
    name = backbone.model.modules[0].name
    cost = measurement.modules[name]
    if cost.pre is None:
        left -= reserved.first_stage_bytes
    else:
        dense = replace(
            cost.pre.dense,
            optimizer_unshardable_bytes=cost.pre.dense.optimizer_unshardable_bytes + reserved.first_stage_bytes,
        )
        cost = replace(cost, pre=replace(cost.pre, dense=dense))
    if left <= 0:
        return None
    changed = replace(measurement, modules={**measurement.modules, name: cost})
    return replace(
        candidate,
        # The only planned point, interpolated or not.
        profile=replace(backbone, measurements=(changed,)),
        measurement=changed,
        cluster=replace(candidate.cluster, memory_limit_bytes=left),
    )


@dataclass
class BackboneSolver:
    """One layout of the backbone; results of a solve are reused wherever they still hold."""

    candidate: Candidate
    seed: int = 0
    generator: Sequence[EncoderCosts] = ()
    """Sizes of a generator with a separate layout; empty if there is no such generator."""
    solved: list[tuple[Reserved, LayoutResult]] = field(default_factory=list[tuple[Reserved, LayoutResult]])
    relaxed: list[tuple[Reserved, float]] = field(default_factory=list[tuple[Reserved, float]])

    @property
    def label(self) -> str:
        """Return the layout's name, unique in the search."""
        return self.candidate.layout.label() + " and a generator" * bool(self.generator)

    def all_costs(self, encoders: Sequence[Sequence[EncoderCosts]]) -> list[Sequence[EncoderCosts]]:
        """Return the sizes of ``encoders``, and of the generator if it has a separate layout."""
        return [*encoders, *([self.generator] if self.generator else [])]

    @functools.cached_property
    def cheap_bound_us(self) -> float:
        """Return a bound that needs no solve and holds for any reserved memory."""
        return pipeline_bound_ns(self.candidate) / NS_PER_US + self.tail_us

    @functools.cached_property
    def tail_us(self) -> float:
        """Return a lower bound of the time after the pipeline."""
        return tail_bound_us(self.candidate)

    @functools.cached_property
    def work(self) -> PipelineWork:
        """Return the pipeline before it is split."""
        work_ns, layer_ns = microbatch_work_ns(self.candidate)
        return PipelineWork(
            num_stages=self.candidate.layout.pipeline_size,
            num_chunks=self.candidate.layout.virtual_size,
            num_microbatches=self.candidate.num_microbatches,
            work_us=work_ns / NS_PER_US,
            layers=[(m.num_layers, layer_ns[m.name] / NS_PER_US) for m in self.candidate.profile.model.modules],
        )

    def bound_us(self, reserved: Reserved, deadline: float) -> float:
        """Return the known plan's time or the linear relaxation's, next to ``reserved``; infinite if not even
        fractional splits fit."""
        known = [bound for other, bound in self.relaxed if reserved.covers(other)]
        for other, result in self.solved:
            if reserved.covers(other):
                known.append(float("inf") if result.proved_infeasible else result.lower_bound_us)
                if self.still_fits(result, other, reserved):
                    return max(known)
        if any(other == reserved for other, _ in self.relaxed):
            return max(known)
        bound = max([*known, self._relaxed_us(reserved, deadline)])
        self.relaxed.append((reserved, bound))
        return bound

    def virtual_bound_us(self, reserved: Reserved, cutoff_us: float, deadline: float) -> float:
        """Return a bound of a layout with virtual stages next to ``reserved``: ``cutoff_us`` if no split is faster,
        infinite if none fits."""
        made = beside(self.candidate, reserved)
        if made is None:
            return float("inf")
        options = SolveOptions(time_limit_s=max(0.1, deadline - time.monotonic()), cutoff_us=cutoff_us)
        found = bound_layout(made, options)
        if not (found.proved_infeasible or found.beaten or found.timed_out):
            found = prove_layout(made, found.lower_bound_us, options)
        return float("inf") if found.proved_infeasible else found.lower_bound_us

    def _relaxed_us(self, reserved: Reserved, deadline: float) -> float:
        made = beside(self.candidate, reserved)
        if made is None:
            return float("inf")
        relaxed = relaxed_cuts(build_problem(made, made.limits, safe=False), deadline)
        return float("inf") if relaxed is None else relaxed[1] / NS_PER_US + self.tail_us

    def solve(self, reserved: Reserved, time_limit_s: float) -> LayoutResult:
        """Return the best placement next to ``reserved`` and its bound; its memory figures cover the pipeline only."""
        for other, result in self.solved:
            if reserved.covers(other) and (result.proved_infeasible or self.still_fits(result, other, reserved)):
                return result
        made = beside(self.candidate, reserved)
        if made is None:
            return LayoutResult(proved_infeasible=True)
        result = solve_layout(made, SolveOptions(time_limit_s=time_limit_s, seed=self.seed))
        lower = max(result.lower_bound_us, self.cheap_bound_us)
        if result.evaluation is not None:
            lower = min(lower, result.evaluation.step_us)
        result = replace(result, lower_bound_us=lower)
        self.solved.append((reserved, result))
        return result

    def no_split_leaves(self, reserved: Reserved, transient_bytes: int) -> bool:
        """Return whether model state alone rules out every split while encoders run, outside the pipeline.

        For each module, memory limits the layers per rank; if all ranks together hold too few, no split exists.
        """
        layout, profile = self.candidate.layout, self.candidate.profile
        if len(profile.model.modules) != 1:
            return False
        (module,) = profile.model.modules
        cost = self.candidate.measurement.modules[module.name]
        left = self.candidate.limit_bytes - profile.device.runtime_overhead_bytes
        left -= reserved.everywhere_bytes + transient_bytes
        size = min(state_bytes(layer, layout) for layer in cost.distinct_layers)
        held = 0
        for rank in range(layout.pipeline_size):
            room = left
            if rank == 0:
                room -= reserved.first_stage_bytes + state_bytes(cost.pre, layout)
            if rank == layout.pipeline_size - 1:
                room -= state_bytes(cost.post, layout)
            if room < size * layout.virtual_size:
                return True
            held += room // size if size else module.num_layers
        return held < module.num_layers

    def still_fits(self, result: LayoutResult, before: Reserved, now: Reserved) -> bool:
        """Return whether a plan found for less reserved memory still fits: then it is also the best for more."""
        if result.evaluation is None:
            return False
        more = now.everywhere_bytes - before.everywhere_bytes
        at_first = now.first_stage_bytes - before.first_stage_bytes
        return all(
            rank.peak_bytes + more + (at_first if index == 0 else 0) <= rank.limit_bytes
            for index, rank in enumerate(result.evaluation.memory)
        )


def outside_pipeline_fits(found: Evaluation, limit_bytes: int, reserved: Reserved, transient_bytes: int) -> bool:
    """Return whether every rank can run the encoders when the pipeline holds no activations."""
    return all(outside_pipeline_bytes(rank.terms, reserved, transient_bytes) <= limit_bytes for rank in found.memory)


def outside_pipeline_bytes(terms: dict[str, int], reserved: Reserved, transient_bytes: int) -> int:
    """Return a rank's peak while an encoder runs. ``terms``: those of the pipeline's peak, of which only state
    counts."""
    state = sum(terms.get(name, 0) for name in ("parameters", "gradients", "optimizer", "runtime_overhead"))
    return state + reserved.everywhere_bytes + transient_bytes
