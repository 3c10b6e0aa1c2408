"""Switches that only accelerators run: which of them this Megatron, device and software have, and why not the others.

They cannot be traced here, so their effect is computed (``planner.tuner.modelled``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.cost.overlap import ATTENTION, EXPERTS, LayerShape, Offload, offloaded
from mindspeed_autoparallel.errors import flag_of
from mindspeed_autoparallel.planner.tuner.modelled import (
    Group,
    Switch,
    activation_offload,
    expert_overlap,
    tensor_overlap,
    tokens_sent_once,
    unchanged,
)
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.variants import SearchContext

_FUSED_CHUNKS = 2
"""Assumed number of pieces of MC2's fused operators: it is not documented, so the smallest possible."""
_SHARDING = "ZeRO-2/3 (Megatron FSDP)"
_OFFLOAD = "activation offload"
_TENSOR = "tensor-parallel overlap"
_PAIRS = "MoE all-to-all overlap"
_FLEX = "flex dispatcher (DeepEP)"


@dataclass(frozen=True, kw_only=True)
class Offered:
    """Switches worth modelling."""

    groups: tuple[Group, ...] = ()
    """At most one switch of each group is on; groups combine freely."""
    alone: Group = ()
    """Switches that are on without any of the others."""

    @property
    def titles(self) -> list[str]:
        """Return the switches' names for display."""
        return [switch.title for group in (*self.groups, self.alone) for switch in group]


@dataclass(frozen=True, kw_only=True)
class Target:
    """The training device and its software."""

    device: Device | None
    """Its catalogue entry, if there is one."""
    installed: Callable[[str], bool]
    """Whether a Python package is installed; always true if only the device's catalogue entry is known."""


def modelled_switches(context: SearchContext, target: Target) -> Offered:
    """Return the available switches; the reasons for the others go to ``context.left_out``."""
    offered: dict[str, list[Switch]] = {}
    for title, choose in (
        (_TENSOR, _tensor_overlap),
        (_PAIRS, _expert_overlap),
        (_FLEX, _flex),
        (_OFFLOAD, _offload),
        (_SHARDING, _sharding),
    ):
        found = choose(context, target)
        if isinstance(found, str):
            context.left_out[title] = found
            found = []
        offered[title] = found
    groups = (offered[_TENSOR], offered[_PAIRS] + offered[_FLEX], offered[_OFFLOAD])
    # FSDP needs CUDA_DEVICE_MAX_CONNECTIONS unset, tensor overlap needs it at 1; whether FSDP works with offload is
    # not documented.
    return Offered(groups=tuple(group for group in groups if group), alone=offered[_SHARDING])


Answer = list[Switch] | str
"""Switches, or the reason why there is none."""


def _tensor_overlap(context: SearchContext, target: Target) -> Answer:
    if context.request.num_experts:
        return "only attention's products would overlap in layers with experts, which is not modelled"
    if context.device_name == "npu":
        reason = _missing(context, "use_ascend_mc2", "MindSpeed has it")
        pieces = tensor_overlap(lambda at: _FUSED_CHUNKS)
        switch = Switch(title="MC2", settings={"use_ascend_mc2": True}, change=pieces)
    else:
        reason = _not_cuda(context) or _missing(context, "tp_comm_overlap") or _no_transformer_engine(context, target)
        # Transformer Engine's ring exchange sends a rank's shard at a time.
        shards = tensor_overlap(lambda at: at.tensor_size)
        switch = Switch(title=_TENSOR, settings={"tp_comm_overlap": True}, change=shards)
    return reason or [switch]


def _expert_overlap(context: SearchContext, target: Target) -> Answer:
    reason = (
        _no_experts(context)
        or _not_cuda(context)
        or _missing(context, "overlap_moe_expert_parallel_comm", "0.14 and newer have it")
    )
    if not reason and not (context.value("bf16") or context.value("fp16")):
        reason = "Megatron has it for bf16 and fp16 only"
    if not reason and context.value("moe_shared_expert_overlap"):
        reason = "Megatron refuses it with --moe-shared-expert-overlap, which the script has"
    if not reason and (context.value("mtp_num_layers") or 0) > 1:
        reason = "Megatron refuses it with more than one MTP layer"
    if not reason and _graphs(context):
        reason = "with CUDA graphs it is not modelled"
    if reason:
        return reason
    settings = {"overlap_moe_expert_parallel_comm": True}
    return [Switch(title=_PAIRS, settings=settings, change=expert_overlap, paired=True)]


def _flex(context: SearchContext, target: Target) -> Answer:
    reason = _no_experts(context) or _not_cuda(context)
    backend = "moe_flex_dispatcher_backend" if context.has("moe_flex_dispatcher_backend") else "moe_enable_deepep"
    reason = reason or _missing(context, backend)
    if not reason and not target.installed("deep_ep"):
        reason = "its kernels are DeepEP's, which is not installed here"
    if not reason and context.value("moe_pad_expert_input_to_capacity"):
        reason = "Megatron refuses it with --moe-pad-expert-input-to-capacity, which the script has"
    if reason:
        return reason
    chosen: dict[str, object] = {backend: "deepep" if backend == "moe_flex_dispatcher_backend" else True}
    return [
        Switch(
            title=_FLEX,
            settings={"moe_token_dispatcher_type": "flex", **chosen},
            change=tokens_sent_once(int(context.value("moe_router_topk") or 1)),
        )
    ]


def _offload(context: SearchContext, target: Target) -> Answer:
    if context.device_name == "npu":
        reason = _missing(context, "swap_attention", "MindSpeed has it")
    else:
        reason = (
            _not_cuda(context)
            or _missing(context, "fine_grained_activation_offloading", "0.16 and newer have it")
            or _no_transformer_engine(context, target)
        )
    if not reason and context.value("multi_latent_attention"):
        reason = "the activations that multi-latent attention saves are not modelled"
    if not reason and _graphs(context):
        reason = "with CUDA graphs it is not modelled"
    if not reason and (target.device is None or target.device.host_link_gb_per_s is None):
        name = target.device.name if target.device else "this device"
        reason = f"the device catalogue has no host link of {name}: give host_link_gb_per_s with --profile-device-file"
    if reason:
        return reason
    assert target.device is not None
    assert target.device.host_link_gb_per_s is not None
    rate = target.device.host_link_gb_per_s * 1e9
    if context.device_name == "npu":
        return [
            Switch(
                title="swap of attention's activations",
                settings={"swap_attention": True},
                change=activation_offload(_bytes_of(context, ATTENTION), rate),
            )
        ]
    everywhere = context.request.num_experts and context.value("moe_layer_freq", 1) == 1
    choices = [ATTENTION, *([EXPERTS, ATTENTION + EXPERTS] if everywhere else [])]
    return [
        Switch(
            title=f"{_OFFLOAD} ({', '.join(modules)})",
            settings={"fine_grained_activation_offloading": True, "offload_modules": list(modules)},
            # Without this variable Transformer Engine 2.10 and later also moves weights.
            environment={"NVTE_CPU_OFFLOAD_V1": "1"},
            change=activation_offload(_bytes_of(context, modules), rate),
        )
        for modules in choices
    ]


def _bytes_of(context: SearchContext, modules: tuple[str, ...]) -> Callable[[MeasuredAt], Offload]:
    """Return the bytes that ``modules`` of a layer save at a point, by the script's sizes; tokens are routed evenly.

    Experts under tensor parallelism are left out: the bytes depend on whether they are split, and variants differ
    there.
    """
    request = context.request
    hidden = int(context.value("hidden_size", 0))
    head = int(context.value("kv_channels") or hidden // request.num_heads)
    width = int(context.value("moe_ffn_hidden_size") or request.ffn_hidden_size) * (2 if context.value("swiglu") else 1)

    def found(at: MeasuredAt) -> Offload:
        if at.tensor_size > 1 and set(modules) & set(EXPERTS):
            return Offload(moved_bytes=0, freed_bytes=0)
        tokens = at.micro_batch_size * request.sequence_length // at.context_size
        rows = tokens * int(context.value("moe_router_topk") or 1)
        shape = LayerShape(
            query=tokens * request.num_heads * head // at.tensor_size,
            key_value=tokens * max(1, request.num_query_groups // at.tensor_size) * head,
            expert_input=rows * hidden,
            expert_hidden=rows * width,
            element_bytes=2 if context.value("bf16") or context.value("fp16") else 4,
        )
        return offloaded(shape, modules)

    return found


def _sharding(context: SearchContext, target: Target) -> Answer:
    reason = _not_cuda(context) or _missing(context, "use_megatron_fsdp", "0.14 and newer have it")
    if not reason and context.value("optimizer", "adam") not in ("adam", "sgd"):
        reason = f"Megatron's FSDP has no {context.value('optimizer')} optimizer"
    if not reason and context.value("use_torch_fsdp2"):
        reason = "the script uses --use-torch-fsdp2"
    if not reason and not target.installed("einops"):
        reason = "Megatron's FSDP needs the package einops, which is not installed here"
    if reason:
        return reason
    settings: dict[str, object] = {"use_megatron_fsdp": True, "gradient_accumulation_fusion": False}
    if context.has("ckpt_format"):
        settings["ckpt_format"] = "fsdp_dtensor"
    if context.has("megatron_fsdp_main_grads_dtype") and context.value("bf16"):
        # Megatron accumulates bf16 training's gradients in fp32; FSDP by itself would not.
        settings["megatron_fsdp_main_grads_dtype"] = "fp32"
    own = context.value("suggested_communication_unit_size")
    unit = int(own) if own else None if context.has("suggested_communication_unit_size") else 10**9
    return [
        Switch(
            title="ZeRO-3 (Megatron FSDP)" if parameters else "ZeRO-2 (Megatron FSDP)",
            settings=settings,
            environment={"CUDA_DEVICE_MAX_CONNECTIONS": ""},
            change=unchanged,
            shards_parameters=parameters,
            communication_unit=unit,
        )
        for parameters in (False, True)
    ]


def _not_cuda(context: SearchContext) -> str:
    return "" if context.device_name == "cuda" else "needs NVIDIA GPUs"


def _no_experts(context: SearchContext) -> str:
    return "" if context.request.num_experts else "the model has no experts"


def _missing(context: SearchContext, destination: str, remark: str = "") -> str:
    if context.has(destination) and context.value(destination) is True:
        return f"the script sets {flag_of(destination)}: kept, and not in the predictions"
    return context.missing(destination, remark)


def _no_transformer_engine(context: SearchContext, target: Target) -> str:
    if context.value("transformer_impl", "transformer_engine") != "transformer_engine":
        return "needs --transformer-impl transformer_engine, which the script does not use"
    return "" if target.installed("transformer_engine") else "needs Transformer Engine, which is not installed here"


def _graphs(context: SearchContext) -> bool:
    return bool(context.value("enable_cuda_graph")) or context.value("cuda_graph_impl", "none") not in ("none", None)
