"""Splits that a Megatron without layout strings runs, each with the flags for it: searched and applied from one list.

A row has the layers of every virtual stage, in the order of the chain; no stage is empty.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from mindspeed_autoparallel.errors import PlanError
from mindspeed_autoparallel.planner.candidate import Layers
from mindspeed_autoparallel.spec import Layout

FIRST_ARGUMENT, LAST_ARGUMENT = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
EMBEDDING_ARGUMENT, LOSS_ARGUMENT = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
"""Switches that count embedding or loss as a layer of an even split: the first or last stage gets one less."""
CHUNKS_ARGUMENT = "num_virtual_stages_per_pipeline_rank"
CHUNK_SIZE_ARGUMENT = "num_layers_per_virtual_pipeline_stage"

Arguments = dict[str, int | str | None]
"""Megatron's destinations and values."""


def rows_by_flags(num_layers: int, width: int, chunks: int) -> Iterator[tuple[tuple[int, ...], Arguments]]:
    """Yield every row of ``num_layers`` layers on ``width`` pipeline ranks with ``chunks`` virtual stages each.

    Without virtual stages the first and the last stage may differ, and those between are alike. With them, all stages
    are alike, or a layer less is on the first, the last or both; or the chunks of every rank are alike.
    """
    if chunks == 1:
        for row in _uneven_ends(num_layers, width):
            yield row, _end_arguments(row) if len(set(row)) > 1 else {}
        return
    stages = width * chunks
    for less_first, less_last in itertools.product((0, 1), repeat=2):
        each, rest = divmod(num_layers + less_first + less_last, stages)
        row = (each - less_first, *(each,) * (stages - 2), each - less_last)
        if not rest and min(row) > 0:
            ends = {EMBEDDING_ARGUMENT: less_first, LOSS_ARGUMENT: less_last}
            yield row, {CHUNK_SIZE_ARGUMENT: each, **{name: True for name, less in ends.items() if less}}
    if num_layers % chunks == 0:
        for of_rank in _uneven_ends(num_layers // chunks, width):
            if len(set(of_rank)) > 1:
                ends_of_rank = _end_arguments([chunks * count for count in of_rank])
                yield of_rank * chunks, {CHUNKS_ARGUMENT: chunks, **ends_of_rank}


def _uneven_ends(num_layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    if stages == 1:
        yield (num_layers,)
    elif stages == 2:
        yield from ((first, num_layers - first) for first in range(1, num_layers))
    else:
        for between in range(1, (num_layers - 2) // (stages - 2) + 1):
            rest = num_layers - between * (stages - 2)
            yield from ((first, *(between,) * (stages - 2), rest - first) for first in range(1, rest))


def _end_arguments(counts: Sequence[int]) -> Arguments:
    """Return the flags for the first and the last rank's layers."""
    # Megatron distributes the remaining layers over the remaining ranks; at least one must remain.
    last: Arguments = {LAST_ARGUMENT: counts[-1]} if len(counts) > 2 else {}
    return {FIRST_ARGUMENT: counts[0], **last}


def arguments_of_row(counts: Sequence[int], width: int, chunks: int) -> Arguments:
    """Return the flags for the row ``counts``; ``PlanError`` if none express it.

    ``width``: pipeline ranks; ``chunks``: virtual stages of each.
    """
    for row, arguments in rows_by_flags(sum(counts), width, chunks):
        if row == tuple(counts):
            return arguments
    raise PlanError(
        f"the plan has {list(counts)} layers on its stages, and this Megatron has no "
        "--pipeline-model-parallel-layout to run that with: its first and last stage may differ, those between may "
        "not. Search the plan again with it, or use megatron-core 0.13 or newer."
    )


def rows_of_two_models(layout: Layout, num_layers: Mapping[str, int]) -> Layers | None:
    """Return the only split of Megatron's pretrain_vlm.py, if it exists: the vision model supports no virtual stages.

    ``num_layers``: layers of every encoder, then of the decoder. Encoders are on the first stage.
    """
    *encoders, decoder = num_layers
    stages = layout.pipeline_size
    if layout.virtual_size > 1 or num_layers[decoder] % stages:
        return None
    first = {name: (num_layers[name], *(0,) * (stages - 1)) for name in encoders}
    return {**first, decoder: (num_layers[decoder] // stages,) * stages}
