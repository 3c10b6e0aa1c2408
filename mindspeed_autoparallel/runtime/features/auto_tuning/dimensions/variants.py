"""Variants of the same layers, each of which is traced: dispatchers, expert and attention exchanges, recompute."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from mindspeed_autoparallel.errors import flag_of
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.runtime.features.auto_tuning.request import TuningRequest
from mindspeed_autoparallel.runtime.megatron.hybrid import recomputes_whole_layers
from mindspeed_autoparallel.spec.recompute import RecomputePolicy


@dataclass(frozen=True, kw_only=True)
class SearchContext:
    """Input of every dimension: the request, the host's parsed arguments, the training device."""

    request: TuningRequest
    arguments: argparse.Namespace
    device_name: str
    """``cpu``, ``cuda`` or ``npu``."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Dimension, or a value of it, to the reason; dimensions add to it."""

    def has(self, destination: str) -> bool:
        """Return whether this Megatron has the argument."""
        return hasattr(self.arguments, destination)

    def missing(self, destination: str, remark: str = "") -> str:
        """Return the reason that this Megatron lacks the argument, with a remark; empty if it has it."""
        flag = flag_of(destination)
        return "" if self.has(destination) else f"this Megatron has no {flag}" + (f" ({remark})" if remark else "")

    def value(self, destination: str, default: Any = None) -> Any:
        """Return the script's own value of an argument."""
        return getattr(self.arguments, destination, default)


def words(values: Iterable[Any]) -> str:
    """Return ``1, 2, 4`` or ``on, off``."""
    names = {True: "on", False: "off"}
    return ", ".join(names[value] if isinstance(value, bool) else str(value) for value in values)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A variant that is traced and searched in addition to the script's own, whose title is empty."""

    title: str = ""
    settings: dict[str, object] = field(default_factory=dict)
    """Megatron's argument destinations and values."""
    applies_to: Callable[[MeasuredAt], bool] = lambda point: True
    """Whether a layout runs it differently from the script's own; it is traced and searched only there."""


def attention_exchanges(context: SearchContext) -> list[Variant]:
    """Offer all-to-all where heads divide, for local layers only: they run this package's attention."""
    reason = context.missing("cp_comm_type")
    if not reason and context.value("transformer_impl", "transformer_engine") != "local":
        reason = "part of Transformer Engine's attention, whose kernels cannot be traced: kept as the script gives it"
    if reason:
        context.left_out["exchanges of context parallelism"] = reason
        return []
    context.left_out["ring attention (--cp-comm-type p2p, a2a+p2p)"] = (
        "only Transformer Engine's attention has it, and --transformer-impl is local"
    )
    if list(context.value("cp_comm_type") or ()) == ["a2a"]:
        return []
    request = context.request

    def divide(point: MeasuredAt) -> bool:
        shards = point.tensor_size * point.context_size
        heads = (request.num_heads, request.num_query_groups)
        return point.context_size > 1 and not any(number % shards for number in heads)

    return [Variant(title="all-to-all of attention heads", settings={"cp_comm_type": ["a2a"]}, applies_to=divide)]


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
    """Offer no variant: the fused kernels run on accelerators only, and their time is unknown."""
    if context.request.num_experts:
        reason = context.missing("moe_permute_fusion", "0.12 and newer have it")
        if not reason and context.device_name == "cpu":
            reason = "its kernels run on GPUs (Transformer Engine) and NPUs (MindSpeed) only"
        context.left_out["fused token rearrangement (--moe-permute-fusion)"] = (
            reason or "its kernels cannot be traced: kept as the script gives it, traced as if it were off"
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


def recompute_kinds(context: SearchContext) -> tuple[str, ...]:
    """Return the kinds that this Megatron has (``spec.recompute``, without the part after a colon)."""
    if reason := context.missing("recompute_granularity"):
        context.left_out["recompute"] = reason
        return ("none",)
    if not recomputes_whole_layers(context.arguments):
        context.left_out["recompute of whole layers"] = (
            "this Megatron fails when it recomputes layers of multi-token prediction"
        )
        return ("none", "selective")
    return ("none", "selective", "full")


def selective_kinds(context: SearchContext) -> dict[str, dict[str, object]]:
    """Return the kinds to trace besides none, with Megatron's arguments; whole layers follow from the plain trace.

    The kinds: each module alone, all cheap ones together, these with each expensive one, and the script's own.
    """
    if not context.has("recompute_granularity"):
        return {}
    if reason := context.missing("recompute_modules"):
        context.left_out["recompute modules"] = f"{reason}: the core attention alone"
        return {str(RecomputePolicy.selective(())): {"recompute_granularity": "selective"}}
    cheap, dear = _cheap_modules(context), _dear_modules(context)
    sets: list[tuple[str, ...]] = [*((module,) for module in (*cheap, *dear)), tuple(cheap)]
    # The experts' recompute includes their activation.
    sets += [(*(other for other in cheap if (module, other) != ("moe", "moe_act")), module) for module in dear]
    own = tuple(context.value("recompute_modules") or ())
    if own and not any(set(own) == set(modules) for modules in sets):
        sets.append(own)
    return {
        str(RecomputePolicy.selective(modules)): {"recompute_granularity": "selective", "recompute_modules": [*modules]}
        for modules in sets
    }


def _cheap_modules(context: SearchContext) -> list[str]:
    """Return the modules that are cheap to compute again: no matrix products but those of attention."""
    found = ["core_attn", "layernorm"]
    if context.value("multi_latent_attention"):
        found.append("mla_up_proj")
    if context.request.num_experts:
        if context.value("moe_grouped_gemm"):
            found.append("moe_act")
        else:
            context.left_out["recompute of moe_act"] = "Megatron has it with --moe-grouped-gemm only"
    return found


def _dear_modules(context: SearchContext) -> list[str]:
    if not context.request.num_experts:
        return ["mlp"]
    found = ["moe"]
    if not context.value("moe_shared_expert_intermediate_size"):
        context.left_out["recompute of shared_experts"] = "the model has no shared experts"
    elif context.value("moe_shared_expert_overlap"):
        context.left_out["recompute of shared_experts"] = "Megatron refuses it with --moe-shared-expert-overlap"
    else:
        found.append("shared_experts")
    return found
