"""The tensors of a distributed checkpoint as torch itself reads them, without a process group."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def stored_tensors(folder: Path) -> dict[str, Any]:
    """Return key -> whole tensor of ``folder`` (``iter_*`` or ``release``), random states left out."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    described = FileSystemReader(folder).read_metadata().state_dict_metadata
    kinds = {name: one for name, one in described.items() if isinstance(one, TensorStorageMetadata)}
    state = {name: torch.zeros(one.size, dtype=one.properties.dtype) for name, one in kinds.items()}
    load(state, checkpoint_id=folder, no_dist=True)
    return {name: tensor for name, tensor in state.items() if "rng_state" not in name}
