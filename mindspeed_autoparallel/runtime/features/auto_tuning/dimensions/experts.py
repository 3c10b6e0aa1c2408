"""Ways to run the experts of a layer: token dispatcher, expert tensor parallel."""

from __future__ import annotations

from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.context import SearchContext
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.variants import Variant


def dispatchers(context: SearchContext) -> list[Variant]:
    """Offer all-to-all and all-gather, whichever the script does not use itself."""
    if not context.request.num_experts:
        return []
    own = context.value("moe_token_dispatcher_type")
    return [
        Variant(title=f"{kind} dispatcher", settings={"moe_token_dispatcher_type": kind})
        for kind in ("alltoall", "allgather")
        if own is not None and own != kind
    ]


def token_rearrangement(context: SearchContext) -> list[Variant]:
    """Offer none: the fused kernels run on accelerators only, and no time of theirs is known."""
    if context.request.num_experts:
        name = "fused token rearrangement (--moe-permute-fusion)"
        if not context.has("moe_permute_fusion"):
            context.left_out[name] = "this Megatron has no --moe-permute-fusion (0.12 and newer have it)"
        elif context.device_name == "cpu":
            context.left_out[name] = "its kernels run on GPUs (Transformer Engine) and NPUs (MindSpeed) only"
        else:
            context.left_out[name] = (
                "its kernels cannot be traced: kept as the script gives it, traced as if it were off"
            )
    return []


def whole_experts(context: SearchContext) -> list[Variant]:
    """Offer experts that tensor ranks do not split."""
    if not context.request.num_experts or context.request.devices_per_node == 1:
        return []
    if context.value("expert_tensor_parallel_size") is not None or not context.has("expert_tensor_parallel_size"):
        context.left_out["expert tensor parallel"] = "set by the script, or this Megatron has no such flag"
        return []
    return [
        Variant(
            title="whole experts",
            settings={"expert_tensor_parallel_size": 1},
            applies_to=lambda point: point.tensor_size > 1,
        )
    ]
