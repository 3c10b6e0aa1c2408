"""A block on a stage, the ranks that hold the same state, and layers recomputed in groups (formula M8)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from mindspeed_autoparallel.profiles import BlockCost, RecomputeCost, SharedBytes, StateBytes
from mindspeed_autoparallel.spec import Layout


def grouped_layer(layer: BlockCost, place: int, size: int) -> BlockCost:
    """Return ``layer`` as number ``place`` (from 0) of a group of ``size``, with new costs of ``full``.

    The tensor that the group passes on is kept, those between its layers are not. The group's backward recomputes all
    of its layers before the first of them runs backward, so the last layer's transient holds the activations of all.
    """
    plain, full = layer.recompute["none"], layer.recompute["full"]
    kept = full.saved_bytes if place == size - 1 else 0
    handed_in = full.saved_bytes if place else 0
    again = plain.saved_bytes * (place + 1) - kept
    cost = RecomputeCost(
        saved_bytes=kept,
        extra_backward_us=full.extra_backward_us,
        forward_peak_bytes=handed_in + full.forward_peak_bytes + full.saved_bytes - kept,
        backward_peak_bytes=again + max(plain.backward_peak_bytes, plain.forward_peak_bytes),
    )
    return replace(layer, recompute={**layer.recompute, "full": cost})


@dataclass(frozen=True, kw_only=True)
class PlacedBlock:
    """A block on a stage, with the recompute kind it runs under."""

    name: str
    """``text_decoder layer 13``, ``image_encoder pre``: for messages."""
    cost: BlockCost
    kind: str = "none"
    side: SharedBytes = field(default_factory=SharedBytes)
    """Of the block's module."""

    @cached_property
    def module(self) -> str:
        """Return the first word of the name."""
        return self.name.split()[0]

    @property
    def is_layer(self) -> bool:
        """Return whether it is a layer, and not the part before or after its module's layers."""
        return not self.name.endswith((" pre", " post"))

    @property
    def recompute(self) -> RecomputeCost:
        """Return the costs under the block's recompute kind."""
        return self.cost.recompute[self.kind]


def states_of(blocks: Sequence[PlacedBlock], layout: Layout) -> Iterator[tuple[StateBytes, int]]:
    """Yield each block's states and how many ranks hold the same: dense over DP x CP, expert over its own group."""
    dense_replicas, expert_replicas = layout.data_size * layout.context_size, layout.expert_replicas
    for block in blocks:
        yield block.cost.dense, dense_replicas
        yield block.cost.expert, expert_replicas
