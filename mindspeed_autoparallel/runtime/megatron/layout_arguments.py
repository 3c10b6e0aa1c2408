"""A plan in the host's own words: Megatron flags, and the keys of model.json."""

from __future__ import annotations

from typing import Any

from mindspeed_autoparallel.errors import PlanError
from mindspeed_autoparallel.spec.plan import Plan
from mindspeed_autoparallel.spec.recompute import in_words, layers_per_group, modules_of

RECOMPUTE_ARGUMENTS = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")


def sizes(plan: Plan) -> dict[str, Any]:
    """Megatron's argument destinations and their values for the plan's layout."""
    layout = plan.layout
    return {
        **layout.megatron_sizes,
        "micro_batch_size": layout.micro_batch_size,
        "global_batch_size": plan.global_batch_size,
        "sequence_parallel": layout.sequence_parallel,
        "use_distributed_optimizer": layout.distributed_optimizer,
        "overlap_grad_reduce": layout.overlap_gradient_reduce,
    }


def recompute_arguments(kind: str, num_layers: int = 0) -> dict[str, Any]:
    """Megatron's argument destinations and values of a recompute kind (``spec.recompute``).

    ``num_layers``: the first so many of every chunk are recomputed one by one, where that is ``full``; 0: all of them.
    """
    if size := layers_per_group(kind):
        method, number = ("block", num_layers) if size == 1 and num_layers else ("uniform", size)
        return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": number}
    if kind == "none":
        return {}
    modules = modules_of(kind)
    return {"recompute_granularity": "selective", **({"recompute_modules": list(modules)} if modules else {})}


def kind_everywhere(plan: Plan) -> str | None:
    """The one recompute kind of all layers of a language model, where it is not single layers; ``None`` elsewhere.

    Raises ``PlanError`` where stages differ in it: flags of Megatron hold for every layer of every rank.
    """
    (module,) = plan.model.modules
    rows = [stage.recompute.get(module.name, {}) for stage in plan.stages]
    kinds = sorted({kind for row in rows for kind, count in row.items() if count})
    if not kinds or kinds == ["full"]:
        return None
    kind = kinds[0]
    if len(kinds) > 1 or plan.recomputed_of(module.name, kind) != plan.layers_of(module.name):
        raise PlanError(
            f"the plan recomputes {', '.join(in_words(kind) for kind in kinds)} in some layers only; Megatron's flags "
            "can say that of whole layers (full), and of all layers alike. Edit the plan, or search it again."
        )
    return kind


def pipeline_layout(plan: Plan) -> str:
    """``--pipeline-model-parallel-layout`` of a language model: ``Et*5|t*11|t*9L``, one part per virtual stage.

    Stages are listed in chain order, which is the order Megatron deals virtual stages in.
    """
    if len(plan.model.modules) != 1:
        raise PlanError("a pipeline layout string describes one module; multimodal hosts read model.json instead.")
    (module,) = plan.model.modules
    counts = plan.layers_of(module.name)
    parts = [f"t*{count}" if count else "" for count in counts]
    parts[0] = "E" + parts[0]
    parts[-1] += "L"
    return "|".join(parts)


def native_flags(plan: Plan) -> list[str]:
    """The plan as command line words of Megatron, for scripts that do not load plan.json."""
    words: list[str] = []
    for destination, value in sizes(plan).items():
        flag = "--" + destination.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value not in (False, 1) or destination in ("micro_batch_size", "global_batch_size"):
            words += [flag, str(value)]
    if len(plan.model.modules) == 1 and plan.layout.num_virtual_stages > 1:
        words += ["--pipeline-model-parallel-layout", pipeline_layout(plan)]
    return words


def model_keys(plan: Plan, module: str) -> dict[str, Any]:
    """What a module's block of model.json gets: layers and recomputed layers per stage (per chunk with VPP)."""
    others = {kind for stage in plan.stages for kind in stage.recompute.get(module, {})} - {"full"}
    if others:
        raise PlanError(
            f"the plan recomputes {', '.join(map(in_words, sorted(others)))} in {module}, which no key of model.json "
            "says per stage: whole layers (full) alone can be applied."
        )
    layers = list(plan.layers_of(module))
    full = list(plan.recomputed_of(module, "full"))
    keys: dict[str, Any] = {"pipeline_num_layers": _by_chunk(plan, layers)}
    if any(full):
        keys |= {
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": _by_chunk(plan, full),
        }
    return keys


def _by_chunk(plan: Plan, values: list[int]) -> list[int] | list[list[int]]:
    """A flat list without VPP; with it, one list over the pipeline ranks per chunk, as MindSpeed-MM writes it."""
    if plan.layout.virtual_size == 1:
        return values
    width = plan.layout.pipeline_size
    return [values[start : start + width] for start in range(0, len(values), width)]
