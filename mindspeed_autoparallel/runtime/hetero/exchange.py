"""Rows travel by plan: one all-to-all-v, nothing padded, bytes counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_autoparallel.runtime.hetero.redistribution.plan import Piece


@dataclass
class BytesMoved:
    """Bytes this rank received from others, by kind of transfer."""

    inputs: int = 0
    outputs: int = 0
    gradients: int = 0

    def reset(self) -> None:
        self.inputs = self.outputs = self.gradients = 0


class Exchange:
    """All-to-all-v among ``ranks`` (a process group of theirs); own rows are copied, not sent."""

    def __init__(self, ranks: Sequence[int], group: Any, rank: int) -> None:
        self._ranks, self._group, self._rank = list(ranks), group, rank
        self.moved = BytesMoved()

    def move(
        self,
        pieces: Sequence[Piece],
        rows_of: Callable[[Piece], torch.Tensor],
        *,
        row_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: Any,
        kind: str,
    ) -> list[tuple[Piece, torch.Tensor]]:
        """This rank's incoming pieces with their rows, in the plan's order; ``rows_of`` gives the rows this rank sends.

        Collective over the group. Rows are ``[stop - start, *row_shape]``.
        """
        own = [p for p in pieces if p.source == self._rank == p.target]
        out = [p for p in pieces if p.source == self._rank != p.target]
        incoming = [p for p in pieces if p.target == self._rank != p.source]
        if len(self._ranks) == 1 or not any(p.source != p.target for p in pieces):
            return [(p, rows_of(p)) for p in own]
        send_counts = [sum(p.stop - p.start for p in out if p.target == r) for r in self._ranks]
        receive_counts = [sum(p.stop - p.start for p in incoming if p.source == r) for r in self._ranks]
        by_target = sorted(out, key=lambda p: (self._ranks.index(p.target), p))
        sent = [rows_of(p).to(dtype) for p in by_target]
        send = torch.cat(sent) if sent else torch.empty((0, *row_shape), dtype=dtype, device=device)
        received = torch.empty((sum(receive_counts), *row_shape), dtype=dtype, device=device)
        torch.distributed.all_to_all_single(received, send.contiguous(), receive_counts, send_counts, group=self._group)
        setattr(self.moved, kind, getattr(self.moved, kind) + received.numel() * received.element_size())
        result = [(p, rows_of(p)) for p in own]
        start = 0
        for piece in sorted(incoming, key=lambda p: (self._ranks.index(p.source), p)):
            stop = start + piece.stop - piece.start
            result.append((piece, received[start:stop]))
            start = stop
        # The order of the plan, the same whatever travelled: sums over pieces are reproducible.
        return sorted(result, key=lambda pair: pair[0])
