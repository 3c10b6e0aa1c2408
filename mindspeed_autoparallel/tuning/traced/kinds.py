"""Layers of several kinds in one stack, made into the mean layer that the planner places."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MEAN = ("forward_us", "backward_us", "saved_bytes", "output_bytes")
_HIGHEST = ("forward_peak_bytes", "backward_peak_bytes")
"""A transient is not spread over layers: the mean layer has that of the worst."""


def merged(result: Mapping[str, Any]) -> dict[str, Any]:
    """``result`` (a trace with times, or a measurement) with one block ``layer`` per module.

    Kinds count by ``layer_shares``, their shares of the whole model, or as the measured layers are mixed.
    """
    return {**result, "modules": [_module(module) for module in result["modules"]]}


def _module(module: Mapping[str, Any]) -> Mapping[str, Any]:
    shares = module.get("layer_shares") or _mixed(module["layers"])
    if len(shares) == 1:
        return module
    blocks = {name: block for name, block in module["blocks"].items() if name not in shares}
    return {**module, "blocks": {**blocks, "layer": _mean(module["blocks"], shares)}}


def _mixed(layers: Mapping[str, int]) -> dict[str, float]:
    total = sum(layers.values())
    return {name: count / total for name, count in layers.items()}


def _mean(blocks: Mapping[str, Any], shares: Mapping[str, float]) -> dict[str, Any]:
    known = next(iter(blocks.values()))
    values: dict[str, Any] = {
        key: sum(share * blocks[name][key] for name, share in shares.items()) for key in _MEAN if key in known
    }
    values |= {key: max(blocks[name][key] for name in shares) for key in _HIGHEST}
    parameters = {
        kind: {
            key: round(sum(share * blocks[name]["parameters"][kind][key] for name, share in shares.items()))
            for key in counts
        }
        for kind, counts in known["parameters"].items()
    }
    return {**values, "parameters": parameters}
