"""Memory for large tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def empty(shape: Sequence[int], dtype: Any) -> Any:
    """Return an uninitialised CPU tensor with its own memory.

    numpy requests huge pages for large allocations, torch only with an environment variable; with small pages a
    conversion spends most of its time on page faults (docs/validation/weights.md).
    """
    import numpy as np
    import torch

    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.from_numpy(np.empty(num_bytes, dtype=np.uint8)).view(dtype).reshape(tuple(shape))


def joined(parts: Sequence[Any], dim: int = 0) -> Any:
    """Return ``torch.cat`` into memory of ``empty``."""
    import torch

    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return torch.cat(list(parts), dim=dim, out=empty(shape, parts[0].dtype))
