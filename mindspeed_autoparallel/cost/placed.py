"""A block on a stage, and the ranks that hold the same state as it."""

from __future__ import annotations

from dataclasses import dataclass, field

from mindspeed_autoparallel.profiles import BlockCost, RecomputeCost, SharedBytes, StateBytes
from mindspeed_autoparallel.spec import Layout


@dataclass(frozen=True, kw_only=True)
class PlacedBlock:
    """A block on a stage, with the recompute kind it runs under."""

    name: str
    """``text_decoder layer 13``, ``image_encoder pre``: for messages."""
    cost: BlockCost
    kind: str = "none"
    side: SharedBytes = field(default_factory=SharedBytes)
    """Of the block's module."""

    @property
    def module(self) -> str:
        """Return the first word of the name."""
        return self.name.split()[0]

    @property
    def is_layer(self) -> bool:
        """Return whether it is a layer, and not what its module has before or behind its layers."""
        return not self.name.endswith((" pre", " post"))

    @property
    def recompute(self) -> RecomputeCost:
        """Return what the chosen kind keeps and adds."""
        return self.cost.recompute[self.kind]


def replicas_of(block: PlacedBlock, layout: Layout) -> tuple[tuple[StateBytes, int], tuple[StateBytes, int]]:
    """Return the block's state and how many ranks hold the same: dense over DP x CP, expert over its own group."""
    replicas = layout.data_size * layout.context_size
    return (block.cost.dense, replicas), (block.cost.expert, layout.expert_replicas)
