"""The host's arguments for a world of another size, and for the newest checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.first_rank import print_once
from mindspeed_autoparallel.spec import Plan
from mindspeed_autoparallel.weights.whole_steps import loss_line, saved_steps

TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron writes it last, so that a step is whole where it is named."""
_NEW_START = {"finetune": False, "no_load_optim": None, "no_load_rng": None, "ckpt_step": None}
"""Flags that leave state of a checkpoint behind, and Megatron's defaults."""


def apply(arguments: argparse.Namespace, first: Plan, plan: Plan) -> None:
    """Make the world the ranks of ``plan`` and load the newest checkpoint; ``first`` is the user's plan."""
    take_part(arguments, first, plan)
    line = resume_from_newest(arguments, first)
    if line:
        print_once(f"elastic: {line}")


def take_part(arguments: argparse.Namespace, first: Plan, plan: Plan) -> None:
    """Make the world of this process the ranks of ``plan``, and its checkpoints loadable under any other plan.

    ``first``: the user's plan, whose padding of the vocabulary every plan keeps: rows that TP adds change the loss.
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
            f"multiple of {rows}, which TP {size} of the new plan cannot cut: another padding would change the loss."
        )
    arguments.make_vocab_size_divisible_by = rows // size


def resume_from_newest(arguments: argparse.Namespace, plan: Plan) -> str:
    """Load from ``--save`` once it has a checkpoint: weights, optimizer, schedule, iteration and consumed samples.

    A first start loads what the script names. Flags of the script that leave state behind (``--finetune``,
    ``--no-load-optim``) are for that first start alone. Where the newest step is not whole, the newest whole one is
    loaded, and a line about it is returned; otherwise an empty string. ``plan``: the user's. Raises ``ConfigError``
    where no step is whole.
    """
    save = Path(arguments.save)
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
