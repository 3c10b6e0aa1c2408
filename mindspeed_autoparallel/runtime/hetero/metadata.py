"""Which items there are: known without a message when every rank of an encoder replica already holds the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.hetero.adapters.protocol import EncoderAdapter
from mindspeed_autoparallel.runtime.hetero.redistribution.plan import Item

_FIELDS = 6


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
            items.append(
                Item(home, microbatch, found.sample, found.input_rows, found.output_rows, found.cost, found.meta)
            )
    return items


def gather_items(
    items: Sequence[Item], contributes: bool, adapter: EncoderAdapter, group: Any, device: Any
) -> list[Item]:
    """Items of all contributing ranks of ``group``, in rank order: two small all-gathers (counts, then sizes)."""
    mine = list(items) if contributes else []
    table = torch.tensor(
        [[i.home, i.microbatch, i.sample, i.input_rows, i.output_rows, i.cost, *i.meta] for i in mine],
        dtype=torch.float64,
        device=device,
    ).reshape(len(mine), _FIELDS + adapter.meta_size)
    size = torch.distributed.get_world_size(group)
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    torch.distributed.all_gather(counts, torch.tensor([len(mine)], device=device), group=group)
    longest = int(max(int(count) for count in counts))
    if longest == 0:
        return []
    padded = torch.zeros((longest, table.shape[1]), dtype=torch.float64, device=device)
    padded[: len(mine)] = table
    tables = [torch.empty_like(padded) for _ in range(size)]
    torch.distributed.all_gather(tables, padded, group=group)
    gathered = []
    for count, rows in zip(counts, tables, strict=True):
        for row in rows[: int(count)].tolist():
            home, microbatch, sample, inputs, outputs = (int(value) for value in row[:5])
            meta = tuple(int(value) for value in row[_FIELDS:])
            gathered.append(Item(home, microbatch, sample, inputs, outputs, row[5], meta))
    return gathered
