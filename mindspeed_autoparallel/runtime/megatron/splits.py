"""The script's own split of layers over stages, and those that the host can run: not every release supports all."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import replace

from mindspeed_autoparallel.planner.candidate import Layers, Splits
from mindspeed_autoparallel.runtime.megatron.description import Description, is_llava
from mindspeed_autoparallel.runtime.megatron.layout_arguments import (
    CHUNKS_ARGUMENT,
    EMBEDDING_ARGUMENT,
    FIRST_ARGUMENT,
    LAST_ARGUMENT,
    LOSS_ARGUMENT,
    RECOMPUTE_ARGUMENTS,
)
from mindspeed_autoparallel.runtime.megatron.mindspeed import (
    LAYOUT_ARGUMENT,
    LIST_ARGUMENT,
    is_mindspeed_llm,
    takes_layout_strings,
)
from mindspeed_autoparallel.spec import Layout
from mindspeed_autoparallel.spec.model import GENERATOR

VIRTUAL_ARGUMENTS = ("num_layers_per_virtual_pipeline_stage", CHUNKS_ARGUMENT)
SPLIT_ARGUMENTS = (LAYOUT_ARGUMENT, LIST_ARGUMENT, FIRST_ARGUMENT, LAST_ARGUMENT, EMBEDDING_ARGUMENT, LOSS_ARGUMENT)
"""Arguments for the layers of every stage, which a plan replaces."""


def clear_stages(arguments: argparse.Namespace) -> None:
    """Set the script's own split into stages, virtual stages and recompute to off in ``arguments``."""
    for name in (*SPLIT_ARGUMENTS, *VIRTUAL_ARGUMENTS):
        if hasattr(arguments, name):
            setattr(arguments, name, False if isinstance(getattr(arguments, name), bool) else None)
    vars(arguments).update(dict.fromkeys(RECOMPUTE_ARGUMENTS))


def runnable_splits(arguments: argparse.Namespace, description: Description) -> Splits | None:
    """Return the splits of ``description``'s model that the host of ``arguments`` runs; ``None``: any split."""
    behind = [module.name for module in description.modules if module.name.endswith(GENERATOR)]
    if behind:
        return Splits(
            of_layout=lambda layout: _one_stage(layout, description),
            recompute_by_stage=False,
            description=f"one stage with {behind[0]}, and all layers recomputed or none",
        )
    if description.model_file is not None:
        return None
    layers = {module.name: module.num_layers for module in description.modules}
    if is_llava(arguments):
        encoder, decoder = layers
        return Splits(
            of_layout=lambda layout: _encoder_first(layout, encoder, layers[encoder], decoder, layers[decoder]),
            recompute_by_stage=False,
            description=f"all of {encoder} on the first stage, equally many layers of {decoder} on every one, and all "
            "layers recomputed or none",
        )
    if takes_layout_strings(arguments) or is_mindspeed_llm(arguments):
        return None
    (name,) = layers
    return Splits(
        of_layout=lambda layout: ({name: row} for row in _first_and_last(layout, layers[name])),
        recompute_by_stage=True,
        description="first and last stage of any size and those between alike",
    )


def _one_stage(layout: Layout, description: Description) -> Iterator[Layers]:
    if layout.num_virtual_stages == 1:
        yield {module.name: (module.num_layers,) for module in description.modules}


def _first_and_last(layout: Layout, num_layers: int) -> Iterator[tuple[int, ...]]:
    """Yield rows of at least one layer per stage."""
    stages = layout.num_virtual_stages
    if layout.virtual_size > 1:
        yield from _chunks(layout, num_layers)
        return
    if stages == 1:
        yield (num_layers,)
        return
    if stages == 2:
        yield from ((first, num_layers - first) for first in range(1, num_layers))
        return
    for between in range(1, (num_layers - 2) // (stages - 2) + 1):
        rest = num_layers - between * (stages - 2)
        yield from ((first, *(between,) * (stages - 2), rest - first) for first in range(1, rest))


def _chunks(layout: Layout, num_layers: int) -> Iterator[tuple[int, ...]]:
    """Yield rows of interleaved layouts: even, with embedding and loss each counted as a layer or not; or equal for all
    chunks of a rank."""
    stages, chunks = layout.num_virtual_stages, layout.virtual_size
    for less_first, less_last in itertools.product((0, 1), repeat=2):
        each, rest = divmod(num_layers + less_first + less_last, stages)
        row = (each - less_first, *(each,) * (stages - 2), each - less_last)
        if not rest and min(row) > 0:
            yield row
    if num_layers % chunks == 0:
        one_of_each = replace(layout, virtual_size=1, schedule="1f1b", microbatch_group_size=0)
        for ranks in _first_and_last(one_of_each, num_layers // chunks):
            if len(set(ranks)) > 1:
                yield ranks * chunks


def _encoder_first(layout: Layout, encoder: str, num_encoder: int, decoder: str, num_decoder: int) -> Iterator[Layers]:
    """Yield the only split of Megatron's pretrain_vlm.py, if it exists: the vision model supports no virtual stages."""
    stages = layout.pipeline_size
    if layout.virtual_size == 1 and num_decoder % stages == 0:
        yield {encoder: (num_encoder, *(0,) * (stages - 1)), decoder: (num_decoder // stages,) * stages}
