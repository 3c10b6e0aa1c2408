"""The files of a tuning run: JSON for programs, a table and a page for users, a plan file per configuration."""

from __future__ import annotations

import shlex
from pathlib import Path

from mindspeed_autoparallel.files import json_text, write_json_atomic, write_text_atomic, write_together
from mindspeed_autoparallel.planner.tuner.candidates import Space
from mindspeed_autoparallel.planner.tuner.search import Outcome
from mindspeed_autoparallel.redaction import masked_words
from mindspeed_autoparallel.report.page import render_page
from mindspeed_autoparallel.report.tuning import render_tuning_page
from mindspeed_autoparallel.report.tuning_result import (
    Configuration,
    Knowledge,
    SampleSpread,
    SearchCounts,
    TuningResult,
)
from mindspeed_autoparallel.runtime.features.auto_tuning.costs import CalibrationResult
from mindspeed_autoparallel.runtime.features.auto_tuning.launches import Launches
from mindspeed_autoparallel.runtime.features.auto_tuning.recommendation import Recommendation, Recommended
from mindspeed_autoparallel.runtime.features.auto_tuning.request import TuningRequest
from mindspeed_autoparallel.runtime.features.auto_tuning.source import TunedProfiles
from mindspeed_autoparallel.runtime.features.auto_tuning.user_baseline import described
from mindspeed_autoparallel.spec.plan_records import DataRecord
from mindspeed_autoparallel.spec.recompute import policy_of
from mindspeed_autoparallel.units import US_PER_MS

RESULT_SCHEMA_VERSION = 1
RESULT_FILE = "auto_tuning_result.json"
PAGE_FILE = "auto_tuning_report.html"


def describe(recommendation: Recommendation, number: int) -> Configuration:
    """Return the entry of a configuration in ``top`` of the result file."""
    plan, found = recommendation.plan, recommendation.found
    layout = plan.layout
    step_ms = plan.mean_us / US_PER_MS
    spread = recommendation.relative_error
    module = plan.model.modules[0].name
    values: Configuration = {
        "number": number,
        "label": f"{layout.label()} {recommendation.title}".strip(),
        "parallel": {
            "tp": layout.tensor_size,
            "pp": layout.pipeline_size,
            "dp": layout.data_size,
            "cp": layout.context_size,
            "ep": layout.expert_size,
            "vpp": layout.virtual_size,
            "sp": layout.sequence_parallel,
            "dist_opt": layout.distributed_optimizer,
            "overlap_grad_reduce": layout.overlap_gradient_reduce,
            "overlap_param_gather": layout.overlap_parameter_gather,
        },
        "micro_batch_size": layout.micro_batch_size,
        "global_batch_size": plan.global_batch_size,
        "settings": dict(found.configuration.variant.settings),
        "environment": dict(found.configuration.variant.environment),
        "modelled": list(recommendation.modelled),
        "layers_per_stage": list(plan.layers_of(module)),
        "recompute": {"kind": policy_of(found.recompute).words, "layers_per_stage": list(plan.recomputed_of(module))},
        "step_time_ms": step_ms,
        "step_time_interval_ms": [
            step_ms * recommendation.ends[0] / (1 + spread),
            step_ms * recommendation.ends[1] * (1 + spread),
        ],
        "bubble_fraction": plan.step.bubble_fraction,
        "peak_memory_gib": found.peak_bytes / 2**30,
        "memory": [
            {
                "pipeline_rank": rank.pipeline_rank,
                "peak_bytes": rank.peak_bytes,
                "limit_bytes": rank.limit_bytes,
                "peak_point": rank.peak_point,
                "terms": rank.terms,
            }
            for rank in plan.memory
        ],
        "limits": list(plan.search.limits),
        "tokens_per_s_per_device": plan.mean_throughput,
        "argv": list(recommendation.words),
        "take_out": list(recommendation.flags_to_remove),
        "command": shlex.join(masked_words(recommendation.command)),
        "plan": plan_file(number),
    }
    if plan.data is not None:
        values["samples"] = _spread_of(plan.data)
    return values


def _spread_of(data: DataRecord) -> SampleSpread:
    return {
        "mean_ms": data.mean_us / US_PER_MS,
        "p50_ms": data.p50_us / US_PER_MS,
        "p95_ms": data.p95_us / US_PER_MS,
        "balanced_mean_ms": data.balanced_mean_us / US_PER_MS,
        "oom_probability": data.oom_probability,
        "oom_steps": data.oom_steps,
    }


def plan_file(number: int) -> str:
    """Return the name of a configuration's plan."""
    return f"auto_tuning_plan_{number}.json"


def write(
    request: TuningRequest, profiles: TunedProfiles, recommended: Recommended, launches: Launches
) -> TuningResult:
    """Write every file of the result to the work dir, and return the content of the JSON file."""
    directory, picks = request.work_dir, recommended.picks
    result: TuningResult = {
        "schema_version": RESULT_SCHEMA_VERSION,
        "ranks": request.num_ranks,
        "devices_per_node": request.devices_per_node,
        "device": profiles.costs.device_name,
        "profile_source": profiles.costs.source,
        "launches": [record.to_json() for record in launches.records],
        "num_device_launches": launches.num_on_devices,
        "knowledge": _knowledge(request, profiles.costs),
        "searched": profiles.searched,
        "left_out_dimensions": {**profiles.left_out, **recommended.refused},
        "left_out": dict(recommended.space.left_out.most_common()),
        "as_given": described(recommended.baseline),
        "search": _search(recommended.outcome, recommended.space),
        "notes": sorted(set(profiles.notes)),
        "top": [describe(item, number) for number, item in enumerate(picks, start=1)],
    }
    texts = {}
    for number, item in enumerate(picks, start=1):
        texts[directory / plan_file(number)] = item.plan.text()
        texts[directory / plan_file(number).replace(".json", ".html")] = render_page(
            item.plan, f"flags to add to the script's own: {shlex.join(item.words)}"
        )
    write_together({**texts, directory / RESULT_FILE: json_text(result)})
    rewrite(directory, result)
    return result


def _knowledge(request: TuningRequest, costs: CalibrationResult) -> Knowledge:
    overhead = costs.prices.host
    return {
        "file": str(request.knowledge_file),
        "covered_time_share": costs.coverage.covered_time_share,
        "num_interpolated": len(costs.coverage.missing),
        "host_us_per_call": overhead.per_call_us,
        "kernel_scale": overhead.scale,
        "num_blocks_measured": overhead.num_anchors,
        "relative_error": overhead.relative_error,
    }


def _search(outcome: Outcome, space: Space) -> SearchCounts:
    return {
        "num_candidates": outcome.num_legal + sum(space.left_out.values()),
        "num_legal": outcome.num_legal,
        "num_solved": outcome.num_solved,
        "num_bounded": outcome.num_bounded,
        "num_without_room": outcome.num_out_of_memory,
        "seconds": outcome.proof.seconds,
        "lower_bound_ms": outcome.proof.lower_bound_us / US_PER_MS,
    }


def rewrite(directory: Path, result: TuningResult) -> None:
    """Write the JSON and the page again, after something was added to ``result``."""
    write_json_atomic(directory / RESULT_FILE, result)
    write_text_atomic(directory / PAGE_FILE, render_tuning_page(result))
