"""What is thrown away in forward and computed again in backward: modules of every layer, or whole layers."""

from __future__ import annotations

from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.context import SearchContext
from mindspeed_autoparallel.spec.recompute import RecomputePolicy

_TITLE = "recompute of "


def recompute_kinds(context: SearchContext) -> tuple[str, ...]:
    """Return the kinds that this Megatron has (``spec.recompute``, without what comes after a colon)."""
    if context.has("recompute_granularity"):
        return ("none", "selective", "full")
    context.left_out["recompute"] = "this Megatron has no --recompute-granularity"
    return ("none",)


def selective_kinds(context: SearchContext) -> dict[str, dict[str, object]]:
    """Return kinds that are traced beside none, with Megatron's arguments; whole layers follow from the plain trace.

    Each module alone, all that are cheap to compute again together, and those with each expensive one.
    """
    if not context.has("recompute_granularity"):
        return {}
    if not context.has("recompute_modules"):
        context.left_out["recompute modules"] = "this Megatron has no --recompute-modules: the core attention alone"
        return {str(RecomputePolicy.selective(())): {"recompute_granularity": "selective"}}
    cheap, dear = _cheap_modules(context), _dear_modules(context)
    sets: list[tuple[str, ...]] = [*((module,) for module in (*cheap, *dear)), tuple(cheap)]
    # The activation of experts is inside of them.
    sets += [(*(other for other in cheap if (module, other) != ("moe", "moe_act")), module) for module in dear]
    own = tuple(context.value("recompute_modules") or ())
    if own and not any(set(own) == set(modules) for modules in sets):
        sets.append(own)
    return {
        str(RecomputePolicy.selective(modules)): {
            "recompute_granularity": "selective",
            "recompute_modules": list(modules),
        }
        for modules in sets
    }


def _cheap_modules(context: SearchContext) -> list[str]:
    """Return those that pass over memory, with no matrix products but the attention's own."""
    found = ["core_attn", "layernorm"]
    if context.value("multi_latent_attention"):
        found.append("mla_up_proj")
    if context.request.num_experts:
        if context.value("moe_grouped_gemm"):
            found.append("moe_act")
        else:
            context.left_out[f"{_TITLE}moe_act"] = "Megatron has it with --moe-grouped-gemm only"
    return found


def _dear_modules(context: SearchContext) -> list[str]:
    if not context.request.num_experts:
        return ["mlp"]
    found = ["moe"]
    if not context.value("moe_shared_expert_intermediate_size"):
        context.left_out[f"{_TITLE}shared_experts"] = "the model has no shared experts"
    elif context.value("moe_shared_expert_overlap"):
        context.left_out[f"{_TITLE}shared_experts"] = "Megatron refuses it with --moe-shared-expert-overlap"
    else:
        found.append("shared_experts")
    return found
