"""Layouts that could not be traced, reported once per reason."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.profiles.records import TraceResult


def tell_untraced(
    failed: Collection[MeasuredAt], measured: Collection[MeasuredAt], found: Mapping[MeasuredAt, TraceResult]
) -> tuple[list[str], dict[str, str]]:
    """Return notes on layouts that were measured in place of a trace, and of the others ``{layouts: reason}``.

    ``failed``: layouts without a trace; ``found``: the message of tracing for each.
    """
    groups: defaultdict[tuple[bool, str], list[str]] = defaultdict(list)
    for point in failed:
        groups[point in measured, found[point].summary].append(point.label())
    notes, left_out = [], {}
    for (whole, reason), labels in groups.items():
        names = _names(labels)
        if whole:
            notes.append(f"{names} could not be traced and {_were(labels)} measured whole: {reason}")
        else:
            left_out[names] = f"could neither be traced nor be measured whole on the measuring devices: {reason}"
    return notes, left_out


def tell_refused(refused: Mapping[MeasuredAt, TraceResult]) -> dict[str, str]:
    """Return ``{layouts: reason}`` of layouts that Megatron itself does not take."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for point, result in refused.items():
        groups[result.summary].append(point.label())
    return {_names(labels): f"Megatron refuses it: {reason}" for reason, labels in groups.items()}


def _names(labels: list[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{len(labels)} layouts ({labels[0]} to {labels[-1]})"


def _were(labels: list[str]) -> str:
    return "was" if len(labels) == 1 else "were"
