"""An operator plan that fits the host's arguments and the processes that were started."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mindspeed_autoparallel.errors import PlanError
from mindspeed_autoparallel.files import read_json
from mindspeed_autoparallel.operators.candidate import read_candidate
from mindspeed_autoparallel.runtime.features.operator_search.request import read_shape


@dataclass(frozen=True, kw_only=True)
class OperatorPlanRequest:
    """What to train by."""

    path: Path
    label: str
    """The layout's."""
    values: Mapping[str, int | bool | None]
    """Megatron's argument destinations."""
    flags: tuple[str, ...]
    """The same as words of a command line."""


def read_request(arguments: argparse.Namespace) -> OperatorPlanRequest:
    """Read ``--operator-plan``; ``PlanError`` where it is of another model or another number of processes."""
    path = Path(arguments.operator_plan)
    content = read_json(path, "operator plan (--operator-plan)")
    layout = read_candidate(path)
    shape = read_shape(arguments).as_json()
    planned = content.get("model")
    if planned is not None and planned != shape:
        differing = [key for key in shape if planned.get(key) != shape[key]]
        told = ", ".join(f"{key} {planned.get(key)} there and {shape[key]} here" for key in differing)
        raise PlanError(f"{path} was made for another model: {told}. Search again with --operator-search.")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != layout.num_devices:
        raise PlanError(
            f"{path} is for {layout.num_devices} devices ({layout.label()}), but {world} processes were started."
        )
    values = {
        **layout.megatron_sizes,
        "sequence_parallel": layout.sequence_parallel,
        "micro_batch_size": layout.micro_batch_size,
        "global_batch_size": content["megatron"].get("global_batch_size"),
    }
    flags = tuple(content["megatron"].get("flags", []))
    return OperatorPlanRequest(path=path, label=layout.label(), values=values, flags=flags)
