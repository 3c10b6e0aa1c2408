"""Applies a plan whose encoders have their own layouts: writes its model.json and switches ``--hetero-parallel`` on."""

from __future__ import annotations

import argparse
from pathlib import Path

from mindspeed_autoparallel.runtime.features.apply_plan.applicable import SCRIPT_SIZES
from mindspeed_autoparallel.runtime.features.apply_plan.hetero_model import write_hetero_model
from mindspeed_autoparallel.runtime.first_rank import print_once
from mindspeed_autoparallel.runtime.megatron.description import Description
from mindspeed_autoparallel.runtime.megatron.layout_arguments import RECOMPUTE_ARGUMENTS, recompute_arguments
from mindspeed_autoparallel.spec.plan import Plan


def apply_hetero(plan: Plan, description: Description, arguments: argparse.Namespace, path: Path) -> None:
    """Write the modules' sizes as a model.json beside the plan and set ``arguments`` to train with it.

    The feature of ``--auto-parallel-hetero`` runs next: it reads the file and sets the backbone's sizes.
    """
    record = plan.hetero
    assert record is not None
    # Every rank writes the same content through a rename, so that none waits for another before torch is up.
    model_file = write_hetero_model(plan, description, path.parent)
    for name in SCRIPT_SIZES:
        setattr(arguments, name, 1)
    for name in RECOMPUTE_ARGUMENTS:
        setattr(arguments, name, None)
    if description.model_file is None:
        arguments.hetero_model = str(model_file)
        (recomputed,) = plan.recomputed_of(plan.backbone, "full")
        for name, value in (recompute_arguments("full", recomputed) if recomputed else {}).items():
            setattr(arguments, name, value)
    else:
        arguments.mm_model = str(model_file)
    arguments.hetero_memory, arguments.hetero_balance = record.memory, record.balance
    arguments.auto_parallel_hetero = True
    print_once(f"training by the plan {path}: {plan.layout.label()}, sizes written to {model_file}")
