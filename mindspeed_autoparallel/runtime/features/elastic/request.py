"""The flags of ``--auto-parallel-elastic`` and torchrun's environment, checked."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.candidate import Splits
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions
from mindspeed_autoparallel.runtime.megatron.description import Description, describe
from mindspeed_autoparallel.runtime.megatron.layout_arguments import GROUP_ARGUMENT
from mindspeed_autoparallel.runtime.megatron.mindspeed import least_expert_sizes
from mindspeed_autoparallel.runtime.megatron.short_training import batch_ramp
from mindspeed_autoparallel.runtime.megatron.splits import runnable_splits
from mindspeed_autoparallel.spec import Plan

_FLAG = "--auto-parallel-elastic"
FOLDER = "auto_parallel_elastic"
"""Name inside the folder of ``--save``, which all nodes share."""


@dataclass(frozen=True, kw_only=True)
class World:
    """The processes that torchrun started."""

    rank: int
    size: int
    per_node: int
    start: str
    """Identifies this start among all starts of the run."""

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes."""
        return self.size // self.per_node


@dataclass(frozen=True, kw_only=True)
class ElasticRequest:
    """The inputs of an elastic start."""

    world: World
    plan_file: Path
    plan: Plan
    """The user's plan for the whole cluster."""
    folder: Path
    """Folder of the plans for other numbers of processes."""
    time_limit_s: float
    description: Description
    splits: Splits | None
    host: SpaceOptions
    """What the host runs."""


def read_request(arguments: argparse.Namespace) -> ElasticRequest:
    """Return the checked request; ``ConfigError`` names what is missing."""
    if not getattr(arguments, "auto_parallel_plan", None):
        raise ConfigError(f"{_FLAG} needs --auto-parallel-plan plan.json, the plan for all nodes.")
    if not getattr(arguments, "save", None) or not getattr(arguments, "save_interval", None):
        raise ConfigError(
            f"{_FLAG} resumes from checkpoints: give --save, on storage that all nodes share, and --save-interval."
        )
    _check_format(arguments)
    plan_file = Path(arguments.auto_parallel_plan)
    plan = Plan.read(plan_file)
    if plan.layout.distributed_optimizer and not hasattr(arguments, "dist_ckpt_optim_fully_reshardable"):
        raise ConfigError(
            f"this Megatron saves a distributed optimizer for one layout only: {_FLAG} needs a release with "
            "--dist-ckpt-optim-fully-reshardable (0.15), or a plan without the distributed optimizer."
        )
    world = read_world(os.environ)
    _check_padding(arguments, plan, world)
    description = describe(arguments)
    return ElasticRequest(
        world=world,
        plan_file=plan_file,
        plan=plan,
        folder=Path(arguments.save) / FOLDER,
        time_limit_s=float(arguments.auto_parallel_elastic_time_limit_s),
        description=description,
        splits=runnable_splits(arguments, description),
        host=SpaceOptions(
            group_sizes=hasattr(arguments, GROUP_ARGUMENT),
            least_expert_sizes=least_expert_sizes(arguments),
            ramp=batch_ramp(arguments, plan.global_batch_size),
        ),
    )


def read_world(environment: Mapping[str, str]) -> World:
    """Return the processes that torchrun's ``environment`` describes; ``ConfigError`` if nodes differ in size."""
    try:
        rank, size, per_node = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"{_FLAG} is for processes of torchrun (RANK, WORLD_SIZE and LOCAL_WORLD_SIZE are set by it): start the "
            "script with torchrun --nnodes MIN:MAX --max-restarts N."
        ) from error
    if size % per_node:
        raise ConfigError(
            f"{size} processes on nodes of {per_node}: {_FLAG} needs the same --nproc-per-node on all nodes."
        )
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
    start = "-".join(environment.get(name, "0") for name in names)
    return World(rank=rank, size=size, per_node=per_node, start="".join(c if c.isalnum() else "-" for c in start))


def _check_padding(arguments: argparse.Namespace, plan: Plan, world: World) -> None:
    """Raise ``ConfigError`` if a later plan could not keep the padding of the vocabulary (``entry.take_part``)."""
    multiple = getattr(arguments, "make_vocab_size_divisible_by", None)
    widest = 1 << (world.per_node.bit_length() - 1)
    if multiple is not None and int(multiple) * plan.layout.tensor_size % widest:
        raise ConfigError(
            f"--make-vocab-size-divisible-by {multiple} x TP {plan.layout.tensor_size} pads the vocabulary to a number "
            f"that TP {widest} of a later plan may not divide, and another padding changes the loss. Give a multiple "
            f"of {widest} (Megatron's default is 128)."
        )


def _check_format(arguments: argparse.Namespace) -> None:
    kind = getattr(arguments, "ckpt_format", "torch_dist")
    if kind != "torch_dist":
        raise ConfigError(
            f"--ckpt-format {kind} fits only the layout that wrote it: {_FLAG} needs torch_dist. Convert a checkpoint "
            "of another format with mindspeed-autoparallel convert resplit --format torch_dist."
        )
