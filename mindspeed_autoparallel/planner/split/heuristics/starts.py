"""Starting points of local search: simple splits, even in time or in layers, with or without lighter ends."""

from __future__ import annotations

import numpy

from mindspeed_autoparallel.planner.split.model.layer_row import LayerRow
from mindspeed_autoparallel.planner.split.model.recompute_choice import Array
from mindspeed_autoparallel.planner.split.settings import SETTINGS


def simple_splits(row: LayerRow) -> Array:
    """Return the boundaries of distinct splits, ``[split, num_virtual + 1]``; those even in time first."""
    problem = row.problem
    work = (row.forward + row.backward).astype(float) + 1e-3 * numpy.arange(row.num_layers + 1)
    found: list[Array] = []
    weights: list[Array] = [work, numpy.arange(row.num_layers + 1).astype(float)]
    for weight in weights:
        for lighter in SETTINGS.starts_lighter_ends if problem.num_chunks > 1 else SETTINGS.starts_lighter_ends[:1]:
            share = numpy.ones(problem.num_virtual)
            share[-problem.num_stages :] *= 1 - lighter
            share[: problem.num_stages] *= 1 - lighter / 2
            found.append(row.even(weight, share))
    splits: Array = numpy.array([*found, *_whole_layers(row)])
    _, first = numpy.unique(splits, axis=0, return_index=True)
    splits = splits[numpy.sort(first)]
    return splits[row.is_cut(splits)]


def _whole_layers(row: LayerRow) -> list[Array]:
    """Return splits as recipes use them: equal layers per virtual stage, some with one more, the ends with fewer."""
    num = row.problem.num_virtual
    lead, trail = _blocks(row, forwards=True), _blocks(row, forwards=False)
    layers = row.num_layers - lead - trail
    if layers < num:
        return []
    found: list[Array] = []
    for first in SETTINGS.starts_fewer_first:
        for last in SETTINGS.starts_fewer_last:
            base, more = divmod(layers + first + last, num)
            inner = numpy.arange(1, max(2, num - 1))
            spread = inner[numpy.linspace(0, len(inner) - 1, min(more, len(inner))).astype(int)]
            for places in (inner[:more], inner[-more:] if more else inner[:0], spread):
                counts = numpy.full(num, base)
                counts[places] += 1
                counts[0] -= first
                counts[-1] += layers - counts.sum()
                ends = numpy.concatenate([[0], lead + numpy.cumsum(counts)])
                ends[-1] = row.num_layers
                if (counts >= 0).all():
                    found.append(ends)
    return found


def _blocks(row: LayerRow, *, forwards: bool) -> int:
    """Return the number of layers in short runs (embedding, loss) at one end of the row."""
    sizes = [s.num_layers for s in row.problem.segments if s.beside is None]
    total = 0
    for size in sizes if forwards else reversed(sizes):
        if size > SETTINGS.starts_short:
            return total
        total += size
    return 0
