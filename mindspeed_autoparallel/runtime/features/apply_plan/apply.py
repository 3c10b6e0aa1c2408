"""Applies a plan to the host's arguments after they are parsed and before they are validated."""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import destination_of, flag_of
from mindspeed_autoparallel.files import write_json_atomic
from mindspeed_autoparallel.runtime.features.apply_plan.applicable import SCRIPT_SIZES, check_applies
from mindspeed_autoparallel.runtime.features.apply_plan.check import MeasuredRank, PlanCheck
from mindspeed_autoparallel.runtime.features.apply_plan.hetero_model import write_hetero_model
from mindspeed_autoparallel.runtime.features.apply_plan.overlaps import (
    flags_of_other_layouts,
    kept_overlap,
    kept_pairs,
    print_other_balance,
    print_other_switches,
    tensor_overlap,
)
from mindspeed_autoparallel.runtime.features.apply_plan.own_run import add_run
from mindspeed_autoparallel.runtime.features.apply_plan.request import PlanRequest
from mindspeed_autoparallel.runtime.first_rank import is_first_rank, print_once
from mindspeed_autoparallel.runtime.megatron.description import Description
from mindspeed_autoparallel.runtime.megatron.hybrid import OLD_ARGUMENT, hybrid_pattern
from mindspeed_autoparallel.runtime.megatron.layout_arguments import (
    RECOMPUTE_ARGUMENTS,
    ArgumentValue,
    group_arguments,
    kind_everywhere,
    model_keys,
    native_flags,
    recompute_arguments,
    sizes,
    stage_arguments,
)
from mindspeed_autoparallel.runtime.megatron.mindspeed import (
    check_list_was_given,
    is_mindspeed_mm,
    keep_stage,
    ties_embeddings,
)
from mindspeed_autoparallel.runtime.megatron.shared_embedding import place_embedding
from mindspeed_autoparallel.runtime.megatron.splits import clear_stages
from mindspeed_autoparallel.runtime.state import of_process
from mindspeed_autoparallel.spec.plan import Plan


def apply_hetero(plan: Plan, description: Description, arguments: argparse.Namespace, path: Path) -> None:
    """Write a model.json with the modules' sizes and set ``arguments`` to train with it.

    The feature of ``--auto-parallel-hetero`` runs next: it reads the file and sets the backbone's sizes.
    """
    record = plan.hetero
    assert record is not None
    # Every rank writes the same content through a rename, so none has to wait for another before torch is set up.
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
    print_once(f"training with the plan {path}: {plan.layout.label()}, sizes written to {model_file}")


def apply(request: PlanRequest, arguments: argparse.Namespace) -> None:
    """Set the host's ``arguments`` to the plan, and compare the first steps with its prediction."""
    path, plan, description, calibrated = request.path, request.plan, request.description, request.calibration_file
    before = dict(vars(arguments))
    check_applies(plan, description, arguments, path)
    _set_all(arguments, {**sizes(plan), **kept_overlap(plan, arguments), **kept_pairs(plan, arguments)})
    _set_all(arguments, {**tensor_overlap(plan, arguments), **flags_of_other_layouts(plan, arguments)})
    print_other_switches(plan, arguments)
    print_other_balance(plan, arguments, before.get("micro_batch_size"))

    def calibrate(ranks: list[MeasuredRank]) -> None:
        if calibrated is not None:
            print(add_run(calibrated, arguments, plan, ranks), flush=True)

    of_process(PlanCheck).begin(plan, int(arguments.auto_parallel_check_steps), calibrate)
    if plan.hetero is not None:
        apply_hetero(plan, description, arguments, path)
        # The feature that runs next gives the backbone these sizes.
        _print_replaced(before, {**vars(arguments), **plan.layout.megatron_sizes})
        return
    arguments.virtual_pipeline_model_parallel_size = None
    stages: Mapping[str, int | str | None] = {}
    groups = group_arguments(plan, arguments)
    _set_all(arguments, groups)
    if description.model_file is not None:
        _apply_to_model_file(plan, description, arguments, path)
    else:
        stages = stage_arguments(plan, arguments)
        check_list_was_given(stages, arguments, path)
        _apply_to_flags(plan, arguments, stages)
    if is_first_rank():
        print(f"training with the plan {path}: {plan.layout.label()}", flush=True)
        print(f"as native flags: {shlex.join(native_flags(plan, {**stages, **groups}))}", flush=True)
        _print_replaced(before, vars(arguments))
        for line in _limits_of_checkpoints(arguments):
            print(line, flush=True)


def _print_replaced(before: Mapping[str, object], after: Mapping[str, object]) -> None:
    """Print a line for every argument that the plan changes, if it was given as a flag or the plan turns it off."""
    if not is_first_rank():
        return
    given = {destination_of(word.partition("=")[0]) for word in sys.argv[1:] if word.startswith("--")}
    for name, old in before.items():
        new = after[name]
        if old != new and (name in given or (old is True and not new)):
            print(f"replaced by the plan: {flag_of(name)}, {old} in the script, {new} now", flush=True)


def _limits_of_checkpoints(arguments: argparse.Namespace) -> list[str]:
    """Return a line if the optimizer state that this training saves fits no other layout."""
    reshardable = getattr(arguments, "dist_ckpt_optim_fully_reshardable", None)
    if reshardable is not False or not getattr(arguments, "save", None) or not arguments.use_distributed_optimizer:
        return []
    return [
        f"checkpoints in {arguments.save} resume under this layout only: add --dist-ckpt-optim-fully-reshardable to "
        "resume them under another plan."
    ]


def _apply_to_model_file(plan: Plan, description: Description, arguments: Any, path: Path) -> None:
    content = description.with_layers({}, {})
    for module in description.modules:
        block = module.block_in(content)
        for stale in RECOMPUTE_ARGUMENTS:
            block.pop(stale, None)
        block.update(model_keys(plan, module.name))
    if is_mindspeed_mm():
        if ties_embeddings(content):
            place_embedding(plan.layers_of(description.modules[-1].name), plan.layout.pipeline_size, path)
        _print_more_recomputed(keep_stage(content, _pipeline_rank(plan)))
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]
    applied = path.with_name(f"applied_model_{digest}.json")
    # Every rank of a stage writes the same content through a rename, so none has to wait for another.
    write_json_atomic(applied, content)
    arguments.mm_model = str(applied)
    for name in RECOMPUTE_ARGUMENTS:
        setattr(arguments, name, None)
    if is_first_rank():
        print(_difference(description, content, applied), flush=True)


def _pipeline_rank(plan: Plan) -> int:
    """Return this process's pipeline rank under the plan."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    return int(os.environ.get("RANK", "0")) // (world_size // plan.layout.pipeline_size)


def _print_more_recomputed(pipeline_ranks: list[int]) -> None:
    if pipeline_ranks:
        print_once(
            f"Megatron recomputes equally many layers in every chunk of a rank: pipeline ranks {pipeline_ranks} "
            "recompute more than planned, so steps take longer than predicted and memory stays below the prediction."
        )


def _difference(description: Description, content: dict[str, object], applied: Path) -> str:
    before = json.dumps(description.content, indent=2).splitlines()
    after = json.dumps(content, indent=2).splitlines()
    lines = difflib.unified_diff(before, after, str(description.model_file), str(applied), lineterm="", n=1)
    return "\n".join(lines)


def _apply_to_flags(plan: Plan, arguments: Any, stages: Mapping[str, int | str | None]) -> None:
    """Set the flags of stages (``stage_arguments``) and recompute, for hosts without a model.json."""
    layout = plan.layout
    clear_stages(arguments)
    if hybrid_pattern(arguments) and hasattr(arguments, OLD_ARGUMENT):
        setattr(arguments, OLD_ARGUMENT, None)
    _set_all(arguments, stages)
    kind = kind_everywhere(plan)
    if kind is not None:
        _set_all(arguments, recompute_arguments(kind))
        return
    recomputed = plan.recomputed_of(plan.model.modules[0].name, "full")
    by_rank = [recomputed[rank :: layout.pipeline_size] for rank in range(layout.pipeline_size)]
    # Megatron's own block method: the first layers of each chunk are recomputed, so the number differs by rank.
    own = max(by_rank[_pipeline_rank(plan)])
    _print_more_recomputed([rank for rank, chunks in enumerate(by_rank) if len(set(chunks)) > 1])
    if own:
        _set_all(arguments, recompute_arguments("full", own))


def _set_all(arguments: argparse.Namespace, values: Mapping[str, ArgumentValue]) -> None:
    for name, value in values.items():
        setattr(arguments, name, value)
