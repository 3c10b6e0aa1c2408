"""The backbone's pipeline beside encoders that hold memory: the homogeneous problem with less of it.

To the pipeline, what encoders hold everywhere is a lower limit, and what they hand to the first stage is state of the
backbone's first block. So the solver, its bounds and the exact peak are those of a homogeneous plan.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mindspeed_autoparallel.cost.memory import PlacedBlock, static_terms
from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.evaluate import Evaluation
from mindspeed_autoparallel.planner.hetero.device_work import PipelineWork
from mindspeed_autoparallel.planner.hetero.encoder_costs import EncoderCosts
from mindspeed_autoparallel.planner.hetero.space import split_modules
from mindspeed_autoparallel.planner.layouts.bounds import (
    microbatch_work_ns,
    pipeline_bound_ns,
    relaxed_bound_ns,
    tail_bound_us,
)
from mindspeed_autoparallel.planner.layouts.layout_solver import LayoutResult, limits_of, solve_layout
from mindspeed_autoparallel.planner.layouts.options import SolveOptions
from mindspeed_autoparallel.planner.layouts.virtual_layouts import bound_layout, prove_layout
from mindspeed_autoparallel.planner.problem_building import build_problem
from mindspeed_autoparallel.planner.stage_times import NS_PER_US
from mindspeed_autoparallel.profiles import BlockCost, Measurement, Profile, VariableData
from mindspeed_autoparallel.spec import Cluster, Layout, Module, Plan


@dataclass(frozen=True, kw_only=True)
class Reserved:
    """Bytes that encoders hold while the pipeline runs."""

    everywhere_bytes: int = 0
    first_stage_bytes: int = 0

    def covers(self, other: Reserved) -> bool:
        """Return whether it is at least as much as ``other``."""
        return self.everywhere_bytes >= other.everywhere_bytes and self.first_stage_bytes >= other.first_stage_bytes


def least_of(reserved: Sequence[Reserved]) -> Reserved:
    """Return what every one of them covers."""
    return Reserved(
        everywhere_bytes=min(one.everywhere_bytes for one in reserved),
        first_stage_bytes=min(one.first_stage_bytes for one in reserved),
    )


def backbone_profile(profile: Profile, *, with_generator: bool = True) -> Profile:
    """Return the pipeline's modules alone; a generator may be one of them."""
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
    """Return the pipeline's part of a hetero plan; its step stays that of the whole."""
    assert plan.hetero is not None
    own = {phase.module for phase in plan.hetero.encoders}
    modules = _without(plan.model.modules, own)
    return replace(
        plan, hetero=None, layout=replace(plan.layout, modules={}), model=replace(plan.model, modules=modules)
    )


def _without(modules: Sequence[Module], gone: set[str]) -> tuple[Module, ...]:
    """Return the modules that are not ``gone``; none waits for one that is."""
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


def limit_of(profile: Profile, cluster: Cluster) -> int:
    """Return bytes a rank may use."""
    return cluster.memory_limit_bytes or profile.device.memory_capacity_bytes


def beside(
    backbone: Profile, measurement: Measurement, cluster: Cluster, reserved: Reserved
) -> tuple[Profile, Measurement, Cluster] | None:
    """Profile, costs and cluster of the pipeline beside ``reserved``; ``None`` where nothing is left."""
    left = limit_of(backbone, cluster) - reserved.everywhere_bytes
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
    # The one point that is planned, interpolated or not.
    return replace(backbone, measurements=(changed,)), changed, replace(cluster, memory_limit_bytes=left)


@dataclass
class BackboneSolver:
    """One layout of the backbone; what a solve found is used again wherever it still holds."""

    backbone: Profile
    cluster: Cluster
    global_batch_size: int
    candidate: Candidate
    seed: int = 0
    generator: Sequence[EncoderCosts] = ()
    """Sizes of a generator beside it; empty where there is none, or the pipeline has it."""
    solved: list[tuple[Reserved, LayoutResult]] = field(default_factory=list[tuple[Reserved, LayoutResult]])
    relaxed: list[tuple[Reserved, float]] = field(default_factory=list[tuple[Reserved, float]])

    @property
    def label(self) -> str:
        """Return the layout's name among all that are searched."""
        return self.candidate.layout.label() + " and a generator" * bool(self.generator)

    def all_costs(self, encoders: Sequence[Sequence[EncoderCosts]]) -> list[Sequence[EncoderCosts]]:
        """Return the sizes of ``encoders``, and of the generator if it has a layout of its own."""
        return [*encoders, *([self.generator] if self.generator else [])]

    @functools.cached_property
    def cheap_bound_us(self) -> float:
        """Return a bound that needs no solve and holds whatever is reserved."""
        return pipeline_bound_ns(self.backbone, self.candidate) / NS_PER_US + self.tail_us

    @functools.cached_property
    def tail_us(self) -> float:
        """Return what follows the pipeline at least."""
        return tail_bound_us(self.backbone, self.cluster, self.candidate)

    @functools.cached_property
    def work(self) -> PipelineWork:
        """Return the pipeline before it is split."""
        work_ns, layer_ns = microbatch_work_ns(self.backbone, self.candidate)
        return PipelineWork(
            num_stages=self.candidate.layout.pipeline_size,
            num_chunks=self.candidate.layout.virtual_size,
            num_microbatches=self.candidate.num_microbatches,
            work_us=work_ns / NS_PER_US,
            layers=[(m.num_layers, layer_ns[m.name] / NS_PER_US) for m in self.backbone.model.modules],
        )

    def bound_us(self, reserved: Reserved, deadline: float) -> float:
        """Return linear relaxation beside ``reserved``, unless a plan is known; infinite where even fractions do not
        fit."""
        known = [bound for other, bound in self.relaxed if reserved.covers(other)]
        for other, result in self.solved:
            if reserved.covers(other):
                known.append(float("inf") if result.proved_infeasible else result.lower_bound_us)
                if self._still_fits(result, other, reserved):
                    return max(known)
        if any(other == reserved for other, _ in self.relaxed):
            return max(known)
        bound = max([*known, self._relaxed_us(reserved, deadline)])
        self.relaxed.append((reserved, bound))
        return bound

    def virtual_bound_us(self, reserved: Reserved, cutoff_us: float, deadline: float) -> float:
        """Return a bound of a layout with virtual stages beside ``reserved``, ``cutoff_us`` where nothing is faster;
        infinite where nothing fits."""
        made = beside(self.backbone, self.candidate.measurement, self.cluster, reserved)
        if made is None:
            return float("inf")
        profile, measurement, cluster = made
        candidate = replace(self.candidate, measurement=measurement)
        options = SolveOptions(time_limit_s=max(0.1, deadline - time.monotonic()), cutoff_us=cutoff_us)
        found = bound_layout(profile, cluster, candidate, options)
        if not (found.proved_infeasible or found.beaten or found.timed_out):
            found = prove_layout(profile, cluster, candidate, found.lower_bound_us, options)
        return float("inf") if found.proved_infeasible else found.lower_bound_us

    def _relaxed_us(self, reserved: Reserved, deadline: float) -> float:
        made = beside(self.backbone, self.candidate.measurement, self.cluster, reserved)
        if made is None:
            return float("inf")
        profile, measurement, cluster = made
        problem = build_problem(
            profile,
            cluster,
            replace(self.candidate, measurement=measurement),
            limits_of(profile, cluster, self.candidate.layout.pipeline_size),
            safe=False,
        )
        relaxed = relaxed_bound_ns(problem, deadline)
        if relaxed is None:
            return float("inf")
        return relaxed / NS_PER_US + tail_bound_us(profile, cluster, self.candidate)

    def solve(self, reserved: Reserved, time_limit_s: float) -> LayoutResult:
        """Return the best placement beside ``reserved`` and its bound; memory in it is the pipeline's own."""
        for other, result in self.solved:
            if reserved.covers(other) and (result.proved_infeasible or self._still_fits(result, other, reserved)):
                return result
        made = beside(self.backbone, self.candidate.measurement, self.cluster, reserved)
        if made is None:
            return LayoutResult(lower_bound_us=0.0, placement=None, evaluation=None, proved_infeasible=True)
        profile, measurement, cluster = made
        started = time.monotonic()
        result = solve_layout(
            profile,
            cluster,
            replace(self.candidate, measurement=measurement),
            self.global_batch_size,
            SolveOptions(time_limit_s=time_limit_s, seed=self.seed),
        )
        timed_out = result.timed_out or time.monotonic() - started > time_limit_s
        lower = max(result.lower_bound_us, self.cheap_bound_us)
        if result.evaluation is not None:
            lower = min(lower, result.evaluation.step.total_us)
        result = replace(result, timed_out=timed_out, lower_bound_us=lower)
        self.solved.append((reserved, result))
        return result

    def no_split_leaves(self, reserved: Reserved, transient_bytes: int) -> bool:
        """Return whether state alone rules out every split when encoders run beside it, outside the pipeline.

        Of one module, a rank can hold so many layers at most; if all ranks together hold too few, there is no split.
        """
        layout = self.candidate.layout
        if len(self.backbone.model.modules) > 1:
            return False
        (module,) = self.backbone.model.modules
        cost = self.candidate.measurement.modules[module.name]
        left = limit_of(self.backbone, self.cluster) - self.backbone.device.runtime_overhead_bytes
        left -= reserved.everywhere_bytes + transient_bytes
        size = min(_state_bytes(layer, layout) for layer in cost.distinct_layers)
        held = 0
        for rank in range(layout.pipeline_size):
            room = left
            if rank == 0:
                room -= reserved.first_stage_bytes + _state_bytes(cost.pre, layout)
            if rank == layout.pipeline_size - 1:
                room -= _state_bytes(cost.post, layout)
            if room < size * layout.virtual_size:
                return True
            held += room // size if size else module.num_layers
        return held < module.num_layers

    def _still_fits(self, result: LayoutResult, before: Reserved, now: Reserved) -> bool:
        """Return whether a plan found beside less still fits: then it is the best beside more, too."""
        if result.evaluation is None:
            return False
        more = now.everywhere_bytes - before.everywhere_bytes
        at_first = now.first_stage_bytes - before.first_stage_bytes
        return all(
            rank.peak_bytes + more + (at_first if index == 0 else 0) <= rank.limit_bytes
            for index, rank in enumerate(result.evaluation.memory)
        )


def _state_bytes(block: BlockCost | None, layout: Layout) -> int:
    return 0 if block is None else sum(static_terms([PlacedBlock(name="", cost=block)], layout).values())


def outside_pipeline_fits(found: Evaluation, limit_bytes: int, reserved: Reserved, transient_bytes: int) -> bool:
    """Return whether every rank can run the encoders before and after the pipeline, when none of its activations
    live."""
    return all(outside_pipeline_bytes(rank.terms, reserved, transient_bytes) <= limit_bytes for rank in found.memory)


def outside_pipeline_bytes(terms: dict[str, int], reserved: Reserved, transient_bytes: int) -> int:
    """Return peak of a rank while an encoder runs. ``terms``: of the pipeline's peak there; state alone stays."""
    state = sum(terms.get(name, 0) for name in ("parameters", "gradients", "optimizer", "runtime_overhead"))
    return state + reserved.everywhere_bytes + transient_bytes
