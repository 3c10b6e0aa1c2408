"""Whether a host can train under a plan: checked before a search writes the plan, and again before training."""

from __future__ import annotations

import argparse
from pathlib import Path

from mindspeed_autoparallel.errors import AutoParallelError, PlanError
from mindspeed_autoparallel.patching.releases import release_of, within
from mindspeed_autoparallel.planner.layouts.space import unmet_ramp
from mindspeed_autoparallel.runtime.features.apply_plan.hetero_model import hetero_model
from mindspeed_autoparallel.runtime.features.hetero_parallel.request import check_layouts
from mindspeed_autoparallel.runtime.megatron.description import Description
from mindspeed_autoparallel.runtime.megatron.fixed_sizes import fixed_sizes
from mindspeed_autoparallel.runtime.megatron.hybrid import predicts_further_tokens, recomputes_whole_layers
from mindspeed_autoparallel.runtime.megatron.layout_arguments import (
    check_pairs,
    group_arguments,
    kind_everywhere,
    model_keys,
    refuse_ends_alone,
    sizes,
    stage_arguments,
)
from mindspeed_autoparallel.runtime.megatron.mindspeed import (
    check_deepstack,
    check_expert_size,
    check_schedule,
    is_mindspeed_mm,
    ties_embeddings,
)
from mindspeed_autoparallel.runtime.megatron.shared_embedding import first_stage
from mindspeed_autoparallel.runtime.megatron.short_training import batch_ramp
from mindspeed_autoparallel.runtime.megatron.unsearched import refuse_batch_schedule
from mindspeed_autoparallel.spec.plan import Plan
from mindspeed_autoparallel.spec.recompute import RecomputePolicy, policy_of

SCRIPT_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
"""Sizes that are 1 in a script whose modules have their own layouts."""


def check_applies(plan: Plan, description: Description, arguments: argparse.Namespace, path: Path) -> None:
    """Raise ``PlanError`` or ``ConfigError`` if the host of ``arguments`` cannot train under ``plan``, or fails later.

    ``arguments``: parsed by the host but not yet validated; not modified. ``path``: the plan's file.
    """
    refuse_batch_schedule(arguments, "--auto-parallel-plan")
    if unmet := unmet_ramp(plan.layout, batch_ramp(arguments, plan.global_batch_size)):
        raise PlanError(f"{path}: {unmet} Search by the script with this flag, or leave it out.")
    check_pairs(plan, arguments)
    # Encoders with layouts of their own have their own sequence parallelism.
    sizes_given = fixed_sizes(arguments, description.content if plan.hetero is None else {})
    if reason := sizes_given.refusal(plan.layout):
        raise PlanError(f"{path} {reason}")
    check_expert_size(arguments, plan.layout, path)
    check_schedule(arguments, plan.layout, path)
    _refuse_unsaved(plan, arguments)
    _check_recompute(plan, description, arguments)
    if plan.hetero is not None:
        planned = {**sizes(plan), **dict.fromkeys(SCRIPT_SIZES, 1)}
        tried = argparse.Namespace(**{**vars(arguments), **planned})
        check_layouts(hetero_model(plan, description), tried, plan.layout.num_devices, str(path))
        return
    group_arguments(plan, arguments)
    if description.model_file is None:
        stage_arguments(plan, arguments)
    else:
        _check_stages(plan, description, path)


def refusal(plan: Plan, description: Description, arguments: argparse.Namespace, path: Path) -> str:
    """Return why ``check_applies`` refuses ``plan``; empty if it does not."""
    try:
        check_applies(plan, description, arguments, path)
    except AutoParallelError as error:
        return str(error)
    return ""


def gives_recompute(plan: Plan, description: Description, arguments: argparse.Namespace) -> bool:
    """Return whether the host's flags, or its model.json, can express the recompute of ``plan``."""
    try:
        _check_recompute(plan, description, arguments)
    except PlanError:
        return False
    return True


def _check_recompute(plan: Plan, description: Description, arguments: argparse.Namespace) -> None:
    if plan.hetero is not None:
        rows = (stage.recompute.get(plan.backbone, {}) for stage in plan.stages)
        kinds = {kind for row in rows for kind, count in row.items() if count}
        if others := sorted(kinds - {"full"}):
            raise PlanError(
                f"the plan recomputes {', '.join(policy_of(kind).words for kind in others)} in {plan.backbone}; where "
                "encoders have layouts of their own, only whole layers (full) can be applied. Search it again."
            )
    elif description.model_file is not None:
        for module in plan.model.modules:
            model_keys(plan, module.name)
    else:
        _check_recompute_flags(plan, arguments)


def _check_recompute_flags(plan: Plan, arguments: argparse.Namespace) -> None:
    kinds = plan.recompute_kinds
    if any(policy_of(kind).kind == "full" for kind in kinds) and not recomputes_whole_layers(arguments):
        raise PlanError(
            "the plan recomputes whole layers, but Megatron 0.18 ends with a TypeError when it recomputes those of "
            "multi-token prediction. Plan again, or train with another release."
        )
    if (kind := kind_everywhere(plan)) is not None:
        _check_groups(plan, policy_of(kind), arguments)


def _check_stages(plan: Plan, description: Description, path: Path) -> None:
    """Raise ``PlanError`` for layers by stage that the host's model.json cannot express."""
    *encoders, last = (plan.layers_of(module.name) for module in description.modules)
    if not encoders:
        refuse_ends_alone(last)
        return
    check_deepstack(description.content, encoders[0], last, path)
    if is_mindspeed_mm() and ties_embeddings(description.content):
        first_stage(last, plan.layout.pipeline_size, path)


def _refuse_unsaved(plan: Plan, arguments: argparse.Namespace) -> None:
    """Raise ``PlanError`` if Megatron would fail at the first checkpoint.

    It asserts there that a tied output layer with multi-token prediction has no weight on the last stage, although
    it has one.
    """
    tied = getattr(arguments, "untie_embeddings_and_output_weights", None) is False
    saves = getattr(arguments, "save", None) and getattr(arguments, "ckpt_format", None) == "torch_dist"
    if saves and tied and plan.layout.pipeline_size > 1 and predicts_further_tokens(arguments):
        raise PlanError(
            f"the plan has {plan.layout.pipeline_size} stages, but Megatron fails at the first torch_dist checkpoint "
            "of tied embeddings with multi-token prediction on several stages. Add --ckpt-format torch or "
            "--untie-embeddings-and-output-weights, or leave --save out."
        )


def _check_groups(plan: Plan, policy: RecomputePolicy, arguments: argparse.Namespace) -> None:
    """Raise ``PlanError`` for recompute groups that make Megatron fail in its first forward."""
    size, counts = policy.layers_per_group, plan.layers_of(plan.model.modules[0].name)
    if size < 2:
        return
    if predicts_further_tokens(arguments):
        reason = "Megatron recomputes layers of multi-token prediction only one by one"
    elif any(count % size for count in counts) and within(release_of("megatron-core"), "<0.18"):
        reason = f"this Megatron takes whole groups alone; the plan has {list(counts)} layers on its stages"
    else:
        return
    raise PlanError(f"the plan recomputes {policy.words}, and {reason}. Plan again, or change the kind to full.")
