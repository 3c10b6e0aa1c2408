"""Which dimensions are searched on this host, and why the others are not."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.runtime.tuning.request import MINIMUM_CONTEXT_TOKENS, TuningRequest
from mindspeed_autoparallel.tuning.traced.candidates import Dimensions

_MICRO_BATCHES = (1, 2, 4, 8)
_MAX_CONTEXT = 16
_WHOLE_EXPERTS = "whole experts"


@dataclass(frozen=True, kw_only=True)
class SearchPlan:
    """What is traced and searched."""

    points: tuple[MeasuredAt, ...]
    families: dict[str, dict[str, Any]]
    """Name to Megatron's argument destinations and values; the empty name is the script's own."""
    split_only: tuple[str, ...] = ()
    """Families that are the script's own where nothing is tensor parallel."""
    dimensions: Dimensions
    searched: dict[str, str]
    """Dimension to its values, for people."""
    left_out: dict[str, str]
    """Dimension, or a value of it, to the reason."""


def plan_search(request: TuningRequest, arguments: argparse.Namespace, device_name: str) -> SearchPlan:
    """Everything worth tracing for ``request`` with what the host's parser (``arguments``) and the device have."""
    left_out: dict[str, str] = {}
    tensor = _tensor_sizes(request, left_out)
    context = _context_sizes(request, left_out)
    expert = _expert_sizes(request, left_out)
    batches = _micro_batches(request, left_out)
    points = []
    for tp in tensor:
        for cp in context:
            for ep in expert:
                if request.num_ranks % (tp * cp) or (request.num_ranks // tp) % ep:
                    continue
                # Megatron trains experts under tensor parallelism only with sequence parallelism.
                sequence = (False,) if tp == 1 else (True,) if request.num_experts else (True, False)
                for split in sequence:
                    if split and request.sequence_length // cp % tp:
                        reason = _indivisible(request.sequence_length, tp * cp)
                        left_out[f"sequence parallelism TP {tp} CP {cp}"] = reason
                        continue
                    points += [
                        MeasuredAt(
                            tensor_size=tp, context_size=cp, expert_size=ep, micro_batch_size=mbs,
                            sequence_parallel=split,
                        )
                        for mbs in batches
                    ]  # fmt: skip
    families = _families(request, arguments, max(tensor), left_out)
    dimensions = _switches(arguments, left_out)
    _unsearched(arguments, device_name, left_out)
    searched = {
        "tensor parallel": _words(tensor),
        "sequence parallel": "on and off" if max(tensor) > 1 and not request.num_experts else "with tensor parallel",
        "pipeline stages": "every divisor of the ranks, uneven ones too"
        if dimensions.uneven_stages
        else "every divisor of the ranks that divides the layers",
        "virtual stages": _words(dimensions.virtual_sizes),
        "context parallel": _words(context),
        "expert parallel": _words(expert),
        "micro batch": _words(batches),
        "distributed optimizer (ZeRO-1)": _words(dimensions.distributed_optimizer),
        "overlap of gradient reduction": _words(dimensions.overlap_gradient_reduce),
        "recompute": ", ".join(dimensions.recompute) + " (full: the first layers of each stage)",
    }
    if len(families) > 1:
        searched["experts"] = ", ".join(name or "as in the script" for name in families)
    return SearchPlan(
        points=tuple(points), families=families, dimensions=dimensions, searched=searched, left_out=left_out,
        split_only=tuple(name for name in families if name == _WHOLE_EXPERTS),
    )  # fmt: skip


def _words(values: Any) -> str:
    names = {True: "on", False: "off"}
    return ", ".join(names[value] if isinstance(value, bool) else str(value) for value in values)


def _indivisible(number: int, parts: int) -> str:
    return f"{number} is not divisible by {parts}"


def _powers(highest: int) -> list[int]:
    return [2**power for power in range(highest.bit_length()) if 2**power <= highest]


def _tensor_sizes(request: TuningRequest, left_out: dict[str, str]) -> list[int]:
    found = []
    for size in _powers(request.devices_per_node):
        reason = next(
            (
                f"{number} {what} cannot be split over {size}"
                for number, what in ((request.num_heads, "heads"), (request.ffn_hidden_size, "FFN columns"))
                if number % size
            ),
            "",
        )
        groups = request.num_query_groups
        if not reason and max(groups, size) % min(groups, size):
            reason = f"{groups} query groups and {size}: neither divides the other"
        if reason:
            left_out[f"tensor parallel {size}"] = reason
        else:
            found.append(size)
    return found


def _context_sizes(request: TuningRequest, left_out: dict[str, str]) -> list[int]:
    found = []
    for size in sorted({*_powers(min(request.num_ranks, _MAX_CONTEXT)), request.context_size}):
        tokens = request.sequence_length // size
        if size > 1 and request.sequence_length % (2 * size):
            left_out[f"context parallel {size}"] = _indivisible(request.sequence_length, 2 * size)
        elif size > 1 and tokens < MINIMUM_CONTEXT_TOKENS and size != request.context_size:
            left_out[f"context parallel {size}"] = (
                f"a sequence of {request.sequence_length} leaves {tokens} tokens per rank, below "
                f"{MINIMUM_CONTEXT_TOKENS}; give --context-parallel-size {size} to have it searched"
            )
        else:
            found.append(size)
    return found


def _expert_sizes(request: TuningRequest, left_out: dict[str, str]) -> list[int]:
    if not request.num_experts:
        left_out["expert parallel"] = "the model has no experts"
        return [1]
    return [size for size in _powers(min(request.num_experts, request.num_ranks)) if request.num_experts % size == 0]


def _micro_batches(request: TuningRequest, left_out: dict[str, str]) -> list[int]:
    found = []
    for size in sorted({*_MICRO_BATCHES, request.micro_batch_size}):
        if request.global_batch_size % size:
            left_out[f"micro batch {size}"] = _indivisible(request.global_batch_size, size)
        else:
            found.append(size)
    return found


def _families(
    request: TuningRequest, arguments: argparse.Namespace, largest_tensor: int, left_out: dict[str, str]
) -> dict[str, dict[str, Any]]:
    families: dict[str, dict[str, Any]] = {"": {}}
    if not request.num_experts:
        return families
    own = getattr(arguments, "moe_token_dispatcher_type", None)
    for kind in ("alltoall", "allgather"):
        if own is not None and own != kind:
            families[f"{kind} dispatcher"] = {"moe_token_dispatcher_type": kind}
    left_out["flex dispatcher (DeepEP)"] = "its kernels run on NVIDIA GPUs with DeepEP only and cannot be traced"
    if largest_tensor > 1:
        if getattr(arguments, "expert_tensor_parallel_size", None) is None and hasattr(
            arguments, "expert_tensor_parallel_size"
        ):
            families[_WHOLE_EXPERTS] = {"expert_tensor_parallel_size": 1}
        else:
            left_out["expert tensor parallel"] = "set by the script, or this Megatron has no such flag"
    return families


def _switches(arguments: argparse.Namespace, left_out: dict[str, str]) -> Dimensions:
    uneven = hasattr(arguments, "pipeline_model_parallel_layout")
    if not uneven:
        left_out["uneven stages"] = "this Megatron has no --pipeline-model-parallel-layout (0.13 and newer have it)"
    recompute = ["none", "selective", "full"]
    if not hasattr(arguments, "recompute_granularity"):
        recompute = ["none"]
        left_out["recompute"] = "this Megatron has no --recompute-granularity"
    return Dimensions(recompute=tuple(recompute), uneven_stages=uneven)


_NOT_SEARCHED = (
    ("ZeRO-2/3 (Megatron FSDP)", "use_megatron_fsdp", "its shards and prefetching are not in the cost model"),
    ("recompute modules beyond core attention", "recompute_modules", "traced as the script gives them, not varied"),
    ("activation offload", "fine_grained_activation_offloading", "its transfers are not in the cost model"),
    ("parameter-gather overlap", "overlap_param_gather", "kept as the script gives it: not in the cost model"),
    ("MoE all-to-all overlap", "overlap_moe_expert_parallel_comm", "not in the cost model"),
    ("tensor-parallel overlap", "tp_comm_overlap", "needs Transformer Engine, whose kernels cannot be traced"),
    ("expert capacity and token dropping", "moe_expert_capacity_factor", "changes what is trained: kept as given"),
)


def _unsearched(arguments: argparse.Namespace, device_name: str, left_out: dict[str, str]) -> None:
    for title, destination, reason in _NOT_SEARCHED:
        missing = f"this Megatron has no --{destination.replace('_', '-')}"
        left_out[title] = reason if hasattr(arguments, destination) else missing
    left_out["MC2"] = "needs an Ascend NPU" if device_name != "npu" else "not in the cost model; switch it on yourself"
