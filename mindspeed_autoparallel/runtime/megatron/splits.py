"""The script's own split of layers over stages, and those that the host can run: not every release supports all."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from mindspeed_autoparallel.planner.candidate import Layers, Splits
from mindspeed_autoparallel.runtime.megatron.description import Description, is_llava
from mindspeed_autoparallel.runtime.megatron.layout_arguments import RECOMPUTE_ARGUMENTS
from mindspeed_autoparallel.runtime.megatron.mindspeed import (
    LAYOUT_ARGUMENT,
    LIST_ARGUMENT,
    is_mindspeed_llm,
    takes_layout_strings,
)
from mindspeed_autoparallel.runtime.megatron.stage_rows import (
    CHUNK_SIZE_ARGUMENT,
    CHUNKS_ARGUMENT,
    EMBEDDING_ARGUMENT,
    FIRST_ARGUMENT,
    LAST_ARGUMENT,
    LOSS_ARGUMENT,
    rows_by_flags,
    rows_of_two_models,
)
from mindspeed_autoparallel.spec import Layout
from mindspeed_autoparallel.spec.model import GENERATOR

VIRTUAL_ARGUMENTS = (CHUNK_SIZE_ARGUMENT, CHUNKS_ARGUMENT)
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
    generators = [module.name for module in description.modules if module.name.endswith(GENERATOR)]
    if generators:
        return Splits(
            of_layout=lambda layout: _one_stage(layout, description),
            recompute_by_stage=False,
            description=f"one stage with {generators[0]}, and all layers recomputed or none",
        )
    if description.model_file is not None:
        return None
    layers = {module.name: module.num_layers for module in description.modules}
    if is_llava(arguments):
        encoder, decoder = layers
        return Splits(
            of_layout=lambda layout: filter(None, (rows_of_two_models(layout, layers),)),
            recompute_by_stage=False,
            description=f"all of {encoder} on the first stage, equally many layers of {decoder} on every one, and all "
            "layers recomputed or none",
        )
    if takes_layout_strings(arguments) or is_mindspeed_llm(arguments):
        return None
    (name,) = layers
    return Splits(
        of_layout=lambda layout: (
            {name: row} for row, _ in rows_by_flags(layers[name], layout.pipeline_size, layout.virtual_size)
        ),
        recompute_by_stage=True,
        description="first and last stage of any size and those between alike",
    )


def _one_stage(layout: Layout, description: Description) -> Iterator[Layers]:
    if layout.num_virtual_stages == 1:
        yield {module.name: (module.num_layers,) for module in description.modules}
