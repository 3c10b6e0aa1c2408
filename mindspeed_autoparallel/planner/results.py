"""The result files of a search, in a directory that the caller names."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypedDict

from mindspeed_autoparallel.files import json_text, write_together
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Plan, to_json
from mindspeed_autoparallel.units import US_PER_MS

RESULT_FILE = "auto_parallel_search_optimal_config.json"
RESULT_SCHEMA_VERSION = 1
PLAN_FILE = "plan.json"
PROFILE_FILE = "plan.profile.json"
"""The profile that the plan was searched with: ``replan`` plans anew with it after a loss."""


def release() -> str:
    """Return the installed release of this tool, ``unknown`` where it runs from its sources."""
    try:
        return version("mindspeed-autoparallel")
    except PackageNotFoundError:
        return "unknown"


def write_results(plan: Plan, directory: Path, profile: Profile | None = None) -> None:
    """Write plan, short result and ``profile``, each whole or not at all, and no result without its plan."""
    texts = {directory / PLAN_FILE: plan.text(), directory / RESULT_FILE: json_text(result_of(plan))}
    if profile is not None:
        texts[directory / PROFILE_FILE] = json_text(to_json(profile))
    write_together(texts)


class Result(TypedDict):
    """The short result: sizes by name, layers and recomputed layers by module and pipeline rank."""

    schema_version: int
    parallel_config: dict[str, int]
    layer_placement: dict[str, list[int]]
    layer_recompute: dict[str, list[int]]
    e2e_time: float
    throughput: float


def result_of(plan: Plan) -> Result:
    """Return the short result: lists of length PP, ``e2e_time`` in ms, ``throughput`` in tokens per second and device.

    CP, EP and VPP appear where they are above 1, ETP where it is not TP. With VPP a list's entry is the sum over the
    rank's chunks; the chunks are in the plan file. An encoder under a layout of its own has one entry: it has no
    pipeline.
    """
    layout = plan.layout
    parallel = {
        "PP": layout.pipeline_size,
        "TP": layout.tensor_size,
        "DP": layout.data_size,
        "MBS": layout.micro_batch_size,
    }
    for name, size in (("CP", layout.context_size), ("EP", layout.expert_size), ("VPP", layout.virtual_size)):
        if size > 1:
            parallel[name] = size
    if layout.ranks_of_expert != layout.tensor_size:
        parallel["ETP"] = layout.expert_tensor_size
    size = layout.pipeline_size

    def by_rank(row: tuple[int, ...]) -> list[int]:
        return [sum(row[rank::size]) for rank in range(size)]

    return {
        "schema_version": RESULT_SCHEMA_VERSION,
        "parallel_config": parallel,
        "layer_placement": {
            f"{module.result_key}_layer_placement": [module.num_layers]
            if module.name in layout.modules
            else by_rank(plan.layers_of(module.name))
            for module in plan.model.modules
        },
        "layer_recompute": {
            f"{module.result_key}_layer_recompute": [0]
            if module.name in layout.modules
            else by_rank(plan.recomputed_of(module.name))
            for module in plan.model.modules
        },
        "e2e_time": plan.mean_us / US_PER_MS,
        "throughput": plan.mean_throughput,
    }
