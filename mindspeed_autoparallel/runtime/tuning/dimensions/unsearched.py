"""What is not searched anywhere, with the reason."""

from __future__ import annotations

from mindspeed_autoparallel.runtime.tuning.dimensions.asked import Asked

_NOT_SEARCHED = (
    ("ZeRO-2/3 (Megatron FSDP)", "use_megatron_fsdp", "its shards and prefetching are not in the cost model"),
    ("recompute modules beyond core attention", "recompute_modules", "traced as the script gives them, not varied"),
    ("activation offload", "fine_grained_activation_offloading", "its transfers are not in the cost model"),
    ("parameter-gather overlap", "overlap_param_gather", "kept as the script gives it: not in the cost model"),
    ("MoE all-to-all overlap", "overlap_moe_expert_parallel_comm", "not in the cost model"),
    ("tensor-parallel overlap", "tp_comm_overlap", "needs Transformer Engine, whose kernels cannot be traced"),
    ("expert capacity and token dropping", "moe_expert_capacity_factor", "changes what is trained: kept as given"),
)


def name_unsearched(asked: Asked) -> None:
    """Add each of them to ``left_out``."""
    for title, destination, reason in _NOT_SEARCHED:
        missing = f"this Megatron has no --{destination.replace('_', '-')}"
        asked.left_out[title] = reason if asked.has(destination) else missing
    asked.left_out["MC2"] = (
        "needs an Ascend NPU" if asked.device_name != "npu" else "not in the cost model; switch it on yourself"
    )
