"""Layer norms of the reference model: torch's own, on any device, marked for sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch


class Norm:
    """Builds the norm that ``config.normalization`` names. Megatron's specs call it like one of its norm classes.

    Megatron's own stand-in refuses sequence parallelism; the norm itself works with it, as long as its
    parameters are marked for a sum of gradients over the tensor-parallel ranks.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> Any:
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm
