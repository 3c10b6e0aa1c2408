"""Which items there are: known without a message when every rank of an encoder replica already holds the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.hetero.adapters.protocol import EncoderAdapter
from mindspeed_autoparallel.runtime.hetero.redistribution.plan import Item

_NUM_FIELDS = 8


def local_items(adapter: EncoderAdapter, batches: Sequence[Any], home: int) -> list[Item]:
    """Items of this rank's microbatches; ``ConfigError`` names the sample whose sizes cannot be."""
    items = []
    for microbatch, batch in enumerate(batches):
        for found in adapter.items(batch):
            if found.input_rows < 1 or found.output_rows < 1:
                raise ConfigError(
                    f"sample {found.sample} of microbatch {microbatch} (data-parallel replica {home}) has an item of "
                    f"{found.input_rows} input and {found.output_rows} output rows; both must be at least 1."
                )
            items.append(Item(home, microbatch, **vars(found)))
    return items


def gather_items(
    items: Sequence[Item], contributes: bool, adapter: EncoderAdapter, group: Any, device: Any
) -> list[Item]:
    """Items of all contributing ranks of ``group``, in rank order: two small all-gathers (counts, then sizes)."""
    mine = list(items) if contributes else []
    width = _NUM_FIELDS + adapter.meta_size
    table = torch.tensor([_row(item) for item in mine], dtype=torch.float64, device=device).reshape(len(mine), width)
    size = torch.distributed.get_world_size(group)
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    torch.distributed.all_gather(counts, torch.tensor([len(mine)], device=device), group=group)
    longest = int(max(int(count) for count in counts))
    if longest == 0:
        return []
    padded = torch.zeros((longest, width), dtype=torch.float64, device=device)
    padded[: len(mine)] = table
    tables = [torch.empty_like(padded) for _ in range(size)]
    torch.distributed.all_gather(tables, padded, group=group)
    return [_item(row) for count, rows in zip(counts, tables, strict=True) for row in rows[: int(count)].tolist()]


def _row(item: Item) -> list[float]:
    first = -1 if item.first_token is None else item.first_token
    sizes = (item.home, item.microbatch, item.sample, item.input_rows, item.output_rows, first, item.num_tokens)
    return [*sizes, item.cost, *item.meta]


def _item(row: list[float]) -> Item:
    home, microbatch, sample, inputs, outputs, first, num_tokens = (int(value) for value in row[: _NUM_FIELDS - 1])
    meta = tuple(int(value) for value in row[_NUM_FIELDS:])
    place = None if first < 0 else first
    return Item(home, microbatch, sample, inputs, outputs, row[_NUM_FIELDS - 1], meta, place, num_tokens)
