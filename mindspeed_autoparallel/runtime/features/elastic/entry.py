"""``--auto-parallel-elastic`` at the start of every process: apply the plan for this world, or wait as a spare."""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import write_text_atomic
from mindspeed_autoparallel.runtime.features.elastic.neighbour import ended_by_error, record_exits, watch_next_node
from mindspeed_autoparallel.runtime.features.elastic.plans import plan_for_world
from mindspeed_autoparallel.runtime.features.elastic.request import ElasticRequest, read_request
from mindspeed_autoparallel.runtime.first_rank import print_once
from mindspeed_autoparallel.spec import Plan
from mindspeed_autoparallel.units import US_PER_MS
from mindspeed_autoparallel.weights.rank_folders import TRACKER
from mindspeed_autoparallel.weights.whole_steps import loss_line, saved_steps

_NEW_START = {"finetune": False, "no_load_optim": None, "no_load_rng": None, "ckpt_step": None}
"""Arguments that change what is loaded from a checkpoint, with Megatron's defaults."""

_POLL_S = 0.5


def prepare(arguments: argparse.Namespace) -> None:
    """Set ``arguments`` to the plan for this world and to the newest checkpoint; spare processes wait here and exit."""
    request = read_request(arguments)
    watch_next_node(request.folder, request.world)
    path, plan = plan_for_world(request, arguments)
    if request.world.rank >= plan.layout.num_devices:
        wait_for_end(request, plan)
    arguments.auto_parallel_plan = str(path)
    take_part(arguments, request.plan, plan)
    if line := resume_from_newest(arguments, request.plan):
        print_once(f"elastic: {line}")
    if request.world.rank == 0:
        announce_end(request)
        print(_going_on(request, plan, arguments), flush=True)
    os.environ["WORLD_SIZE"] = str(plan.layout.num_devices)


def _going_on(request: ElasticRequest, plan: Plan, arguments: argparse.Namespace) -> str:
    world, used = request.world, plan.layout.num_devices
    spare = f", {world.size - used} of them spare" if used < world.size else ""
    loaded = f"loads {arguments.load}" if arguments.load else "starts anew"
    return (
        f"elastic: {world.size} processes on {world.num_nodes} nodes{spare}; {plan.layout.label()}, "
        f"{plan.mean_us / US_PER_MS:.2f} ms a step predicted; {loaded}"
    )


def take_part(arguments: argparse.Namespace, first: Plan, plan: Plan) -> None:
    """Set the world size to that of ``plan``, and make checkpoints loadable under any other plan.

    ``first``: the user's plan. Every plan keeps its padding of the vocabulary, because rows added for TP change the
    loss; ``ConfigError`` if the new TP does not allow the same padding.
    """
    arguments.world_size = plan.layout.num_devices
    if hasattr(arguments, "dist_ckpt_optim_fully_reshardable"):
        arguments.dist_ckpt_optim_fully_reshardable = True
    multiple = getattr(arguments, "make_vocab_size_divisible_by", None)
    if multiple is None or plan.layout.tensor_size == first.layout.tensor_size:
        return
    rows, size = int(multiple) * first.layout.tensor_size, plan.layout.tensor_size
    if rows % size:
        raise ConfigError(
            f"--make-vocab-size-divisible-by {multiple} x TP {first.layout.tensor_size} pads the vocabulary to a "
            f"multiple of {rows}, which TP {size} of the new plan does not divide: another padding would "
            "change the loss."
        )
    arguments.make_vocab_size_divisible_by = rows // size


def resume_from_newest(arguments: argparse.Namespace, plan: Plan) -> str:
    """Resume from ``--save`` once it has a checkpoint: weights, optimizer, schedule, iteration and consumed samples.

    The first start loads the script's checkpoint. Flags of the script that skip state (``--finetune``,
    ``--no-load-optim``) apply to that first start only. If the newest step is incomplete, loads the newest complete
    one and returns a line about it; otherwise returns an empty string. ``plan``: the user's. Raises ``ConfigError`` if
    no step is complete.
    """
    save = Path(arguments.save)
    # Megatron writes the tracker last: without it, no checkpoint has been finished.
    if not (save / TRACKER).is_file():
        return ""
    saved = saved_steps(save, plan)
    line = loss_line(saved, save, plan.cluster.devices_per_node) if saved.broken else ""
    if saved.whole is None:
        raise ConfigError(line)
    arguments.load = arguments.save
    for name, default in _NEW_START.items():
        if hasattr(arguments, name):
            setattr(arguments, name, default)
    if line:
        arguments.ckpt_step = saved.whole.iteration
    return line


def announce_end(request: ElasticRequest) -> None:
    """Write a file for spare processes when this process, rank 0, ends without an error."""
    path = _end_of(request)
    path.unlink(missing_ok=True)
    record_exits()

    def announce() -> None:
        if not ended_by_error():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomic(path, "")

    atexit.register(announce)


def wait_for_end(request: ElasticRequest, plan: Plan) -> NoReturn:
    """Wait until the training has ended, and exit with 0; torchrun ends this process before it restarts the others."""
    path, started = _end_of(request), time.time()
    used, rank = plan.layout.num_devices, request.world.rank
    print(f"elastic: rank {rank} is a spare, the plan uses {used} of {request.world.size} processes", flush=True)
    while not (path.exists() and path.stat().st_mtime > started):
        time.sleep(_POLL_S)
    sys.exit(0)


def _end_of(request: ElasticRequest) -> Path:
    return request.folder / f"ended-{request.world.start}"
