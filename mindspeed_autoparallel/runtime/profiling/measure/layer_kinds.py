"""Layers of one stack that differ in kind, as dense ones before those with experts do: the first few show all kinds."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

MIN_LAYERS = 2
"""Of a reduced model: with one layer, what happens between layers would not be seen."""
_BY_LAYER = ("moe_layer_freq", "window_attn_skip_freq", "linear_attention_freq", "no_rope_freq")
"""Arguments of Megatron that may list a choice per layer."""


def kinds_of(layers: Sequence[Any]) -> tuple[int, ...]:
    """Return the kind of every layer, numbered in the order they appear, by classes of submodules and shapes of
    parameters."""
    numbers: dict[Any, int] = {}
    return tuple(numbers.setdefault(_structure(layer), len(numbers)) for layer in layers)


def fewest_layers(kinds: Sequence[int]) -> int:
    """Return length of the shortest beginning that shows every kind."""
    return max(MIN_LAYERS, *(kinds.index(kind) + 1 for kind in set(kinds)))


def choices_by_layer(arguments: argparse.Namespace) -> dict[str, list[Any]]:
    """Return the lists of choices per layer among Megatron's arguments."""
    return {name: value for name in _BY_LAYER if isinstance(value := getattr(arguments, name, None), list)}


def shorten(arguments: argparse.Namespace, num_layers: int, choices: Mapping[str, list[Any]] | None = None) -> None:
    """Keep the first ``num_layers`` layers alone in Megatron's arguments; longer lists of choices per layer are cut.

    ``choices``: the whole lists, where ``arguments`` were shortened before.
    """
    for name, value in (choices_by_layer(arguments) if choices is None else choices).items():
        setattr(arguments, name, value[:num_layers])
    arguments.num_layers = num_layers
    for name in ("encoder_num_layers", "decoder_num_layers"):  # of a host with two models
        if getattr(arguments, name, None) is not None:
            setattr(arguments, name, num_layers)


def _structure(layer: Any) -> Any:
    return (
        tuple((name, type(module).__name__) for name, module in layer.named_modules()),
        tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters()),
    )
