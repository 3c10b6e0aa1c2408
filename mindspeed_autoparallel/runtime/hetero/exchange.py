"""Rows travel by plan: one all-to-all-v, nothing padded, bytes counted, waiting left to who needs the rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_autoparallel.runtime.hetero.redistribution.plan import Piece

Arrived = list[tuple[Piece, torch.Tensor]]


@dataclass
class BytesMoved:
    """Bytes this rank received from others, by kind of transfer."""

    inputs: int = 0
    outputs: int = 0
    gradients: int = 0

    def reset(self) -> None:
        self.inputs = self.outputs = self.gradients = 0


@dataclass
class Transfer:
    """Rows on their way to this rank; ``finish`` waits for them."""

    finish: Callable[[], Arrived]
    sent: torch.Tensor | None = None
    """Lives as long as the transfer: an accelerator reads it while the host is elsewhere."""


class AllToAll:
    """All-to-all-v among ``ranks`` (a process group of theirs); own rows are copied, not sent."""

    def __init__(self, ranks: Sequence[int], group: Any, rank: int) -> None:
        self._ranks, self._group, self._rank = list(ranks), group, rank
        self._place = {r: place for place, r in enumerate(ranks)}
        self.moved = BytesMoved()
        self.seconds = 0.0
        """Time the host spent packing, sending and waiting."""

    def start(
        self,
        pieces: Sequence[Piece],
        rows_of: Callable[[Piece], torch.Tensor],
        *,
        row_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: Any,
        kind: str,
    ) -> Transfer:
        """Send what this rank has for others and go on; ``Transfer.finish`` gives this rank's incoming pieces with
        their rows ``[stop - start, *row_shape]`` in the plan's order. ``rows_of`` gives the rows this rank sends.

        Collective over the group; transfers of one exchange are started, and finished, in the same order everywhere.
        """
        started = time.perf_counter()
        own = [(p, rows_of(p)) for p in pieces if p.source == self._rank == p.target]
        if len(self._ranks) == 1 or not any(p.source != p.target for p in pieces):
            return Transfer(lambda: own)
        out = [p for p in pieces if p.source == self._rank != p.target]
        incoming = [p for p in pieces if p.target == self._rank != p.source]
        send_counts, receive_counts = [0] * len(self._ranks), [0] * len(self._ranks)
        for p in out:
            send_counts[self._place[p.target]] += p.stop - p.start
        for p in incoming:
            receive_counts[self._place[p.source]] += p.stop - p.start
        sent = [rows_of(p).to(dtype) for p in sorted(out, key=lambda p: (self._place[p.target], p))]
        send = torch.cat(sent) if sent else torch.empty((0, *row_shape), dtype=dtype, device=device)
        received = torch.empty((sum(receive_counts), *row_shape), dtype=dtype, device=device)
        send = send.contiguous()
        work = torch.distributed.all_to_all_single(
            received, send, receive_counts, send_counts, group=self._group, async_op=True
        )
        setattr(self.moved, kind, getattr(self.moved, kind) + received.numel() * received.element_size())
        self.seconds += time.perf_counter() - started

        def finish() -> Arrived:
            waiting = time.perf_counter()
            work.wait()
            by_source = sorted(incoming, key=lambda p: (self._place[p.source], p))
            parts = torch.split(received, [p.stop - p.start for p in by_source])
            # The order of the plan, the same whatever travelled: sums over pieces are reproducible.
            result = sorted([*own, *zip(by_source, parts, strict=True)], key=lambda pair: pair[0])
            self.seconds += time.perf_counter() - waiting
            return result

        return Transfer(finish, send)
