"""Communication between ranks: rows, by one all-to-all-v per plan, and items, by an all-gather per group and step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.hetero.adapters.protocol import ItemAdapter
from mindspeed_autoparallel.runtime.hetero.redistribution.placement import Item
from mindspeed_autoparallel.runtime.hetero.redistribution.plan import Piece

Arrived = list[tuple[Piece, torch.Tensor]]

_NUM_FIELDS = 8


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
    """Kept alive for the transfer: an accelerator reads it asynchronously."""


class AllToAll:
    """All-to-all-v among ``ranks`` (their process group); own rows are copied, not sent."""

    def __init__(self, ranks: Sequence[int], group: Any, rank: int) -> None:
        self._ranks, self._group, self._rank = list(ranks), group, rank
        self._place = {r: place for place, r in enumerate(ranks)}
        self.moved = BytesMoved()
        self.seconds = 0.0
        """Seconds this process spent packing, sending and waiting."""

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
        """Start sending this rank's rows; ``Transfer.finish`` returns the incoming pieces with their rows
        ``[stop - start, *row_shape]`` in the plan's order. ``rows_of`` returns the rows this rank sends.

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
            # Always in the plan's order, so that sums over pieces are reproducible.
            result = sorted([*own, *zip(by_source, parts, strict=True)], key=lambda pair: pair[0])
            self.seconds += time.perf_counter() - waiting
            return result

        return Transfer(finish, send)


def local_items(adapter: ItemAdapter, batches: Sequence[Any], replica: int) -> list[Item]:
    """Return the items of this rank's microbatches; ``ConfigError`` names a sample that has an item without rows."""
    items = []
    for microbatch, batch in enumerate(batches):
        for found in adapter.items(batch):
            if found.input_rows < 1 or found.output_rows < 1:
                raise ConfigError(
                    f"sample {found.sample} of microbatch {microbatch} (data-parallel replica {replica}) has an item "
                    f"of {found.input_rows} input and {found.output_rows} output rows; both must be at least 1."
                )
            items.append(Item(**vars(found), dp_replica=replica, microbatch=microbatch))
    return items


def items_of_replicas(own: Sequence[Item], replicas: Sequence[int]) -> list[Item]:
    """Return the items of all ``replicas`` for a rank that runs alone: its own, repeated for each replica."""
    return [replace(item, dp_replica=replica) for replica in replicas for item in own]


class ItemGather:
    """Gathers the items of all encoders that exchange in ``group`` on its ranks, usually by one all-gather a step.

    Ranks have different numbers of items. The message has a fixed capacity, which grows when a step needs more: every
    rank detects this from the received sizes, and that step takes a second all-gather.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._size = torch.distributed.get_world_size(group)
        self._room = 256

    def gather(self, mine: Sequence[Sequence[Item]], meta_sizes: Sequence[int], device: Any) -> list[list[Item]]:
        """Return per encoder the items of all ranks, in rank order. ``mine``: per encoder the items this rank
        contributes; ``meta_sizes``: length of their ``meta``."""
        numbers = [float(len(items)) for items in mine]
        numbers += [number for items in mine for item in items for number in _row(item)]
        received = self._exchange([len(numbers), *numbers], device)
        longest = max(int(row[0]) for row in received)
        if longest >= self._room:
            self._room = 1 << longest.bit_length()
            received = self._exchange([len(numbers), *numbers], device)
        everyones: list[list[Item]] = [[] for _ in mine]
        for row in received:
            start = 1 + len(mine)
            for number, meta_size in enumerate(meta_sizes):
                for _ in range(int(row[1 + number])):
                    stop = start + _NUM_FIELDS + meta_size
                    everyones[number].append(_item(row[start:stop]))
                    start = stop
        return everyones

    def _exchange(self, numbers: list[float], device: Any) -> list[list[float]]:
        """Return every rank's ``numbers``, cut to the capacity; the first of each is their count."""
        fitting = numbers[: self._room]
        message = torch.tensor(fitting + [0.0] * (self._room - len(fitting)), dtype=torch.float64, device=device)
        received = torch.empty(self._size * self._room, dtype=torch.float64, device=device)
        torch.distributed.all_gather_into_tensor(received, message, group=self._group)
        rows: list[list[float]] = received.view(self._size, self._room).tolist()
        return rows


def _row(item: Item) -> list[float]:
    first = -1 if item.first_token is None else item.first_token
    sizes = (item.dp_replica, item.microbatch, item.sample, item.input_rows, item.output_rows, first, item.num_tokens)
    return [*sizes, item.cost, *item.meta]


def _item(row: list[float]) -> Item:
    replica, microbatch, sample, inputs, outputs, first, num_tokens = (int(value) for value in row[: _NUM_FIELDS - 1])
    meta = tuple(int(value) for value in row[_NUM_FIELDS:])
    place = None if first < 0 else first
    local = (sample, inputs, outputs, row[_NUM_FIELDS - 1], meta, place, num_tokens)
    return Item(*local, dp_replica=replica, microbatch=microbatch)
