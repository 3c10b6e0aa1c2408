"""The sizes of a decoder-only transformer, shared by predictions and operator graphs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DecoderSizes:
    """Counts and widths in elements."""

    num_layers: int
    """Layers of the decoder, without no-op layers."""
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    """Width of an MLP; also of an expert, unless given separately."""
    vocabulary: int
    gated: bool = True
    """Whether the MLP has a gate projection in addition to the up projection."""
    num_experts: int = 0
    topk: int = 0
    """Experts per token."""
    head_size: int = 0
    """Width of a head; 0: hidden / heads."""

    @property
    def head_width(self) -> int:
        """Return the width of one head."""
        return self.head_size or self.hidden // self.heads

    @property
    def query_size(self) -> int:
        """Return the total width of all query heads."""
        return self.heads * self.head_width

    @property
    def kv_size(self) -> int:
        """Return the total width of all key heads, equal to that of the value heads."""
        return self.kv_heads * self.head_width
