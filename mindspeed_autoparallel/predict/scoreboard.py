"""Predictions compared with measured rows: errors of time and memory, rank correlation, regret and top-three hits."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from mindspeed_autoparallel.cost.analytic.activations import layer_activation_bytes
from mindspeed_autoparallel.cost.analytic.fields import number, optional_integer, part
from mindspeed_autoparallel.cost.analytic.parameters import layer_parameters
from mindspeed_autoparallel.cost.analytic.reading import read_workload
from mindspeed_autoparallel.cost.analytic.states import in_flight_layers
from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.evaluate import Evaluation
from mindspeed_autoparallel.predict.answers import Errors, GroupErrors, Scoreboard
from mindspeed_autoparallel.predict.measured_rows import broken_part, request_of_row
from mindspeed_autoparallel.predict.price import price

_GIB = 2**30


_STEP_MS = {"iter_time_ms": 1.0, "step_time_ms": 1.0, "iter_time_s": 1e3, "iter_time_s_median_second_half": 1e3}
_PEAK_GIB = {"peak_alloc_gib": 1.0, "peak_memory_gib": 1.0, "peak_gib": 1.0, "mem_max_allocated_bytes": 1 / _GIB}
"""Names of a measured figure, and the factor to its unit here."""


def _first_measured(row: Mapping[str, object], factors: Mapping[str, float]) -> float | None:
    measured = part(row, "measured")
    for key, factor in factors.items():
        value = measured.get(key)
        if isinstance(value, (int, float)) and value > 0:
            return float(value) * factor
    return None


def measured_step_ms(row: Mapping[str, object]) -> float | None:
    """Return the measured step time of a row, in milliseconds, under any of its names."""
    return _first_measured(row, _STEP_MS) or _step_ms_of_throughput(row)


def _step_ms_of_throughput(row: Mapping[str, object]) -> float | None:
    """Step time behind a published rate: tokens per second, or model operations as Megatron counts them.

    Operations of a step without recompute: ``72 B s l h^2 (1 + s / 6 h + V / 12 l h)``. Source: Narayanan et al. 2021,
    appendix, whose 96 counts one more forward pass for recompute.
    """
    model, measured, batch = part(row, "model"), part(row, "measured"), part(row, "train").get("gbs")
    devices = optional_integer(part(row, "hw"), "num_gpus", "hw")
    sequence = optional_integer(model, "seq", "model")
    if not (isinstance(batch, int) and devices and sequence):
        return None
    if rate := _measured(measured, "tokens_per_s_per_gpu"):
        return batch * sequence / rate / devices * 1e3
    hidden, layers, vocabulary = (optional_integer(model, key, "model") for key in ("hidden", "num_layers", "vocab"))
    rate = _measured(measured, "tflops_per_gpu")
    if not (rate and hidden and layers and vocabulary):
        return None
    scale = 1 + sequence / (6 * hidden) + vocabulary / (12 * layers * hidden)
    operations = 72 * batch * sequence * layers * hidden**2 * scale
    return operations / (rate * 1e12 * devices) * 1e3


def _measured(measured: Mapping[str, object], key: str) -> float | None:
    return None if measured.get(key) is None else number(measured, key, 0.0, "measured", 0.0, math.inf)


def measured_peak_gib(row: Mapping[str, object]) -> float | None:
    """Return the measured peak of allocated memory in GiB."""
    return _first_measured(row, _PEAK_GIB)


def group_key(row: Mapping[str, object]) -> tuple[Any, ...]:
    """Return a key that is the same for rows that a user would choose among: of one model, devices and batch."""
    model, train = part(row, "model"), part(row, "train")
    names = ("name", "hidden", "num_layers", "heads", "seq")
    return (
        row.get("group"),
        *(model.get(name) for name in names),
        part(row, "hw").get("num_gpus"),
        train.get("gbs"),
        train.get("micro_batch_count") if "gbs" not in train else None,
    )


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Return Spearman's correlation, ties sharing their mean rank; 1 for fewer than two distinct values on either
    side."""

    def centred_ranks(values: Sequence[float]) -> numpy.ndarray:
        _, place, counts = numpy.unique(values, return_inverse=True, return_counts=True)
        ranks: numpy.ndarray = (numpy.cumsum(counts) - (counts + 1) / 2)[place] - (len(values) - 1) / 2
        return ranks

    a, b = centred_ranks(left), centred_ranks(right)
    spread = math.sqrt((a @ a) * (b @ b))
    return float(a @ b) / spread if spread else 1.0


def ranking_by_group(rows: Sequence[tuple[Mapping[str, object], float, float]]) -> dict[str, float]:
    """Return the ranking quality over groups of at least two plans; ``rows``: (row, predicted ms, measured ms).

    ``regret`` of a group: how much slower the plan predicted fastest is than the one measured fastest.
    """
    groups: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for row, predicted, measured in rows:
        groups[group_key(row)].append((predicted, measured))
    choices = [pairs for pairs in groups.values() if len(pairs) > 1]
    hits, regrets, correlations, harder, harder_hits = 0, [], [], 0, 0
    for pairs in choices:
        best = min(measured for _, measured in pairs)
        ordered = sorted(pairs)
        hit = any(measured <= best for _, measured in ordered[:3])
        hits += hit
        if len(pairs) > 3:
            harder, harder_hits = harder + 1, harder_hits + hit
        regrets.append(ordered[0][1] / best - 1)
        correlations.append(rank_correlation([p for p, _ in pairs], [m for _, m in pairs]))
    count = len(choices)
    return {
        "groups": count,
        "top3_hits": hits,
        "groups_above_three": harder,
        "top3_hits_above_three": harder_hits,
        "mean_regret": sum(regrets) / count if count else 0.0,
        "max_regret": max(regrets, default=0.0),
        "mean_rank_correlation": sum(correlations) / count if count else 1.0,
    }


def _errors(pairs: Sequence[tuple[float, float]]) -> Errors:
    ratios = [predicted / measured - 1 for predicted, measured in pairs]
    return {
        "rows": len(ratios),
        "mean_absolute": sum(abs(x) for x in ratios) / len(ratios),
        "mean": sum(ratios) / len(ratios),
        "worst_over": max(ratios),
        "worst_under": min(ratios),
    }


def _peak_gib(found: Evaluation, row: Mapping[str, object]) -> float:
    """Return the peak of the rank that was measured: some sources log the last rank only."""
    last_only = "mem_max_allocated_bytes" in part(row, "measured")
    return max(rank.peak_bytes for rank in found.memory[-1 if last_only else 0 :]) / _GIB


def _activation_pair(row: Mapping[str, object], work: Workload) -> tuple[float, float] | None:
    """Return (predicted, measured) activation memory where a source gives it apart."""
    measured = part(row, "measured")
    saved = layer_activation_bytes(work)
    if (activations := _measured(measured, "activations_gib")) is not None:
        return saved * in_flight_layers(work, 0) / _GIB, activations
    if (percent := _measured(measured, "activation_pct_of_tp_baseline")) is not None:
        plain = dict(request_of_row(row) or {})
        plain["parallel"] = {**part(plain, "parallel"), "sp": False}
        plain["train"] = {**part(plain, "train"), "recompute": "none"}
        base = layer_activation_bytes(read_workload(plain))
        return 100 * saved / base, percent
    return None


def scoreboard(rows: Sequence[Mapping[str, object]]) -> Scoreboard:
    """Return every figure by data group, with how many rows were left out and why.

    ``rows``: measured rows with ``model``, ``hw``, ``parallel``, ``train`` and ``measured``. Memory errors are given
    for all rows and for those above 10 GiB.
    """
    times: dict[str, list[tuple[Mapping[str, object], float, float]]] = defaultdict(list)
    peaks: dict[str, list[tuple[float, float]]] = defaultdict(list)
    activations: dict[str, list[tuple[float, float]]] = defaultdict(list)
    weights: dict[str, list[tuple[float, float]]] = defaultdict(list)
    left_out: dict[str, int] = defaultdict(int)
    for row in rows:
        group = str(row.get("group", "all"))
        broken = broken_part(row)
        if broken:
            left_out[f"{group}: {broken}"] += 1
            continue
        try:
            request = request_of_row(row)
            if request is None:
                left_out[f"{group}: the row does not describe a gpt or moe run in full"] += 1
                continue
            work = read_workload(request)
            pair = _activation_pair(row, work)
            if pair:
                activations[group].append(pair)
            if (state_gib := _measured(part(row, "measured"), "params_plus_optimizer_gib")) is not None:
                count = layer_parameters(work).shared * work.model.num_layers / work.pipeline_size
                weights[group].append((18 * count / _GIB, state_gib))
            step, peak = measured_step_ms(row), measured_peak_gib(row)
            found = price(work, find_device(work.gpu)) if step or peak else None
            if peak and found:
                peaks[group].append((_peak_gib(found, row), peak))
            if step and found:
                times[group].append((row, found.step.total_us / 1e3, step))
            if not (step or peak or pair):
                left_out[f"{group}: no predicted figure was measured"] += 1
        except ConfigError as error:
            left_out[f"{group}: {error}"] += 1
    result: Scoreboard = {"schema_version": 1, "groups": {}, "left_out": dict(sorted(left_out.items()))}
    for group in sorted({*times, *peaks, *activations, *weights}):
        entry: GroupErrors = {}
        if times[group]:
            entry["step_time"] = _errors([(p, m) for _, p, m in times[group]])
            entry["ranking"] = ranking_by_group(times[group])
        if peaks[group]:
            entry["peak_memory"] = _errors(peaks[group])
            large = [pair for pair in peaks[group] if pair[1] > 10]
            if large:
                entry["peak_memory_above_10_gib"] = _errors(large)
        if activations[group]:
            entry["activation_memory"] = _errors(activations[group])
        if weights[group]:
            entry["parameter_memory"] = _errors(weights[group])
        if entry:
            result["groups"][group] = entry
    return result
