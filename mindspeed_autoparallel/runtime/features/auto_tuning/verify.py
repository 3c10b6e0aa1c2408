"""``--auto-tuning-verify``: runs the recommended configurations for a few steps, and reports the error of the
prediction."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_json
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.layouts.assembly import plan_of
from mindspeed_autoparallel.report.tuning_result import RankPeak, TuningResult, Verified
from mindspeed_autoparallel.runtime.devices.adapter import shared_cores
from mindspeed_autoparallel.runtime.devices.selection import current_device
from mindspeed_autoparallel.runtime.features.auto_tuning.argv import with_configuration, without_places, words_of
from mindspeed_autoparallel.runtime.features.auto_tuning.launches import Launches
from mindspeed_autoparallel.runtime.features.auto_tuning.recommendation import Recommendation
from mindspeed_autoparallel.runtime.features.auto_tuning.request import TuningRequest
from mindspeed_autoparallel.runtime.features.auto_tuning.write import rewrite
from mindspeed_autoparallel.runtime.launch.outcome import LaunchStatus
from mindspeed_autoparallel.runtime.profiling.calibrate.results import fingerprint_of
from mindspeed_autoparallel.runtime.profiling.trace.process import hash_of_sources
from mindspeed_autoparallel.spec import Cluster, Layout, Plan, to_json
from mindspeed_autoparallel.units import US_PER_MS

_LOGGER = logging.getLogger(__name__)
_NUM_STEPS = 16
"""The first step warms up, the next five track memory, and the later half of the others gives the time."""


def verify(request: TuningRequest, picks: Sequence[Recommendation], launches: Launches, result: TuningResult) -> None:
    """Launch each configuration that the measuring devices can run; for the others, record the reason.

    With fewer devices than ranks the data-parallel size is reduced, and the prediction of the reduced job is compared.
    Measurements of the same command on the same device by an earlier run are reused. ``result`` and its
    files are updated after every configuration.
    """
    sources = [hash_of_sources(Path(sys.argv[0])).hexdigest(), vars(fingerprint_of(current_device()))]
    result["verified"] = []
    for number, pick in enumerate(picks, start=1):
        result["verified"].append(_verified(request, pick, number, launches, sources))
        result["launches"] = [record.to_json() for record in launches.records]
        result["num_device_launches"] = launches.num_on_devices
        rewrite(request.work_dir, result)


def _verified(
    request: TuningRequest, pick: Recommendation, number: int, launches: Launches, sources: list[Any]
) -> Verified:
    layout = pick.plan.layout
    world = request.num_measuring
    reduced = reduced_layout(layout, world)
    if reduced is None:
        reason = (
            f"{layout.label()} cannot be run on {world} devices: it needs a multiple of "
            f"TP x PP x CP = {layout.num_devices // layout.data_size}, and EP {layout.expert_size} within DP x CP."
        )
        return {"number": number, "status": "not_run", "reason": reason}
    cluster = Cluster(num_nodes=request.num_nodes, devices_per_node=request.num_processes_per_node)
    try:
        plan = verified_plan(pick, cluster, reduced)
    except ConfigError as error:
        return {"number": number, "status": "not_run", "reason": f"{reduced.label()} on {world} devices: {error}"}
    words = words_of({**pick.values, "global_batch_size": plan.global_batch_size})
    argv = tuple(with_configuration(sys.argv, words))
    environment = pick.found.configuration.variant.environment
    ran = json.dumps([*sources, without_places(argv), words, dict(environment), world, _NUM_STEPS])
    target = request.work_dir / "verify" / f"{hashlib.sha256(ran.encode()).hexdigest()[:16]}.json"
    if target.exists():
        _LOGGER.info(f"configuration {number}, {reduced.label()}, was run before: {target}")
        return {"number": number, "status": "ok", **_compared(plan, target, layout)}
    _LOGGER.info(f"verifying configuration {number}: {reduced.label()} on {world} devices")
    outcome = launches.on_devices(
        "verify",
        {
            "kind": "verify",
            "plan": to_json(plan),
            "num_steps": _NUM_STEPS,
            "result": str(target),
            "calibration_file": str(request.calibration_file or ""),
        },
        argv,
        environment,
    )
    if outcome.status is not LaunchStatus.OK or not target.exists():
        return {"number": number, "status": outcome.status.value, "reason": outcome.describe()}
    return {"number": number, "status": "ok", **_compared(plan, target, layout)}


def reduced_layout(layout: Layout, num_devices: int) -> Layout | None:
    """Return ``layout`` with the data-parallel size for exactly ``num_devices``; ``None`` if there is none."""
    shards = layout.num_devices // layout.data_size
    if num_devices % shards:
        return None
    reduced = replace(layout, data_size=num_devices // shards)
    return None if reduced.data_size * reduced.context_size % reduced.expert_size else reduced


def verified_plan(pick: Recommendation, cluster: Cluster, layout: Layout) -> Plan:
    """Return the plan of ``pick`` in the reduced ``layout``, with as many microbatches and without the search's proof.

    For samples that differ its steps are drawn. Raises ``ConfigError`` if these are not modelled in ``layout``.
    """
    batch = pick.plan.global_batch_size // pick.plan.layout.data_size * layout.data_size
    profile = pick.found.configuration.variant.profile
    found = evaluate(profile, cluster, layout, pick.found.placement, batch)
    plan = plan_of(profile, cluster, layout, found, batch, pick.plan.search.without_proof)
    if pick.samples is None:
        return plan
    judged = pick.samples.judge(plan)
    return pick.samples.with_record(judged, [judged])


def _compared(plan: Plan, measured: Path, wanted: Layout) -> Verified:
    document = read_json(measured, "verification")
    ranks = document["ranks"]
    step_ms = max(rank["step_us"] for rank in ranks) / US_PER_MS
    predicted_ms = plan.mean_us / US_PER_MS
    width = len(ranks) // plan.layout.pipeline_size
    stages: list[RankPeak] = [
        {
            "pipeline_rank": memory.pipeline_rank,
            "predicted_bytes": memory.peak_bytes,
            "measured_bytes": max(
                rank["peak_bytes"] for rank in ranks[memory.pipeline_rank * width : (memory.pipeline_rank + 1) * width]
            ),
        }
        for memory in plan.memory
    ]
    worst = max(stages, key=lambda stage: stage["measured_bytes"])
    notes = []
    if plan.layout.data_size != wanted.data_size:
        notes.append(f"run with DP {plan.layout.data_size} in place of {wanted.data_size}")
    if plan.data is not None:
        notes.append("samples differ: the step is the mean drawn one, the peak that of the mean sample")
    if plan.profile.device.startswith("cpu") and (shared := shared_cores(len(ranks))):
        notes.append(f"{shared}: the step time is not comparable")
    return {
        "predicted_step_ms": predicted_ms,
        "measured_step_ms": step_ms,
        "step_error": predicted_ms / step_ms - 1,
        "predicted_peak_bytes": worst["predicted_bytes"],
        "measured_peak_bytes": worst["measured_bytes"],
        "memory_error": worst["predicted_bytes"] / worst["measured_bytes"] - 1 if worst["measured_bytes"] else 0.0,
        "stages": stages,
        "note": "; ".join(notes),
        "calibration": document.get("calibration", ""),
    }
