"""``--operator-plan``: sets the host's arguments to the configuration that an operator search derived."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from mindspeed_autoparallel.errors import PlanError
from mindspeed_autoparallel.files import read_json
from mindspeed_autoparallel.operators.candidate import read_candidate
from mindspeed_autoparallel.runtime.features.operator_search.request import read_shape
from mindspeed_autoparallel.runtime.first_rank import print_once


def prepare(arguments: argparse.Namespace) -> None:
    """Set the layout and the batch sizes of ``arguments`` to those of ``--operator-plan``; rank 0 prints them as flags.

    Raises ``PlanError`` if the plan was made for another model or another number of processes.
    """
    path = Path(arguments.operator_plan)
    content = read_json(path, "operator plan (--operator-plan)")
    layout = read_candidate(path)
    shape = read_shape(arguments).as_json()
    planned = content.get("model")
    if planned is not None and planned != shape:
        differing = [key for key in shape if planned.get(key) != shape[key]]
        values = ", ".join(f"{key} {planned.get(key)} there and {shape[key]} here" for key in differing)
        raise PlanError(f"{path} was made for another model: {values}. Search again with --operator-search.")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != layout.num_devices:
        raise PlanError(
            f"{path} is for {layout.num_devices} devices ({layout.label()}), but {world} processes were started. Start "
            f"{layout.num_devices}, or search again with --operator-devices {world}."
        )
    megatron = content["megatron"]
    vars(arguments).update(
        layout.megatron_sizes,
        sequence_parallel=layout.sequence_parallel,
        micro_batch_size=layout.micro_batch_size,
        global_batch_size=megatron.get("global_batch_size"),
    )
    flags = shlex.join(megatron.get("flags", []))
    print_once(f"training with the operator plan {path}: {layout.label()}\nas flags: {flags}")
