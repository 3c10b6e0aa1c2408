"""Communication and transfers that hide behind computing if a switch enables it. Formulas O1-O4."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_autoparallel.cost.placed import PlacedBlock


def layer_saving_us(ahead: PlacedBlock, behind: PlacedBlock) -> float:
    """Return O2: the time that the forward of ``ahead`` and the backward of ``behind`` save side by side.

    Each direction's exchange of tokens between experts hides behind the other's computing, as Megatron's combined 1F1B
    pairs layers.
    """
    forward_us, backward_us = ahead.cost.forward_us, behind.cost.backward_us
    sent_us = min(forward_us, ahead.cost.forward_exchange_us)
    returned_us = min(backward_us, behind.cost.backward_exchange_us)
    return min(sent_us, backward_us - returned_us) + min(returned_us, forward_us - sent_us)


def pair_saving_us(ahead: Sequence[PlacedBlock], behind: Sequence[PlacedBlock]) -> float:
    """Return the time that the forward of one chunk and the backward of another save side by side.

    The first layer of ``ahead`` runs beside the last of ``behind`` and so on; layers left over, embedding and output
    layer run alone (Megatron's ``TransformerModelChunkSchedulePlan.run``).
    """
    forwards = [block for block in ahead if block.is_layer]
    backwards = [block for block in reversed(behind) if block.is_layer]
    return sum(layer_saving_us(*pair) for pair in zip(forwards, backwards, strict=False))


def pair_savings_us(stages: Sequence[Sequence[PlacedBlock]], num_stages: int) -> dict[tuple[int, int], float]:
    """Return ``pair_saving_us`` of every two chunks of a rank, by virtual stage of the forward and of the backward."""
    return {
        (v, w): pair_saving_us(stages[v], stages[w])
        for v in range(len(stages))
        for w in range(v % num_stages, len(stages), num_stages)
    }


def pipelined_saving_us(computing_us: float, moving_us: float, num_chunks: int) -> float:
    """Return O1, the time saved by cutting a matrix product and its collective into chunks that pass each other.

    Two stations in a row take ``longer + shorter / n`` in place of their sum (Wang et al. 2023, "Overlap communication
    with dependent computation via decomposition", ASPLOS; Transformer Engine's ring exchange sends a shard at a time).
    """
    return min(computing_us, moving_us) * (1 - 1 / num_chunks)


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Sizes of a layer's tensors on one rank, in elements of one microbatch."""

    query: int
    """All query heads of the rank; the attention's output is as large."""
    key_value: int
    """All key heads of the rank; the value heads are as large."""
    expert_input: int = 0
    """Tokens that the rank's experts get, with their hidden states."""
    expert_hidden: int = 0
    """Output of the experts' first product, gate and value."""
    element_bytes: int = 2


ATTENTION = ("core_attn", "attn_proj")
EXPERTS = ("expert_fc1", "moe_act")
_LEAST_ELEMENTS = 1024 * 1024
"""Smaller tensors stay on the device (Megatron's ``min_offloaded_tensor_size``)."""


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Bytes of one layer and microbatch."""

    moved_bytes: int
    """Over the host link, each way."""
    freed_bytes: int
    """On the device, from the copy's end until the layer's backward."""


def offloaded(shape: LayerShape, modules: Sequence[str]) -> Offload:
    """Return O3 for ``modules`` of ``--offload-modules``: what these parts of a layer save.

    Core attention saves query, key, value and its output; the projection saves that output again: it is moved twice and
    freed once, and only if both are chosen. The norms and the projection before attention are not modelled: which
    tensors they save depends on whether the two are fused.
    """
    parts = {
        "core_attn": [shape.query, shape.key_value, shape.key_value, shape.query],
        "attn_proj": [shape.query],
        "expert_fc1": [shape.expert_input],
        "moe_act": [shape.expert_hidden],
    }
    moved = sum(size for name in modules for size in parts[name] if size >= _LEAST_ELEMENTS)
    shared = shape.query if "core_attn" in modules and shape.query >= _LEAST_ELEMENTS else 0
    return Offload(moved_bytes=moved * shape.element_bytes, freed_bytes=(moved - shared) * shape.element_bytes)


@functools.lru_cache
def sent_once_share(num_experts_per_token: int, num_destinations: int, in_order_of: int = 0) -> float:
    """Return O4, the share of a token's copies that are sent if copies to one destination are sent once.

    With routing at random ``n (1 - (1 - 1/n)^k)`` of ``n`` destinations get a token that goes to ``k`` experts.
    Destinations are nodes if the group spans several, else ranks, as DeepEP forwards tokens inside a node.
    ``in_order_of``: the number of experts, which a gate of benchmarks gives to tokens in turn; 0: random routing.
    """
    if in_order_of:
        each, chosen = in_order_of // num_destinations, range(num_experts_per_token)
        found = [
            len({(token * len(chosen) + one) % in_order_of // each for one in chosen}) for token in range(in_order_of)
        ]
        return sum(found) / in_order_of / num_experts_per_token
    reached = num_destinations * (1 - (1 - 1 / num_destinations) ** num_experts_per_token)
    return min(1.0, reached / num_experts_per_token)
