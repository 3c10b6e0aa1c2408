"""Which splits of its layers over stages the host can run: not every release and script takes any."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from mindspeed_autoparallel.planner.host_splits import Layers, Splits
from mindspeed_autoparallel.runtime.megatron.description import Description, is_llava
from mindspeed_autoparallel.runtime.megatron.layout_arguments import LAYOUT_ARGUMENT
from mindspeed_autoparallel.runtime.megatron.mindspeed_llm import is_mindspeed_llm
from mindspeed_autoparallel.spec import Layout


def runnable_splits(arguments: argparse.Namespace, description: Description) -> Splits | None:
    """Return what the host of ``arguments`` runs of the model of ``description``; ``None``: any split."""
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
    if hasattr(arguments, LAYOUT_ARGUMENT) or is_mindspeed_llm(arguments):
        return None
    (name,) = layers
    return Splits(
        of_layout=lambda layout: ({name: row} for row in _first_and_last(layout, layers[name])),
        recompute_by_stage=True,
        description="first and last stage of any size and those between alike",
    )


def _first_and_last(layout: Layout, num_layers: int) -> Iterator[tuple[int, ...]]:
    """List rows of at least one layer per stage; chunks of interleaved layouts are all alike."""
    stages = layout.num_virtual_stages
    if layout.virtual_size > 1:
        if num_layers % stages == 0:
            yield (num_layers // stages,) * stages
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


def _encoder_first(layout: Layout, encoder: str, num_encoder: int, decoder: str, num_decoder: int) -> Iterator[Layers]:
    """Return the one split of Megatron's pretrain_vlm.py: its vision model takes no virtual stages."""
    stages = layout.pipeline_size
    if layout.virtual_size == 1 and num_decoder % stages == 0:
        yield {encoder: (num_encoder, *(0,) * (stages - 1)), decoder: (num_decoder // stages,) * stages}
