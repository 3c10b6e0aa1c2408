"""Ways to run the experts of a layer: token dispatcher, expert tensor parallel."""

from __future__ import annotations

from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.asked import Asked
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.ways import Way


def dispatchers(asked: Asked) -> list[Way]:
    """All-to-all and all-gather, whichever the script does not use itself."""
    if not asked.request.num_experts:
        return []
    own = asked.value("moe_token_dispatcher_type")
    return [
        Way(title=f"{kind} dispatcher", settings={"moe_token_dispatcher_type": kind})
        for kind in ("alltoall", "allgather")
        if own is not None and own != kind
    ]


def token_rearrangement(asked: Asked) -> list[Way]:
    """None: the fused kernels run on accelerators only, and no time of theirs is known."""
    if asked.request.num_experts:
        name = "fused token rearrangement (--moe-permute-fusion)"
        if not asked.has("moe_permute_fusion"):
            asked.left_out[name] = "this Megatron has no --moe-permute-fusion (0.12 and newer have it)"
        elif asked.device_name == "cpu":
            asked.left_out[name] = "its kernels run on GPUs (Transformer Engine) and NPUs (MindSpeed) only"
        else:
            asked.left_out[name] = "its kernels cannot be traced: kept as the script gives it, traced as if it were off"
    return []


def whole_experts(asked: Asked) -> list[Way]:
    """Experts that tensor ranks do not split."""
    if not asked.request.num_experts or asked.request.devices_per_node == 1:
        return []
    if asked.value("expert_tensor_parallel_size") is not None or not asked.has("expert_tensor_parallel_size"):
        asked.left_out["expert tensor parallel"] = "set by the script, or this Megatron has no such flag"
        return []
    return [
        Way(
            title="whole experts",
            settings={"expert_tensor_parallel_size": 1},
            matters=lambda point: point.tensor_size > 1,
        )
    ]
