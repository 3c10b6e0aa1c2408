"""Which items there are: known without a message when every rank of an encoder replica already holds the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.hetero.adapters.protocol import ItemAdapter
from mindspeed_autoparallel.runtime.hetero.redistribution.items import Item

_NUM_FIELDS = 8


def local_items(adapter: ItemAdapter, batches: Sequence[Any], replica: int) -> list[Item]:
    """Return items of this rank's microbatches; ``ConfigError`` names the sample whose sizes cannot be."""
    items = []
    for microbatch, batch in enumerate(batches):
        for found in adapter.items(batch):
            if found.input_rows < 1 or found.output_rows < 1:
                raise ConfigError(
                    f"sample {found.sample} of microbatch {microbatch} (data-parallel replica {replica}) has an item "
                    f"of {found.input_rows} input and {found.output_rows} output rows; both must be at least 1."
                )
            items.append(Item(replica, microbatch, **vars(found)))
    return items


def items_of_replicas(own: Sequence[Item], replicas: Sequence[int]) -> list[Item]:
    """Return what a rank that plays alone takes for the items of all ``replicas``: its own, in each of them."""
    return [replace(item, dp_replica=replica) for replica in replicas for item in own]


class ItemGather:
    """Tells every rank of ``group`` the items of all encoders that exchange in it: one all-gather a step.

    Ranks have different numbers of items. The message has room for so many numbers, and grows when a step needs more:
    such a step, which every rank recognises by the sizes it got, takes a second all-gather.
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
        """Return as much of every rank's ``numbers`` as fits; the first is their count."""
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
    return Item(replica, microbatch, sample, inputs, outputs, row[_NUM_FIELDS - 1], meta, place, num_tokens)
