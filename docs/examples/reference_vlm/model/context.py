"""Context parallelism of the text: the tokens of a sequence on this rank, and the loss over all ranks' tokens.

Without their own layout (see ``row_shard``), encoders run whole on every rank of a context-parallel
group: each rank's backward reaches them through its own tokens, and the sum over the group, which Megatron's gradient
reduction takes anyway, is the gradient.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.attention.shards import zigzag_positions


def check_length(length: int, context_size: int, tensor_size: int) -> None:
    """Check a length; ``tensor_size``: 1 without sequence parallelism."""
    multiple = 2 * context_size * tensor_size
    if context_size > 1 and length % multiple:
        raise ConfigError(
            f"--seq-length {length} cannot be split over --context-parallel-size {context_size}: it must be a multiple "
            f"of {multiple} (2 x context x tensor parallel with sequence parallelism). The next one is "
            f"{-(-length // multiple) * multiple}."
        )


def own_tokens(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the tokens of this rank along ``dim``, Megatron's zigzag; everything without context parallelism."""
    size: int = parallel_state.get_context_parallel_world_size()
    if size == 1:
        return tensor
    positions = zigzag_positions(tensor.shape[dim], size, parallel_state.get_context_parallel_rank())
    return tensor.index_select(dim, torch.tensor(positions, device=tensor.device))


def pack_boundaries(sequence_lengths: torch.Tensor | None, length: int) -> list[int] | None:
    """Return where the texts of a packed row of ``length`` tokens begin and end; padding at its end counts as a
    text. Nothing for rows that are not packed."""
    if sequence_lengths is None:
        return None
    boundaries: list[int] = [0, *sequence_lengths.cumsum(0).tolist()]
    return boundaries if boundaries[-1] == length else [*boundaries, length]


def over_context(total: torch.Tensor, num_tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss sum and number of tokens for a schedule that divides one by the other and averages gradients over all
    ranks.

    The number is that of the whole sequence; the sum is scaled so that the average over the group becomes its sum.
    """
    size: int = parallel_state.get_context_parallel_world_size()
    if size == 1:
        return total, num_tokens
    everyone = num_tokens.clone()
    torch.distributed.all_reduce(everyone, group=parallel_state.get_context_parallel_group())
    return total * size, everyone
