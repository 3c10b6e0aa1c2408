"""An operator plan's Megatron configuration as a candidate of the planner with measured times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_autoparallel.errors import AutoParallelError, ConfigError
from mindspeed_autoparallel.files import read_json
from mindspeed_autoparallel.operators.plan import SCHEMA_VERSION
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Cluster, Layout, Plan

if TYPE_CHECKING:
    from mindspeed_autoparallel.planner.layouts.options import SearchOptions

_SIZES = {
    "pipeline_size": "pipeline_model_parallel_size",
    "tensor_size": "tensor_model_parallel_size",
    "data_size": "data_parallel_size",
    "context_size": "context_parallel_size",
    "expert_size": "expert_model_parallel_size",
    "micro_batch_size": "micro_batch_size",
}


def read_candidate(path: Path) -> Layout:
    """Return the layout in the output of ``mindspeed-autoparallel operators --json``; ``ConfigError`` for any other
    content."""
    content = read_json(path, "operator plan (--candidate)")
    given = content.get("megatron") if isinstance(content, dict) else None
    if not isinstance(given, dict):
        reason = content.get("megatron_reason") if isinstance(content, dict) else None
        way_out = reason or "write it with `operators --json`."
        raise ConfigError(f"{path} holds no Megatron configuration: {way_out}")
    if content.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(
            f"{path} has schema_version {content.get('schema_version')!r}; this release reads "
            f"{SCHEMA_VERSION}. Search again."
        )
    sizes: dict[str, Any] = {}
    for name, key in _SIZES.items():
        value = given.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{path}: megatron.{key} must be a positive integer, got {value!r}.")
        sizes[name] = value
    sequence = given.get("sequence_parallel")
    if not isinstance(sequence, bool):
        raise ConfigError(f"{path}: megatron.sequence_parallel must be true or false, got {sequence!r}.")
    return replace(Layout(sequence_parallel=sequence), **sizes)


def with_candidate(
    plan: Plan, candidate: Layout, profile: Profile, cluster: Cluster, global_batch_size: int, options: SearchOptions
) -> tuple[Plan, str]:
    """Return the faster of ``plan`` and the best split of ``candidate``, and a sentence that compares them."""
    from mindspeed_autoparallel.planner.layouts.search import search  # a rank that reads a candidate searches nothing

    name = f"operator candidate {candidate.label()}"
    try:
        wanted = replace(options, layouts=[candidate], with_relaxations=False)
        other = search(profile, cluster, global_batch_size, wanted)
    except AutoParallelError as error:
        return plan, f"{name}: not possible here: {error}"
    best, step = plan.step.total_us, other.step.total_us
    if step < best:
        return other, f"{name}: {step / 1000:.2f} ms, {100 * (1 - step / best):.1f} % faster than the search's plan"
    return plan, f"{name}: {step / 1000:.2f} ms, {100 * (step / best - 1):.1f} % above the plan"
