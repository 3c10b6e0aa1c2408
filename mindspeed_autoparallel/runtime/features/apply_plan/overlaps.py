"""Switches of a training under a plan: the plan's overlaps, the script's own as far as Megatron allows them with it,
and a report of the script's switches that differ from those that the plan was priced with."""

from __future__ import annotations

import argparse
import importlib.util
import math

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.predict.megatron_arguments import switches_of_arguments
from mindspeed_autoparallel.runtime.first_rank import print_once
from mindspeed_autoparallel.runtime.megatron.layout_arguments import (
    EXPERT_TENSOR_ARGUMENT,
    PAIRS_ARGUMENT,
    ArgumentValue,
    takes_pairs,
)
from mindspeed_autoparallel.runtime.megatron.mindspeed import is_mindspeed_mm
from mindspeed_autoparallel.spec.plan import Plan
from mindspeed_autoparallel.units import format_us

_NEED_PAIRS = ("delay_wgrad_compute", "ep_overlap_early_attn_memory_release")
"""Switches for which Megatron asserts combined 1F1B."""
_WITH_STEP = "overlap_param_gather_with_optimizer_step"
_COMPARED = (
    *("precision", "attention", "cross_entropy_fusion", "grouped_gemm", "grad_reduce_in_bf16", "fp8_param_gather"),
    *("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "optimizer_cpu_offload"),
)
"""Switches of a request that move time or memory by more than a few percent."""
_OTHERWISE = dict.fromkeys(("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), "fp32")
"""Values in a script that does not set them."""
_RING, _BOTH = "p2p", "a2a+p2p"
_KEPT = "kept from the script: {}. The plan was priced without it, so steps may be faster than predicted."


def kept_overlap(plan: Plan, arguments: argparse.Namespace) -> dict[str, ArgumentValue]:
    """Return the script's own overlaps of the data-parallel exchange, as far as Megatron allows them under ``plan``."""
    layout = plan.layout
    reduce = layout.overlap_gradient_reduce or bool(getattr(arguments, "overlap_grad_reduce", False))
    gather = layout.overlap_parameter_gather or bool(getattr(arguments, "overlap_param_gather", False))
    kept: dict[str, ArgumentValue] = {"overlap_grad_reduce": reduce}
    if hasattr(arguments, "overlap_param_gather"):
        # Megatron asserts these conditions, and virtual stages for the flag below.
        legacy = bool(getattr(arguments, "use_legacy_models", False))
        kept["overlap_param_gather"] = gather and reduce and layout.distributed_optimizer and not legacy
        if legacy and layout.overlap_parameter_gather:
            print_once(
                "missing: --overlap-param-gather, with which the plan was priced: Megatron does not take it with "
                "--use-legacy-models. Steps may be slower than predicted; leave out --use-legacy-models."
            )
    if getattr(arguments, _WITH_STEP, False):
        kept[_WITH_STEP] = bool(kept["overlap_param_gather"]) and layout.virtual_size > 1
    if reduce and not layout.overlap_gradient_reduce:
        print_once(_KEPT.format("--overlap-grad-reduce"))
    return kept


def flags_of_other_layouts(plan: Plan, arguments: argparse.Namespace) -> dict[str, ArgumentValue]:
    """Return changed arguments: flags that the host accepts only with the script's own layout are off, and what the
    plan's layout needs is on."""
    off: dict[str, ArgumentValue] = {}
    sizes = getattr(arguments, "hierarchical_context_parallel_sizes", None)
    if sizes and math.prod(sizes) != plan.layout.context_size:
        kinds = [_RING if kind == _BOTH else kind for kind in getattr(arguments, "cp_comm_type", None) or [_RING]]
        off |= {"hierarchical_context_parallel_sizes": None, "cp_comm_type": kinds}
    if plan.layout.pipeline_size > 1 and is_mindspeed_mm():
        # MindSpeed-MM's samples differ in length; without it stages exchange tensors of --seq-length.
        off |= {"variable_seq_lengths": True} if hasattr(arguments, "variable_seq_lengths") else {}
    if getattr(arguments, "recompute_in_advance", False):
        # MindSpeed asserts virtual stages and the script's own number of recomputed layers, which a plan replaces.
        off["recompute_in_advance"] = False
    # Megatron checks these when it makes its configuration, after validating the arguments.
    if plan.layout.virtual_size == 1 and getattr(arguments, "overlap_p2p_comm_warmup_flush", False):
        off["overlap_p2p_comm_warmup_flush"] = False
    if plan.layout.pipeline_size == 1 and getattr(arguments, "defer_embedding_wgrad_compute", False):
        off["defer_embedding_wgrad_compute"] = False
    experts = any(module.num_experts for module in plan.model.modules)
    if getattr(arguments, EXPERT_TENSOR_ARGUMENT, None) and not (experts and plan.layout.tensor_size > 1):
        # Without a value Megatron uses the tensor size.
        off[EXPERT_TENSOR_ARGUMENT] = None
    return off


def tensor_overlap(plan: Plan, arguments: argparse.Namespace) -> dict[str, ArgumentValue]:
    """Return the overlap of tensor parallelism that the plan was priced with, if Megatron supports it; otherwise print
    what is missing."""
    if not plan.layout.overlap_tensor_parallel or getattr(arguments, "tp_comm_overlap", False):
        return {}
    lacks = {
        "this Megatron has no such flag": not hasattr(arguments, "tp_comm_overlap"),
        "it needs --sequence-parallel": not plan.layout.sequence_parallel,
        "it needs --transformer-impl transformer_engine": getattr(arguments, "transformer_impl", "") == "local",
        "Transformer Engine is not installed": importlib.util.find_spec("transformer_engine") is None,
        "layers with experts do not support it": bool(getattr(arguments, "num_experts", None)),
    }
    missing = [reason for reason, holds in lacks.items() if holds]
    if not missing:
        return {"tp_comm_overlap": True}
    cost = "Steps may be slower than predicted; plan with --train tp_comm_overlap=false to see by how much."
    if slower_us := plan.extra.unoverlapped_us:
        predicted_us = plan.step.total_us
        cost = (
            f"Without it the prediction is {format_us(slower_us)} a step in place of {format_us(predicted_us)} "
            f"({slower_us / predicted_us - 1:+.1%})."
        )
    print_once(f"missing: --tp-comm-overlap, with which the plan was priced ({missing[0]}). {cost}")
    return {}


def print_other_switches(plan: Plan, arguments: argparse.Namespace) -> None:
    """Print the switches of the script that differ from those of the plan's computed costs."""
    planned = plan.profile.train
    try:
        own = switches_of_arguments(vars(arguments)) if planned else {}
    except ConfigError:
        return  # a training that is not modelled has no switches to compare
    both = [(name, planned[name], own.get(name, _OTHERWISE.get(name, False))) for name in _COMPARED if name in planned]
    if differ := [f"{name} {has} (planned: {wanted})" for name, wanted, has in both if wanted != has]:
        print_once(
            f"switches of the script that the plan was not priced with: {', '.join(differ)}. Step and peak may differ "
            "from the prediction; `plan --script` writes the plan's own flags."
        )


def print_other_balance(plan: Plan, arguments: argparse.Namespace, micro_batch_size: int | None) -> None:
    """Warn if experts are balanced over other samples than with the script's ``micro_batch_size``: losses differ."""
    types = getattr(arguments, "moe_router_load_balancing_type", None) or ()
    over_microbatch = sorted({"aux_loss", "sinkhorn"}.intersection([types] if isinstance(types, str) else types))
    planned = plan.layout.micro_batch_size
    if over_microbatch and getattr(arguments, "num_experts", None) and micro_batch_size not in (None, planned):
        print_once(
            f"experts are balanced over a microbatch (--moe-router-load-balancing-type {' '.join(over_microbatch)}), "
            f"which has {planned} samples, {micro_batch_size} in the script: losses differ from the script's, as with "
            f"--micro-batch-size {planned} and no plan."
        )


def kept_pairs(plan: Plan, arguments: argparse.Namespace) -> dict[str, ArgumentValue]:
    """Return the arguments that switch the script's combined 1F1B off if Megatron does not allow it under ``plan``."""
    layout = plan.layout
    if layout.paired or not getattr(arguments, PAIRS_ARGUMENT, False):
        return {}
    if takes_pairs(plan):
        print_once(_KEPT.format("--overlap-moe-expert-parallel-comm"))
        return {}
    return {name: False for name in (PAIRS_ARGUMENT, *_NEED_PAIRS) if hasattr(arguments, name)}
