"""Predicts step time and memory of training runs described in JSON."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mindspeed_autoparallel.cost.analytic.fields import section_of
from mindspeed_autoparallel.cost.analytic.reading import read_workload
from mindspeed_autoparallel.cost.analytic.request_keys import unknown_keys
from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.errors import AutoParallelError, ConfigError
from mindspeed_autoparallel.files import shown
from mindspeed_autoparallel.predict.answers import Answer, Predictions, StageAnswer
from mindspeed_autoparallel.predict.confidence import half_width, peak_half_width
from mindspeed_autoparallel.predict.effects import without_effect
from mindspeed_autoparallel.predict.model_file import request_in_own_words
from mindspeed_autoparallel.predict.price import device_of, first_step_bytes, price
from mindspeed_autoparallel.predict.useful_work import utilization
from mindspeed_autoparallel.spec.plan_records import RankMemory, StagePlan

SCHEMA_VERSION = 1
_GIB = 2**30
UNKNOWN = ": unknown; ignored"
"""End of a note on unknown keys."""
_MOST_NAMED = 20
"""Most unknown keys in one note: a whole Megatron namespace has hundreds."""


def predict_one(request: Mapping[str, object], extra_devices: tuple[Device, ...] = ()) -> Answer:
    """Return the answer to one request.

    ``status`` is ``ok``; ``out_of_memory`` (figures are still given, ``reason`` names the stage); or ``error`` with the
    reason, for a request that cannot start. ``notes`` name unknown keys. A run that fits only with switches that the
    request leaves open is answered with them, and ``assumed`` names them.
    """
    try:
        request = request_in_own_words(request) if isinstance(request, Mapping) else request
    except ConfigError as error:
        return {"id": request.get("id"), "status": "error", "reason": str(error), "notes": []}
    work: Workload | None = None
    assumed = ""
    try:
        if not isinstance(request, Mapping):
            raise ConfigError("a request must be an object with model, hw, parallel and train.")
        device = device_of(request, extra_devices)
        work = read_workload(request)
        answer, assumed = _fitting_answer(request, work, device)
    except AutoParallelError as error:
        identity = request.get("id") if isinstance(request, Mapping) else None
        answer, work = {"id": identity, "status": "error", "reason": str(error)}, None
    unknown = unknown_keys(request) if isinstance(request, Mapping) else []
    more = f" and {len(unknown) - _MOST_NAMED} more" if len(unknown) > _MOST_NAMED else ""
    answer["notes"] = [f"{', '.join(unknown[:_MOST_NAMED])}{more}{UNKNOWN}"] if unknown else []
    if work is not None:
        answer["notes"] += without_effect(request, work)
    if assumed:
        answer["assumed"] = assumed
        answer["notes"].append(f"fits only with switches that the request does not state, assumed here: {assumed}")
    return answer


def _fitting_answer(request: Mapping[str, object], work: Workload, device: Device) -> tuple[Answer, str]:
    """Return the answer to ``request``; if it does not fit, to the first leaner variant that does."""
    answer = _answer(request.get("id"), work, device)
    if answer["status"] == "out_of_memory":
        for leaner, words in leaner_readings(request, work):
            with contextlib.suppress(AutoParallelError):
                found = _answer(request.get("id"), read_workload(leaner), device)
                if found["status"] == "ok":
                    return found, words
    return answer, ""


def _answer(identity: Any, work: Workload, device: Device) -> Answer:
    efficiency = device.efficiency(work.stack)
    found = price(work, device)
    step = found.step
    peaks = [rank.peak_bytes / _GIB for rank in found.memory]
    worst = max(range(len(peaks)), key=lambda stage: peaks[stage])
    spread, kind = half_width(work, device)
    peak_spread = peak_half_width(peaks[worst])
    answer: Answer = {
        "id": identity,
        "status": "ok",
        "step_time_ms": step.total_us / 1e3,
        "step_time_interval_ms": [step.total_us / 1e3 / (1 + spread), step.total_us / 1e3 * (1 + spread)],
        "step_time_extrapolation": kind,
        "step_time_parts_ms": {
            "pipeline": step.pipeline_us / 1e3,
            "gradients": (step.data_parallel_us + step.embedding_us) / 1e3,
            "optimizer": max(0.0, step.optimizer_us - efficiency.step_us) / 1e3,
            "fixed": min(step.optimizer_us, efficiency.step_us) / 1e3,
        },
        "bubble_fraction": step.bubble_fraction,
        "peak_memory_gib": peaks[worst],
        "peak_memory_interval_gib": [peaks[worst] / (1 + peak_spread), peaks[worst] * (1 + peak_spread)],
        "stages": [_stage(rank, found.stages, work) for rank in found.memory],
        "tokens_per_s_per_device": found.throughput,
        "mfu": utilization(work, device, step.total_us),
        "profile_source": "analytic",
        "device": device.name,
        "stack": work.stack,
        "provenance": efficiency.provenance,
    }
    room = device.counted_bytes / _GIB
    if peaks[worst] > room:
        answer["status"] = "out_of_memory"
        answer["reason"] = (
            f"stage {worst} needs {peaks[worst]:.1f} GiB, and torch counts {room:.1f} GiB on {device.name}; "
            f"raise tp, pp or cp, lower mbs, use recompute or dist_opt."
        )
    return answer


def _stage(rank: RankMemory, stages: Sequence[StagePlan], work: Workload) -> StageAnswer:
    """Return a pipeline rank; its activations are those of all microbatches in flight at its highest point."""
    terms = rank.terms
    held = sum(terms.get(name, 0) for name in ("other_microbatches", "this_microbatch", "messages"))
    transient = terms.get("transient", 0) + terms.get("optimizer_step", 0)
    own = [stage for stage in stages if stage.pipeline_rank == rank.pipeline_rank]
    return {
        "stage": rank.pipeline_rank,
        "peak_memory_gib": rank.peak_bytes / _GIB,
        "first_step_peak_gib": first_step_bytes(rank, work) / _GIB,
        "parameters_gib": terms["parameters"] / _GIB,
        "gradients_gib": terms["gradients"] / _GIB,
        "optimizer_gib": terms["optimizer"] / _GIB,
        "activations_gib": held / _GIB,
        "transient_gib": transient / _GIB,
        "workspace_gib": rank.runtime_overhead_bytes / _GIB,
        "microbatch_ms": sum(stage.forward_us + stage.backward_us for stage in own) / 1e3,
    }


def predict(document: Any, extra_devices: tuple[Device, ...] = (), where: str = "the request file") -> Predictions:
    """Return answers to ``{"requests": [...]}`` in the same order; raises ``ConfigError``, which starts with ``where``,
    for another form."""
    requests = document.get("requests") if isinstance(document, Mapping) else document
    if not isinstance(requests, list):
        keys = "an empty object" if document == {} else "a value"
        if isinstance(document, Mapping) and document:
            keys = f"an object with the keys {shown(', '.join(document), 100)}"
        raise ConfigError(f'{where} must hold {{"requests": [...]}}, not {keys}.')
    return {
        "schema_version": SCHEMA_VERSION,
        "predictions": [predict_one(request, extra_devices) for request in requests],
    }


_TWO_BYTES = {"grad_reduce_in_bf16": True}
_MOMENTS = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}


def leaner_readings(request: Mapping[str, object], work: Workload) -> Iterator[tuple[dict[str, object], str]]:
    """Yield ``request`` with ever more switches that save memory, the cheapest first, and their names; it states none.

    Gradients in bf16 (every performance recipe of Megatron-Bridge), moments in bf16 (its DeepSeek-V3 recipes), on one
    stage parameters sharded over all replicas and activations offloaded (its Llama 3 70B and 405B recipes). Recompute
    is never assumed, because it changes the computation, and nothing is assumed on Ascend, whose software lacks these
    switches.
    """
    if work.on_ascend or work.stack != "megatron-core":
        return
    train, parallel = dict(section_of(request, "train")), dict(section_of(request, "parallel"))
    words: list[str] = []
    for added, said in ((_TWO_BYTES, "gradients reduced and kept in bf16"), (_MOMENTS, "Adam's moments in bf16")):
        if not set(added) & set(train) and not (added is _TWO_BYTES and work.reduced_in_two_bytes):
            train.update(added)
            words.append(said)
            yield {**request, "train": dict(train)}, ", ".join(words)
    ranks = work.data_size * work.context_size
    if work.pipeline_size > 1 or work.adapters or ranks == 1:
        return
    # Megatron's FSDP goes with the distributed optimizer.
    if "fsdp" not in parallel and parallel.get("dist_opt") is not False:
        parallel["fsdp"] = ranks
        words.append(f"parameters sharded over {ranks} ranks (Megatron FSDP)")
        yield {**request, "train": train, "parallel": parallel}, ", ".join(words)
    if "cpu_offloading_num_layers" not in train and "offload" not in train and work.recompute == "none":
        quarters = sorted({work.model.num_layers * part // 4 for part in (1, 2, 3, 4)} - {0})
        for layers in quarters:
            offloading = {**train, "cpu_offloading_num_layers": layers}
            listed = [*words, f"activations of {layers} layers offloaded to the host"]
            yield {**request, "train": offloading, "parallel": parallel}, ", ".join(listed)
