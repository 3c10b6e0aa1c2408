"""``--hetero-parallel``: sets the host's arguments to the backbone's sizes in model.json."""

from __future__ import annotations

import argparse

from mindspeed_autoparallel.runtime.features.hetero_parallel.request import HeteroRequest, read_request
from mindspeed_autoparallel.runtime.first_rank import is_first_rank
from mindspeed_autoparallel.runtime.hetero.job import current_job


def prepare(arguments: argparse.Namespace) -> None:
    """Set the host's ``arguments`` to the backbone's sizes and begin the job; rank 0 prints all layouts.

    Raises ``ConfigError`` before any process group exists.
    """
    request = read_request(arguments)
    backbone = request.layout.backbone
    arguments.micro_batch_size = request.micro_batch_size
    arguments.tensor_model_parallel_size = backbone.tensor_size
    arguments.pipeline_model_parallel_size = backbone.pipeline_size
    arguments.context_parallel_size = backbone.context_size
    current_job().begin(request.layout, request.scales, arguments)
    if is_first_rank():
        _announce(request, arguments)


def _announce(request: HeteroRequest, arguments: argparse.Namespace) -> None:
    lines = [
        f"{module.name} tp {module.tensor_size}{' sp' if module.sequence_parallel else ''} pp {module.pipeline_size} "
        f"cp {module.context_size} dp {module.data_parallel_size(request.world_size)}"
        + (f", {request.scales[module.name]} microbatches at a time" if module.name in request.scales else "")
        for module in (*request.layout.encoders, request.layout.backbone, *request.layout.generators)
    ]
    print("hetero parallel: " + "; ".join(lines), flush=True)
    late = [m.name for m in request.layout.others if m.role == "generator" or m.pipeline_size > 1]
    if late and getattr(arguments, "overlap_grad_reduce", False):
        print(
            f"hetero parallel: --overlap-grad-reduce does not reach {', '.join(late)}: gradients of a generator, and "
            "of an encoder with pp above 1, are reduced after the last backward.",
            flush=True,
        )
