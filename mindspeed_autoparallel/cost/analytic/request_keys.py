"""Keys of a prediction request: modelled keys, keys that change no figure, and refused ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_autoparallel.cost.analytic.fields import is_list, is_section, part
from mindspeed_autoparallel.cost.analytic.spellings import ALIASES, INFORMATION
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import shown

KNOWN = {
    section: frozenset(names.split())
    for section, names in {
        "model": "type num_layers hidden heads kv_heads head_size ffn seq mean_seq vocab swiglu causal tied_embeddings "
        "num_experts topk moe_ffn shared_expert_ffn expert_bias expert_clamp num_dense_layers moe_layer_freq "
        "moe_latent capacity_factor dispatcher mla mtp_layers layer_pattern mamba linear_attention dsa window "
        "windowed_share attention_gate qk_norm post_norm activation logit_softcap residual_blocks linear_bias "
        "vision_encoder",
        "hw": "gpu num_gpus gpus_per_node inter_node_gbps",
        "parallel": "tp pp dp cp ep etp vpp sp dist_opt cp_type ulysses_degree num_layer_list pipeline_layout "
        "noop_layers first_stage_layers last_stage_layers account_for_embedding account_for_loss "
        "microbatch_group_size tp_2d encoder_layer_list layers_per_chunk fsdp sharding_strategy",
        "train": "gbs mbs recompute recompute_method recompute_num_layers recompute_modules recompute_per_pp_rank "
        "recompute_extra precision stack software attention cross_entropy_fusion overlap_grad_reduce tp_comm_overlap "
        "moe_a2a_overlap reuse_fp32_param offload lora packing mean_document variable_seq task dropout loss_slices "
        "loss_in_place own_masks rope_fusion bias_activation_fusion grad_reduce_in_bf16 fp8_param_gather "
        "fp8_dot_product_attention main_params_dtype exp_avg_dtype exp_avg_sq_dtype optimizer optimizer_cpu_offload "
        "optimizer_offload_fraction cpu_offloading_num_layers grouped_gemm gradient_accumulation_fusion cuda_graph "
        "routing_imbalance",
    }.items()
}
"""Keys of a request's sections that describe the run."""

SILENT = {
    "model": frozenset({"name", "params", "params_b", "norm", "position", "router", "num_shared_experts", "model_id"}),
    "hw": frozenset({"gpu_stated", "gpu_hint", "platform", "num_gpus_source"}),
    "parallel": frozenset({"cp_window", "key"}),
    "train": frozenset({"flags", "overlap_param_gather", "deterministic", "flex_backend", "dispatcher", "backend"}),
}
"""Keys that change no figure, or too little to model: names, and overlaps that follow from others."""

_REFUSED: Mapping[str, Mapping[str, str]] = {
    "model": {
        "mhc": "hyper-connections are not modelled",
        "zero_experts": "experts that do nothing are not modelled",
        "kv_share_factor": "key and value states shared between layers are not modelled",
        "diffusion": "diffusion models are not modelled",
    },
    "parallel": {
        "distributed_optimizer_instances": "several instances of the distributed optimizer are not modelled",
        "num_distributed_optimizer_instances": "several instances of the distributed optimizer are not modelled",
        "ep_fsdp": "fully sharded parameters are not modelled",
        "strategy": "DeepSpeed's strategies are not modelled",
        "encoder_tp": "encoders with a layout of their own are planned by --hetero-parallel, not predicted here",
        "encoder_pp": "encoders with a layout of their own are planned by --hetero-parallel, not predicted here",
    },
    "train": {
        "distillation": "distillation is not modelled",
        "teacher": "distillation is not modelled",
        "kd": "distillation is not modelled",
    },
}
_HARMLESS: tuple[Any, ...] = (None, False, 0, 1, "", "none", "1f1b")
SCHEDULES = ("1f1b", "1f1b-interleaved", "interleaved")
OPTIMIZERS = ("adam", "adamw")


def unknown_keys(request: Mapping[str, object]) -> list[str]:
    """Return unknown keys of the request and its sections, such as misspelt ones, which have no effect."""
    beside = [str(key) for key in request if key not in KNOWN and key not in INFORMATION]
    return beside + [
        f"{section}.{key}"
        for section, known in KNOWN.items()
        for key in part(request, section)
        if key not in known
        and key not in ALIASES[section]
        and key not in SILENT[section]
        and key not in _REFUSED.get(section, {})
        and not (section == "parallel" and key == "schedule")
    ]


def check_sections(request: Mapping[str, object]) -> None:
    """Raise ``ConfigError`` if a section of a request is no object."""
    for name in ("model", "hw", "parallel", "train"):
        value = request.get(name)
        if value is not None and not is_section(value):
            raise ConfigError(f"{name} is {shown(value)}; it must be an object of keys and values.")


def refuse_unmodelled(request: Mapping[str, object]) -> None:
    """Raise ``ConfigError`` for a key that changes the answer in a way that is not modelled."""
    check_sections(request)
    for section, reasons in _REFUSED.items():
        for key, reason in reasons.items():
            value = part(request, section).get(key)
            if value is True or is_list(value) or is_section(value) or value not in _HARMLESS:
                raise ConfigError(f"{section}.{key} is {shown(value)}: {reason}; the answer would be another run's.")
    schedule = part(request, "parallel").get("schedule")
    if schedule is not None and (not isinstance(schedule, str) or schedule not in SCHEDULES):
        raise ConfigError(f"parallel.schedule is {schedule!r}; known: {', '.join(SCHEDULES)}.")
    optimizer = part(request, "train").get("optimizer")
    if optimizer is not None and (not isinstance(optimizer, str) or optimizer not in OPTIMIZERS):
        raise ConfigError(f"train.optimizer is {optimizer!r}; known: {', '.join(OPTIMIZERS)}.")
