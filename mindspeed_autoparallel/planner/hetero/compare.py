"""The best hetero plan and the best homogeneous plan for the same cluster and batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.files import json_text, write_together
from mindspeed_autoparallel.interrupts import Stopped
from mindspeed_autoparallel.planner.hetero.backbone import backbone_profile
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions, enumerate_layouts
from mindspeed_autoparallel.planner.results import PLAN_FILE, RESULT_FILE, result_of
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Cluster, Layout, ModuleLayout, Plan
from mindspeed_autoparallel.spec.hetero import HeteroBest, HeteroRecord, HomogeneousBest
from mindspeed_autoparallel.units import US_PER_MS

HETERO_PLAN_FILE, HOMOGENEOUS_PLAN_FILE = "hetero_plan.json", "homogeneous_plan.json"
"""The slower of the two plans; the faster one is plan.json."""


class OnlyHomogeneous(InfeasiblePlan):
    """No hetero plan fits or was found; ``plan`` is the homogeneous plan, which fits."""

    def __init__(self, reason: str, plan: Plan) -> None:
        step_ms = plan.mean_us / US_PER_MS
        super().__init__(f"{reason} ({plan.layout.label()} for all modules fits, {step_ms:.1f} ms.)")
        self.plan = plan


@dataclass(frozen=True, kw_only=True)
class HeteroOptions:
    """How encoders with separate layouts run."""

    balance: str = "local"
    """``--hetero-balance``."""
    encoder_pipelines: bool = True
    """Whether the host's encoders can run in stages."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Both plans; ``hetero`` also holds the homogeneous plan's figures."""

    hetero: Plan
    homogeneous: Plan | None

    @property
    def speed_up(self) -> float | None:
        """Return homogeneous step time divided by hetero step time; ``None`` if no homogeneous plan fits."""
        return None if self.homogeneous is None else self.homogeneous.mean_us / self.hetero.mean_us

    @property
    def best(self) -> Plan:
        """Return the faster plan."""
        if self.homogeneous is None or self.homogeneous.mean_us > self.hetero.mean_us:
            return self.hetero
        return self.homogeneous


def best_of_both(
    profile: Profile, search_homogeneous: Callable[[], Plan], search_encoders: Callable[[], Plan]
) -> Comparison:
    """Run both searches.

    Raises ``InfeasiblePlan`` if no plan fits, ``OnlyHomogeneous`` if only a plan without hetero layouts fits, and
    ``Stopped`` with such a plan at an interrupt.
    """
    homogeneous, note = None, ""
    try:
        homogeneous = search_homogeneous()
    except InfeasiblePlan as error:
        note = str(error)
    try:
        hetero = search_encoders()
    except InfeasiblePlan as error:
        if homogeneous is None:
            # The error's nearest layout and large enough cluster are those without hetero layouts.
            raise InfeasiblePlan(f"{note} With separate layouts for encoders: {error}") from error
        raise OnlyHomogeneous(str(error), homogeneous) from error
    except KeyboardInterrupt as error:
        if homogeneous is None:
            raise
        raise Stopped(homogeneous, error) from error
    return _paired(profile, hetero, homogeneous, note)


def without_homogeneous(comparison: Comparison, note: str) -> Comparison:
    """Return ``comparison`` without its homogeneous plan; ``note``: why."""
    plan, record = comparison.hetero, comparison.hetero.hetero
    assert record is not None
    return Comparison(
        hetero=replace(plan, hetero=replace(record, homogeneous=None, homogeneous_note=note)), homogeneous=None
    )


def _paired(profile: Profile, hetero: Plan, homogeneous: Plan | None, note: str) -> Comparison:
    """Return both plans, each with the other's figures; ``note``: why there is no homogeneous plan."""
    assert hetero.hetero is not None
    best = None if homogeneous is None else _best_homogeneous(profile, homogeneous)
    record = replace(hetero.hetero, homogeneous_note=note, homogeneous=best)
    if homogeneous is not None:
        homogeneous = replace(homogeneous, hetero_rival=_rival(hetero, record))
    return Comparison(hetero=replace(hetero, hetero=record), homogeneous=homogeneous)


def _best_homogeneous(profile: Profile, plan: Plan) -> HomogeneousBest:
    return HomogeneousBest(
        layout=plan.layout,
        step_us=plan.mean_us,
        lower_bound_us=_bound_us(plan),
        status=plan.search.status,
        throughput_tokens_per_s_per_device=plan.mean_throughput,
        layers={m.name: plan.layers_of(m.name) for m in profile.model.modules},
        recompute={m.name: plan.recomputed_of(m.name) for m in profile.model.modules},
    )


def _bound_us(plan: Plan) -> float | None:
    """Return the lower bound of ``plan.mean_us``: the search has none for a mean of drawn steps."""
    return plan.search.lower_bound_us if plan.data is None else None


def _rival(hetero: Plan, record: HeteroRecord) -> HeteroBest:
    return HeteroBest(
        layout=hetero.layout,
        step_us=hetero.mean_us,
        lower_bound_us=_bound_us(hetero),
        status=hetero.search.status,
        memory=record.memory,
        scale_one_us=record.scale_one_us,
        kept_us=record.kept_us,
        scale_one_again_us=record.scale_one_again_us,
    )


def one_stage_layouts(profile: Profile, cluster: Cluster, global_batch_size: int) -> list[Layout]:
    """Return the backbone's layouts without a pipeline."""
    candidates, _ = enumerate_layouts(backbone_profile(profile), cluster, global_batch_size, SpaceOptions())
    return [candidate.layout for candidate in candidates if candidate.layout.pipeline_size == 1]


def write_comparison(comparison: Comparison, directory: Path, model_file: str | None = None) -> None:
    """Write the faster plan as ``plan.json``, the other plan, and the short result last, so that it never lacks its
    plans."""
    texts = {directory / PLAN_FILE: comparison.best.text()}
    if comparison.best is not comparison.hetero:
        texts[directory / HETERO_PLAN_FILE] = comparison.hetero.text()
    elif comparison.homogeneous is not None:
        texts[directory / HOMOGENEOUS_PLAN_FILE] = comparison.homogeneous.text()
    write_together({**texts, directory / RESULT_FILE: json_text(comparison_result(comparison, model_file))})


def comparison_result(comparison: Comparison, model_file: str | None = None) -> dict[str, object]:
    """Return the short result of the faster plan, with both plans' sizes and step times under ``hetero_parallel``.

    ``model_file``: the model.json with the hetero sizes, if one was written.
    """
    plan, record = comparison.hetero, comparison.hetero.hetero
    assert record is not None
    micro_batch = plan.layout.micro_batch_size
    sizes = {
        phase.module: _sizes(phase.layout, phase.layout.micro_batch_scale * micro_batch) for phase in record.encoders
    }
    sizes[plan.backbone] = _sizes(plan.layout, micro_batch)
    other = comparison.homogeneous
    hetero: dict[str, object] = {
        "faster": comparison.best is plan,
        "speed_up": comparison.speed_up,
        "modules": sizes,
        "memory": record.memory,
        **_times_ms(plan),
        "homogeneous": None
        if other is None
        else {"parallel_config": result_of(other)["parallel_config"], **_times_ms(other)},
    }
    if record.homogeneous_note:
        hetero["homogeneous_note"] = record.homogeneous_note
    if model_file is not None:
        hetero["model_file"] = model_file
    return {**result_of(comparison.best), "hetero_parallel": hetero}


def _times_ms(plan: Plan) -> dict[str, float]:
    bound_us = _bound_us(plan)
    bound = {} if bound_us is None else {"lower_bound": bound_us / US_PER_MS}
    return {"e2e_time": plan.mean_us / US_PER_MS, **bound}


def _sizes(layout: Layout | ModuleLayout, micro_batch_size: int) -> dict[str, int]:
    return {
        "TP": layout.tensor_size,
        "PP": layout.pipeline_size,
        "CP": layout.context_size,
        "DP": layout.data_size,
        "MBS": micro_batch_size,
    }


def summary(comparison: Comparison) -> str:
    """Return one line that names the faster plan and its lead."""
    other = comparison.homogeneous
    ours = f"{comparison.hetero.layout.label()}, {comparison.hetero.mean_us / US_PER_MS:.2f} ms"
    if other is None or comparison.speed_up is None:
        return f"hetero {ours}; no homogeneous plan fits"
    theirs = f"{other.layout.label()}, {other.mean_us / US_PER_MS:.2f} ms"
    if comparison.best is comparison.hetero:
        return f"hetero is {comparison.speed_up:.3f} times as fast: {ours}; best homogeneous plan: {theirs}"
    return f"hetero does not pay: {ours}; the best homogeneous plan is no slower: {theirs}"
