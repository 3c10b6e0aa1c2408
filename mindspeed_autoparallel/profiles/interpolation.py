"""Costs between measured points. Only between two measured points (or in proportion to MBS), and marked.

Along MBS every cost is taken as ``a + b x MBS``, along TP and CP as ``a + b / size``, both through the two nearest
measured sizes. One MBS alone is scaled in proportion. Nothing is extrapolated beyond the measured range of TP or CP,
because the cost of a larger group's collectives is unknown. EP and SP are never interpolated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from mindspeed_autoparallel.profiles.blocks import MeasuredAt, Measurement, ModuleCost

_STATE = ("dense", "expert", "tied_copy")


def interpolate(measurements: Sequence[Measurement], point: MeasuredAt) -> Measurement | None:
    """Return the costs at ``point`` from the measured ones, or ``None``; ``interpolated_from`` names the points
    used."""
    measured = {measurement.at: measurement for measurement in measurements}
    for axes in (("micro_batch_size",), ("tensor_size",), ("context_size",), ("tensor_size", "micro_batch_size")):
        found = _along(measured, point, axes)
        if found is not None:
            return found
    return None


def _along(measured: dict[MeasuredAt, Measurement], point: MeasuredAt, axes: tuple[str, ...]) -> Measurement | None:
    axis, others = axes[0], axes[1:]
    candidates: dict[int, Measurement] = {}
    for size in sorted({getattr(at, axis) for at in measured}):
        moved = replace(point, **{axis: size})
        if moved in measured:
            candidates[size] = measured[moved]
        elif others:
            inner = _along(measured, moved, others)
            if inner is not None:
                candidates[size] = inner
    wanted = getattr(point, axis)
    if axis == "micro_batch_size":
        return _along_micro_batch(candidates, point)
    if wanted in candidates:
        return candidates[wanted]
    below = max((size for size in candidates if size < wanted), default=None)
    above = min((size for size in candidates if size > wanted), default=None)
    if below is None or above is None:
        return None
    weight = (1 / below - 1 / wanted) / (1 / below - 1 / above)
    return _blend(candidates[below], candidates[above], weight, point)


def _along_micro_batch(candidates: dict[int, Measurement], point: MeasuredAt) -> Measurement | None:
    if not candidates:
        return None
    wanted = point.micro_batch_size
    if len(candidates) == 1:
        size, only = next(iter(candidates.items()))
        return _combine([only], lambda values: values[0] * wanted / size, point)
    low, high = sorted(sorted(candidates, key=lambda size: (abs(size - wanted), size))[:2])
    return _blend(candidates[low], candidates[high], (wanted - low) / (high - low), point)


def _blend(low: Measurement, high: Measurement, weight: float, point: MeasuredAt) -> Measurement:
    return _combine([low, high], lambda values: max(0.0, values[0] * (1 - weight) + values[1] * weight), point)


def _combine(sources: list[Measurement], rule: Callable[[list[float]], float], point: MeasuredAt) -> Measurement:
    # State does not depend on the microbatch: with one source it is copied, with two it follows the same rule.
    used = [label for source in sources for label in (source.interpolated_from or (source.at.label(),))]
    labels = tuple(dict.fromkeys(used))
    alone = len(sources) == 1
    modules: dict[str, ModuleCost] = {
        name: _merge([source.modules[name] for source in sources], rule, alone) for name in sources[0].modules
    }
    batch = _merge([source.batch for source in sources], rule, alone)
    workspace = round(rule([source.workspace_bytes for source in sources]))
    return Measurement(at=point, modules=modules, batch=batch, workspace_bytes=workspace, interpolated_from=labels)


def _merge(values: list[Any], rule: Callable[[list[float]], float], copy_state: bool) -> Any:
    first = values[0]
    if any(value is None for value in values):
        return None
    if isinstance(first, dict):
        kinds = [kind for kind in first if all(kind in value for value in values)]
        return {kind: _merge([value[kind] for value in values], rule, copy_state) for kind in kinds}
    if isinstance(first, tuple):
        # Kinds of layers; which layer is of which kind does not depend on the point.
        rows = zip(*values, strict=True)
        return tuple(_merge(list(row), rule, copy_state) if is_dataclass(row[0]) else row[0] for row in rows)
    if is_dataclass(first) and not isinstance(first, type):
        return type(first)(
            **{
                item.name: getattr(first, item.name)
                if copy_state and item.name in _STATE
                else _merge([getattr(value, item.name) for value in values], rule, copy_state)
                for item in fields(first)
            }
        )
    number = rule([float(value) for value in values])
    return round(number) if isinstance(first, int) else number
