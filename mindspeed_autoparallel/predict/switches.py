"""Switches that a plan without measurements turns on by default: the same for every command.

Distributed optimizer, sequence parallelism with TP above 1, fused kernels of today's software, gradient reduction and
parameter gathering overlapped; on NVIDIA devices, for dense language models, collectives of tensor
parallelism overlapped with products. ``predict.train_flags`` writes their flags.
"""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed_autoparallel.cost.analytic.model_shape import ModelShape
from mindspeed_autoparallel.cost.analytic.workload import OPERAND_BYTES
from mindspeed_autoparallel.errors import ConfigError

_OTHER_VENDORS = ("ascend", "910", "mi300", "mi355", "cpu")


def with_stated_switches(
    train: Mapping[str, object], model: ModelShape, device: str, *, alone: bool
) -> dict[str, object]:
    """Return the section ``train`` of a request with every switch stated. ``alone``: the model has no other module."""
    dense = not model.num_experts and all(kind.mixer == "attention" for kind in model.layers)
    # Transformer Engine overlaps user buffers of dense layers; Megatron refuses the switch beside experts.
    overlapped = alone and dense and not any(word in device.lower() for word in _OTHER_VENDORS)
    stated: dict[str, object] = {
        "stack": "megatron-core",
        "precision": "bf16",
        "attention": "fused",
        # Megatron-LM from 0.18 refuses Transformer Engine's kernel, and MindSpeed has none.
        "cross_entropy_fusion": False,
        "overlap_grad_reduce": True,
        "tp_comm_overlap": overlapped,
    }
    if model.num_experts:
        stated |= {"moe_a2a_overlap": False, "grouped_gemm": True}  # no plan's layout has hidden exchanges
    if (recipe := str(train.get("precision") or "").lower()) in OPERAND_BYTES:
        # Megatron gathers quantized parameters beside an optimizer on the host under delayed scaling alone.
        offloads = bool(train.get("optimizer_cpu_offload"))
        stated |= {"grad_reduce_in_bf16": True, "fp8_param_gather": recipe != "fp8_blockwise" and not offloads}
        if offloads and train.get("fp8_param_gather"):
            raise ConfigError(
                "train.optimizer_cpu_offload and train.fp8_param_gather: Megatron refuses both; drop one."
            )
    return {**stated, **{key: value for key, value in train.items() if value is not None}}
