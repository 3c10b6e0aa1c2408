"""The plan file: the configuration, its predicted costs, and the evidence that no better plan was missed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mindspeed_autoparallel.errors import PlanError
from mindspeed_autoparallel.spec.codec import JsonFile, to_json
from mindspeed_autoparallel.spec.hetero import HeteroBest, HeteroRecord
from mindspeed_autoparallel.spec.layout import Cluster, Layout
from mindspeed_autoparallel.spec.model import Model
from mindspeed_autoparallel.spec.plan_consistency import (
    PLAN_AGAIN,
    contradicting_memory,
    contradicting_others,
    contradicting_sizes,
    contradicting_times,
    negative_numbers,
)
from mindspeed_autoparallel.spec.plan_records import (
    Alternative,
    Baseline,
    DataRecord,
    PlannedFrom,
    ProfileRecord,
    RankMemory,
    SearchRecord,
    StagePlan,
    StepTime,
)
from mindspeed_autoparallel.spec.recompute import is_known
from mindspeed_autoparallel.units import MAX_DURATION_US, US_PER_S

PLAN_SCHEMA_VERSION = 1
PLAN_FORMAT = "mindspeed-autoparallel/plan"


MOST_OPERATIONS = 400_000
"""Most forwards and backwards of a step; the planner makes no plan with more, whose simulation would take seconds."""


@dataclass(frozen=True, kw_only=True)
class Plan(JsonFile):
    """``plan.json``."""

    WHAT, AGAIN, ERROR = "plan of this tool", "Plan again with this release.", PlanError

    model: Model
    cluster: Cluster
    layout: Layout
    global_batch_size: int
    num_microbatches: int
    stages: tuple[StagePlan, ...]
    memory: tuple[RankMemory, ...]
    step: StepTime
    throughput_tokens_per_s_per_device: float
    baselines: tuple[Baseline, ...]
    alternatives: tuple[Alternative, ...]
    search: SearchRecord
    profile: ProfileRecord
    tool_version: str
    format: str = PLAN_FORMAT
    schema_version: int = PLAN_SCHEMA_VERSION
    extra: PlannedFrom = field(default_factory=PlannedFrom)
    hetero: HeteroRecord | None = None
    """Record of encoders with separate layouts, which are on no stage."""
    data: DataRecord | None = None
    """Record of the data, for a plan chosen for data whose samples differ."""
    hetero_rival: HeteroBest | None = None
    """For a plan with one layout for all modules: the hetero plan it was compared with, if one was searched."""

    @property
    def mean_us(self) -> float:
        """Return the step time by which plans are compared: the mean of drawn steps if samples differ."""
        return self.step.total_us if self.data is None else self.data.mean_us

    @property
    def mean_throughput(self) -> float:
        """Return tokens per second and device at ``mean_us``; for drawn data those of the samples, without padding."""
        if self.data is None:
            return self.throughput_tokens_per_s_per_device
        num_tokens = self.global_batch_size * (self.data.tokens_per_sample or self.model.sequence_length)
        return num_tokens / (self.mean_us / US_PER_S) / self.layout.num_devices

    @property
    def backbone(self) -> str:
        """Return the name of the module that the pipeline runs: the first one without a separate layout."""
        return next(module.name for module in self.model.modules if module.name not in self.layout.modules)

    def layers_of(self, module: str) -> tuple[int, ...]:
        """Return layers of a module per virtual stage, in chain order."""
        return tuple(stage.layers.get(module, 0) for stage in self.stages)

    def recomputed_of(self, module: str, kind: str | None = None) -> tuple[int, ...]:
        """Return recomputed layers of a module per virtual stage, of one ``kind`` or of all."""
        return tuple(
            sum(count for name, count in stage.recompute.get(module, {}).items() if kind in (None, name))
            for stage in self.stages
        )

    @property
    def recompute_kinds(self) -> set[str]:
        """Return the kinds of recompute that some layer has."""
        rows = (row for stage in self.stages for row in stage.recompute.values())
        return {kind for row in rows for kind, count in row.items() if count}

    @classmethod
    def parse(cls, value: Any, where: str = "plan") -> Plan:
        """Return a plan from parsed JSON, checked; ``where`` names it in messages."""
        plan = super().parse(value, where)
        plan.check(where)
        return plan

    def check(self, where: str = "plan") -> None:
        """Raise ``PlanError`` if stages, layers or recompute do not match model and layout, e.g. after an edit by
        hand."""
        if len(self.stages) != self.layout.num_virtual_stages:
            raise PlanError(
                f"{where}: {len(self.stages)} stages, but PP {self.layout.pipeline_size} x "
                f"VPP {self.layout.virtual_size} needs {self.layout.num_virtual_stages}."
            )
        for stage in self.stages:
            for name, duration_us in (("forward_us", stage.forward_us), ("backward_us", stage.backward_us)):
                if not 0 <= duration_us <= MAX_DURATION_US:
                    raise PlanError(
                        f"{where}: stage {stage.stage}: {name} must be 0 to {MAX_DURATION_US:g}, got {duration_us:g}."
                    )
        if (self.step.p50_us is None) != (self.step.p95_us is None):
            raise PlanError(f"{where}: step.p50_us and step.p95_us belong together: give both, or neither.")
        for rank in self.memory:
            if rank.limit_bytes < 1 or rank.peak_bytes < 0:
                raise PlanError(
                    f"{where}: rank {rank.pipeline_rank} needs {rank.peak_bytes} of {rank.limit_bytes} bytes; "
                    "a limit is at least 1, a peak at least 0."
                )
        operations = 2 * self.layout.num_virtual_stages * self.num_microbatches
        if not 0 < operations <= MOST_OPERATIONS:
            raise PlanError(
                f"{where}: {self.num_microbatches} microbatches on {self.layout.num_virtual_stages} stages are "
                f"{operations} operations a step; a plan has 1 to {MOST_OPERATIONS}."
            )
        names = {module.name for module in self.model.modules}
        for stage in self.stages:
            foreign = sorted((set(stage.layers) | set(stage.recompute)) - names)
            if foreign:
                raise PlanError(
                    f"{where}: stage {stage.stage} holds {foreign[0]!r}, which is not a module of {self.model.name}."
                )
            for name, kinds in stage.recompute.items():
                for kind in kinds:
                    if kind == "none" or not is_known(kind):
                        raise PlanError(
                            f"{where}: stage {stage.stage}: unknown recompute kind {kind!r} of {name}; "
                            "known: full, selective, selective:MODULES, full:LAYERS."
                        )
        for module in self.model.modules:
            layers = self.layers_of(module.name)
            if module.name in self.layout.modules and not any(layers):
                continue
            if min(layers) < 0 or sum(layers) != module.num_layers:
                raise PlanError(
                    f"{where}: {module.name} has {list(layers)} layers on the stages, {sum(layers)} in all; "
                    f"the model has {module.num_layers}."
                )
            for index, (held, again) in enumerate(zip(layers, self.recomputed_of(module.name), strict=True)):
                counts = self.stages[index].recompute.get(module.name, {}).values()
                if again > held or any(count < 0 for count in counts):
                    raise PlanError(f"{where}: stage {index} recomputes {again} of {held} layers of {module.name}.")
        self._check_numbers(where)

    def _check_numbers(self, where: str) -> None:
        """Raise ``PlanError`` for an impossible number, or one that contradicts others."""
        encoders_us = None if self.hetero is None else self.hetero.total_us
        for line in (
            *contradicting_sizes(self.layout, self.cluster, self.global_batch_size, self.num_microbatches, self.stages),
            *contradicting_times(self.step, self.search, encoders_us),
            *contradicting_memory(self.memory, self.search, self.layout.pipeline_size, encoders_us),
            *contradicting_others(self.search, self.alternatives),
            *negative_numbers(to_json(self), "plan"),
        ):
            raise PlanError(f"{where}: {line} {PLAN_AGAIN}")
