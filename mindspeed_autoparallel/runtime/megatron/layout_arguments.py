"""A plan as Megatron flags and as keys of model.json."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence

from mindspeed_autoparallel.errors import PlanError, flag_of
from mindspeed_autoparallel.planner.placement import ModulePlacement, check_prediction
from mindspeed_autoparallel.runtime.megatron.hybrid import PATTERN_ARGUMENT, cut_pattern, hybrid_pattern
from mindspeed_autoparallel.runtime.megatron.mindspeed import (
    LAYOUT_ARGUMENT,
    is_mindspeed_llm,
    split_arguments,
    takes_layout_strings,
)
from mindspeed_autoparallel.runtime.megatron.stage_rows import CHUNK_SIZE_ARGUMENT, arguments_of_row, rows_of_two_models
from mindspeed_autoparallel.spec.plan import Plan
from mindspeed_autoparallel.spec.recompute import policy_of

ArgumentValue = bool | int | float | str | list[str] | None
"""Value that Megatron's parser stores for a flag."""
EXPERT_TENSOR_ARGUMENT = "expert_tensor_parallel_size"
GROUP_ARGUMENT = "microbatch_group_size_per_vp_stage"
PAIRS_ARGUMENT = "overlap_moe_expert_parallel_comm"
_FLAGS = {GROUP_ARGUMENT: "--microbatch-group-size-per-virtual-pipeline-stage"}
"""Flags of destinations with a different name."""
_NEGATED = {"gradient_accumulation_fusion": "--no-gradient-accumulation-fusion"}
"""Flags that switch a destination off, by destination."""
RECOMPUTE_ARGUMENTS = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")


def sizes(plan: Plan) -> dict[str, ArgumentValue]:
    """Return Megatron's argument destinations and their values for the plan's layout."""
    layout = plan.layout
    experts = any(module.num_experts for module in plan.model.modules)
    return {
        **layout.megatron_sizes,
        # Overrides the script: without a value, Megatron uses the tensor size, like the plan.
        **({EXPERT_TENSOR_ARGUMENT: layout.ranks_of_expert} if experts and layout.tensor_size > 1 else {}),
        "micro_batch_size": layout.micro_batch_size,
        "global_batch_size": plan.global_batch_size,
        "sequence_parallel": layout.sequence_parallel,
        "use_distributed_optimizer": layout.distributed_optimizer,
        "overlap_grad_reduce": layout.overlap_gradient_reduce,
        **({PAIRS_ARGUMENT: True} if layout.paired else {}),
    }


def recompute_arguments(kind: str, num_layers: int = 0) -> dict[str, ArgumentValue]:
    """Return Megatron's argument destinations and values of a recompute kind (``spec.recompute``).

    ``num_layers``: with ``full``, recompute the first ``num_layers`` of every chunk, one by one; 0 recomputes all.
    """
    if size := policy_of(kind).layers_per_group:
        method, number = ("block", num_layers) if size == 1 and num_layers else ("uniform", size)
        return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": number}
    if kind == "none":
        return {}
    modules = policy_of(kind).modules
    return {"recompute_granularity": "selective", **({"recompute_modules": list(modules)} if modules else {})}


def kind_everywhere(plan: Plan) -> str | None:
    """Return the recompute kind of all layers; ``None`` without any, and for ``full`` in one module, set by stage.

    Raises ``PlanError`` if stages differ in it: Megatron's flags apply to every layer of every rank.
    """
    kinds = {
        kind: tuple(plan.recomputed_of(module.name, kind) for module in plan.model.modules)
        for kind in sorted(plan.recompute_kinds)
    }
    layers = tuple(plan.layers_of(module.name) for module in plan.model.modules)
    if not kinds or (set(kinds) == {"full"} and len(layers) == 1):
        return None
    kind, rows = next(iter(kinds.items()))
    if len(kinds) > 1 or rows != layers:
        raise PlanError(
            f"the plan recomputes {', '.join(policy_of(kind).words for kind in kinds)} in some layers only; "
            "Megatron's flags express that only for whole layers (full) of one model, or for all layers. Edit the "
            "plan, or search it again."
        )
    return kind


def pipeline_layout(plan: Plan, num_mtp_layers: int = 0) -> str:
    """Return ``--pipeline-model-parallel-layout`` of a language model: ``Et*5|t*11|t*9L``, one part per virtual stage.

    Stages are listed in chain order, in which Megatron assigns virtual stages. ``num_mtp_layers``:
    layers of multi-token prediction (``m``). They run on the stage where the plan has them; by default on the last
    stage, before the loss, as without a layout.
    """
    if len(plan.model.modules) != 1:
        raise PlanError("a pipeline layout string describes one module; multimodal hosts read model.json instead.")
    (module,) = plan.model.modules
    counts = plan.layers_of(module.name)
    parts = [f"t*{count}" if count else "" for count in counts]
    parts[0] = "E" + parts[0]
    apart = ModulePlacement.of_plan(plan).prediction_stage
    if apart is not None and not num_mtp_layers:
        raise PlanError(
            f"the plan has layers of multi-token prediction on virtual stage {apart}, and the script trains none "
            "(--mtp-num-layers). Plan this model again."
        )
    check_prediction(plan.model, plan.layout, ModulePlacement.of_plan(plan))
    parts[-1 if apart is None else apart] += "m" * num_mtp_layers
    parts[-1] += "L"
    return "|".join(parts)


def stage_arguments(plan: Plan, arguments: argparse.Namespace) -> dict[str, int | str | None]:
    """Return Megatron's destinations and values for the plan's split, in a form that the release supports.

    Empty if Megatron's default is the same. Raises ``PlanError`` for a split that it cannot run.
    """
    layout = plan.layout
    if pattern := hybrid_pattern(arguments):
        return {PATTERN_ARGUMENT: cut_pattern(pattern, plan.layers_of(plan.model.modules[0].name))}
    if layout.num_virtual_stages == 1:
        return {}
    if len(plan.model.modules) > 1:
        return _even_split_of_two_models(plan)
    counts = plan.layers_of(plan.model.modules[0].name)
    if takes_layout_strings(arguments):
        mtp = int(getattr(arguments, "mtp_num_layers", None) or 0)
        return {LAYOUT_ARGUMENT: pipeline_layout(plan, mtp), CHUNK_SIZE_ARGUMENT: None}
    refuse_ends_alone(counts)
    if is_mindspeed_llm(arguments):
        return split_arguments(counts, layout.virtual_size)
    return arguments_of_row(counts, layout.pipeline_size, layout.virtual_size)


def refuse_ends_alone(counts: Sequence[int]) -> None:
    """Raise ``PlanError`` if a stage of the only module has no layer: only layout strings can express that."""
    if not all(counts):
        raise PlanError(
            f"the plan has {list(counts)} layers on its stages: an embedding or an output layer alone, which only "
            "Megatron's --pipeline-model-parallel-layout can express. Plan again with --no-standalone-ends."
        )


def group_arguments(plan: Plan, arguments: argparse.Namespace) -> dict[str, int | str | None]:
    """Return Megatron's destination and value for the plan's group size; nothing without virtual stages.

    Raises ``PlanError`` if the release of ``arguments`` runs only groups of the pipeline size.
    """
    layout = plan.layout
    if layout.schedule != "interleaved":
        return {}
    size = layout.microbatch_group_size or layout.pipeline_size
    if hasattr(arguments, GROUP_ARGUMENT):
        return {GROUP_ARGUMENT: None if size == layout.pipeline_size else size}
    if size != layout.pipeline_size:
        raise PlanError(
            f"the plan runs {size} microbatches of a chunk in a row, and this Megatron always runs "
            f"{layout.pipeline_size}: it has no {_FLAGS[GROUP_ARGUMENT]}. Set layout.microbatch_group_size to 0 in the "
            "plan and simulate it, or use megatron-core 0.10 or newer."
        )
    return {}


def check_pairs(plan: Plan, arguments: argparse.Namespace) -> None:
    """Raise ``PlanError`` if the plan uses combined 1F1B and this Megatron lacks it."""
    if plan.layout.paired and not hasattr(arguments, PAIRS_ARGUMENT):
        raise PlanError(
            "the plan runs combined 1F1B (layout.paired), and this Megatron has no --overlap-moe-expert-parallel-comm: "
            "search it again without that flag, or use megatron-core 0.14 or newer."
        )


def takes_pairs(plan: Plan) -> bool:
    """Return whether Megatron accepts combined 1F1B under ``plan``: experts on several ranks, one stage or several
    chunks per rank, no full recompute."""
    layout = plan.layout
    interleaved = layout.pipeline_size == 1 or layout.virtual_size > 1
    return layout.expert_size > 1 and interleaved and not any(kind.startswith("full") for kind in plan.recompute_kinds)


def _even_split_of_two_models(plan: Plan) -> dict[str, int | str | None]:
    *encoders, decoder = plan.model.modules
    planned = {module.name: plan.layers_of(module.name) for module in plan.model.modules}
    if planned != rows_of_two_models(plan.layout, {name: sum(row) for name, row in planned.items()}):
        misplaced = [module.name for module in encoders if any(planned[module.name][1:])]
        raise PlanError(
            f"this script runs {', '.join(module.name for module in encoders)} on the first stage and equally many "
            f"layers of {decoder.name} on every stage; the plan has {list(planned[decoder.name])} of them"
            + (f", and {misplaced[0]} on later stages" if misplaced else "")
            + ". Search it again."
        )
    return {}


def native_flags(plan: Plan, stages: Mapping[str, int | str | None] | None = None) -> list[str]:
    """Return the plan as command line words of Megatron, for scripts that do not load plan.json.

    ``stages``: the result of ``stage_arguments``.
    """
    kept = ("micro_batch_size", "global_batch_size", EXPERT_TENSOR_ARGUMENT, *(stages or ()))
    return flag_words({**sizes(plan), **(stages or {})}, kept)


def flag_words(values: Mapping[str, object], kept: Collection[str]) -> list[str]:
    """Return argument destinations and values as command line words, without Megatron's defaults.

    ``kept``: destinations whose value is written even if it is 1.
    """
    words: list[str] = []
    for destination, value in values.items():
        flag = _FLAGS.get(destination, flag_of(destination))
        if value is True:
            words.append(flag)
        elif value is False and destination in _NEGATED:
            words.append(_NEGATED[destination])
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        elif value not in (False, None) and (value != 1 or destination in kept):
            words += [flag, str(value)]
    return words


def model_keys(plan: Plan, module: str) -> dict[str, ArgumentValue | list[int] | list[list[int]]]:
    """Return the keys of a module's block of model.json: layers and recomputed layers per stage (per chunk with
    VPP)."""
    others = {kind for stage in plan.stages for kind in stage.recompute.get(module, {})} - {"full"}
    if others:
        raise PlanError(
            f"the plan recomputes {', '.join(policy_of(kind).words for kind in sorted(others))} in {module}, "
            "which no key of model.json holds per stage: only whole layers (full) can be applied."
        )
    layers = list(plan.layers_of(module))
    full = list(plan.recomputed_of(module, "full"))
    keys: dict[str, ArgumentValue | list[int] | list[list[int]]] = {"pipeline_num_layers": _by_chunk(plan, layers)}
    if any(full):
        keys |= {
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": _by_chunk(plan, full),
        }
    return keys


def _by_chunk(plan: Plan, values: list[int]) -> list[int] | list[list[int]]:
    """Return a flat list without VPP; with it, one list over the pipeline ranks per chunk, as MindSpeed-MM writes
    it."""
    if plan.layout.virtual_size == 1:
        return values
    width = plan.layout.pipeline_size
    return [values[start : start + width] for start in range(0, len(values), width)]
