"""The fastest layouts that fit, by prediction, with what was left out and why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from mindspeed_autoparallel.cost.analytic.fields import counts
from mindspeed_autoparallel.cost.analytic.layer_time import tensor_exposed
from mindspeed_autoparallel.cost.analytic.reading import read_workload
from mindspeed_autoparallel.cost.analytic.request_keys import check_sections
from mindspeed_autoparallel.cost.analytic.step_time import gradient_exposed
from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.predict.answers import Answer, Choices
from mindspeed_autoparallel.predict.model_words import request_in_own_words
from mindspeed_autoparallel.predict.predict import predict_one
from mindspeed_autoparallel.predict.space import candidates

SCHEMA_VERSION = 1


_STAGE_FLAGS = {
    "first_stage_layers": "--decoder-first-pipeline-num-layers",
    "last_stage_layers": "--decoder-last-pipeline-num-layers",
    "account_for_embedding": "--account-for-embedding-in-pipeline-split",
    "account_for_loss": "--account-for-loss-in-pipeline-split",
}
_HIDDEN = 0.5
"""Communication of which less than this share shows is taken as overlapped, and its flag is recommended."""


def megatron_argv(request: Mapping[str, Any], extra_devices: tuple[Device, ...] = ()) -> list[str]:
    """Return the layout of ``request`` as Megatron's own flags, with those of the overlaps that its prediction rests
    on."""
    work = read_workload(request)
    efficiency = find_device(work.gpu, extra_devices).efficiency(work.stack)
    argv = [
        "--tensor-model-parallel-size",
        str(work.tensor_size),
        "--pipeline-model-parallel-size",
        str(work.pipeline_size),
    ]
    argv += _placement_argv(request["parallel"], work)
    if work.context_size > 1:
        argv += ["--context-parallel-size", str(work.context_size)]
    if work.expert_size > 1:
        argv += ["--expert-model-parallel-size", str(work.expert_size)]
    if work.model.num_experts and work.tensor_size > 1:
        argv += ["--expert-tensor-parallel-size", str(work.expert_tensor_size)]
    if work.expert_size > 1:
        across = work.expert_size * work.expert_tensor_size > work.devices_per_node
        argv += ["--moe-token-dispatcher-type", *(("flex", "--moe-enable-deepep") if across else ("alltoall",))]
    if work.sequence_parallel:
        argv.append("--sequence-parallel")
    if work.distributed_optimizer:
        argv.append("--use-distributed-optimizer")
    if work.data_size * work.context_size > 1 and gradient_exposed(work, efficiency) < _HIDDEN:
        argv.append("--overlap-grad-reduce")
    if work.sequence_parallel and tensor_exposed(work, efficiency) < _HIDDEN:
        argv.append("--tp-comm-overlap")
    if work.expert_overlap and work.expert_size > 1:
        argv.append("--overlap-moe-expert-parallel-comm")
    argv += ["--micro-batch-size", str(work.micro_batch), "--global-batch-size", str(work.global_batch)]
    if work.recompute == "full":
        argv += ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    elif work.recompute == "selective":
        argv += ["--recompute-granularity", "selective"]
    return argv


def _placement_argv(parallel: Mapping[str, Any], work: Workload) -> list[str]:
    """Return the flags that say where layers lie."""
    argv: list[str] = []
    if parallel.get("pipeline_layout"):
        # Its bars say how many virtual stages there are.
        return ["--pipeline-model-parallel-layout", str(parallel["pipeline_layout"])]
    if parallel.get("num_layer_list"):
        listed = counts(parallel, "num_layer_list", "parallel")
        argv += ["--num-layer-list", ",".join(map(str, listed))]
    if parallel.get("noop_layers"):
        argv += ["--noop-layers", ",".join(map(str, counts(parallel, "noop_layers", "parallel")))]
    for key, flag in _STAGE_FLAGS.items():
        if parallel.get(key) not in (None, False):
            argv += [flag] if parallel[key] is True else [flag, str(parallel[key])]
    if work.virtual_size > 1:
        layers = work.model.num_layers // (work.pipeline_size * work.virtual_size)
        argv += ["--num-layers-per-virtual-pipeline-stage", str(layers)]
    return argv


def search(base: Mapping[str, Mapping[str, object]], extra_devices: tuple[Device, ...] = (), count: int = 3) -> Choices:
    """Return the ``count`` fastest layouts for ``base`` (a request without a layout), fastest first.

    Of layouts predicted equally fast the one with less memory comes first. Raises ``InfeasiblePlan`` naming the layout
    that needs least when none fits, ``ConfigError`` when none is legal or the device is unknown.
    """
    check_sections(base)
    base = request_in_own_words(base)
    find_device(str((base.get("hw") or {}).get("gpu")), extra_devices)
    left_out: Counter[str] = Counter()
    fitting: list[tuple[float, float, int, dict[str, Any], Answer]] = []
    tightest: tuple[float, str] | None = None
    first_reason = ""
    number = 0
    for number, request in enumerate(candidates(base, extra_devices), start=1):
        answer = predict_one(request, extra_devices)
        if answer["status"] == "ok":
            fitting.append((answer["step_time_ms"], answer["peak_memory_gib"], number, request, answer))
            continue
        if answer["status"] == "error":
            first_reason = first_reason or answer["reason"]
            # One line per rule, not per number in it.
            left_out[re.sub(r"\d+", "N", answer["reason"])] += 1
            continue
        left_out["does not fit into memory"] += 1
        if tightest is None or answer["peak_memory_gib"] < tightest[0]:
            tightest = (answer["peak_memory_gib"], answer["reason"])
    if not fitting:
        if tightest is None:
            if len(left_out) == 1:
                raise ConfigError(f"none of {number} layouts is legal: {first_reason}")
            rules = " ".join(f"{count} of them: {rule}" for rule, count in left_out.most_common(3))
            raise ConfigError(f"none of {number} layouts is legal. {rules} The first: {first_reason}")
        raise InfeasiblePlan(
            f"none of {number} layouts fits. The one that needs least: {tightest[1]} Every stage recomputes alike "
            "here; plan --profile-source analytic chooses layers and recompute stage by stage."
        )
    fitting.sort(key=lambda item: item[:3])
    return {
        "schema_version": SCHEMA_VERSION,
        "profile_source": "analytic",
        "num_candidates": number,
        "num_fitting": len(fitting),
        "left_out": dict(left_out.most_common()),
        "top": [
            {
                "parallel": request["parallel"],
                "train": request["train"],
                "argv": megatron_argv(request, extra_devices),
                **answer,
            }
            for _, _, _, request, answer in fitting[:count]
        ],
    }
