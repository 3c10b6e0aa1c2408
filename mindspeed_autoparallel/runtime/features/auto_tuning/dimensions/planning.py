"""All dimensions together: the points and variants to trace and search for a request."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.tuner.candidates import Dimensions
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.variants import (
    SearchContext,
    Variant,
    attention_exchanges,
    dispatchers,
    recompute_kinds,
    selective_kinds,
    token_rearrangement,
    whole_experts,
    words,
)
from mindspeed_autoparallel.runtime.features.auto_tuning.request import MINIMUM_CONTEXT_TOKENS, TuningRequest
from mindspeed_autoparallel.runtime.megatron.mindspeed import LIST_ARGUMENT
from mindspeed_autoparallel.spec.layout import unmet_expert_size
from mindspeed_autoparallel.spec.recompute import policy_of

_MICRO_BATCHES = (1, 2, 4, 8)
_MAX_CONTEXT = 16


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes worth tracing."""

    tensor: list[int]
    context: list[int]
    expert: list[int]
    micro_batch: list[int]
    points: tuple[MeasuredAt, ...]
    """Their legal combinations, with sequence parallelism on and off."""


def worthwhile_sizes(context: SearchContext) -> Sizes:
    """Return the sizes that model, ranks and batch allow; the others go to ``left_out`` with the reason."""
    request, left_out = context.request, context.left_out

    def kept(name: str, sizes: Iterable[int], refusal: Callable[[int, TuningRequest], str]) -> list[int]:
        reasons = {size: refusal(size, request) for size in sizes}
        left_out.update({f"{name} {size}": reason for size, reason in reasons.items() if reason})
        return [size for size, reason in reasons.items() if not reason]

    contexts = sorted({*_powers(min(request.num_ranks, _MAX_CONTEXT)), request.context_size})
    expert = [1]
    if request.num_experts:
        most = min(request.num_experts, request.num_ranks)
        divisors = [size for size in _powers(most) if request.num_experts % size == 0]
        expert = kept("expert parallel", divisors, _refused_expert)
        if not expert:
            raise ConfigError(
                f"no expert-parallel size up to {most} fits: {left_out[f'expert parallel {divisors[-1]}']}. Tune for "
                "more ranks (--auto-tuning-ranks), or leave that flag out of the script."
            )
    else:
        left_out["expert parallel"] = "the model has no experts"
    sizes = Sizes(
        tensor=kept("tensor parallel", _powers(request.devices_per_node), _refused_tensor),
        context=kept("context parallel", contexts, _refused_context),
        expert=expert,
        micro_batch=kept("micro batch", sorted({*_MICRO_BATCHES, request.micro_batch_size}), _refused_batch),
        points=(),
    )
    return replace(sizes, points=tuple(_points(sizes, request, left_out)))


def _points(sizes: Sizes, request: TuningRequest, left_out: dict[str, str]) -> Iterator[MeasuredAt]:
    for tp, cp, ep in itertools.product(sizes.tensor, sizes.context, sizes.expert):
        if request.num_ranks % (tp * cp) or (request.num_ranks // tp) % ep:
            continue
        # Megatron trains experts under tensor parallelism only with sequence parallelism.
        for split in (False,) if tp == 1 else (True,) if request.num_experts else (True, False):
            if split and request.sequence_length // cp % tp:
                left_out[f"sequence parallelism TP {tp} CP {cp}"] = _indivisible(request.sequence_length, tp * cp)
                continue
            point = MeasuredAt(tensor_size=tp, context_size=cp, expert_size=ep, sequence_parallel=split)
            yield from (replace(point, micro_batch_size=size) for size in sizes.micro_batch)


def _indivisible(number: int, parts: int) -> str:
    return f"{number} is not divisible by {parts}"


def _powers(highest: int) -> list[int]:
    return [2**power for power in range(highest.bit_length())]


def _refused_tensor(size: int, request: TuningRequest) -> str:
    for number, what in ((request.num_heads, "heads"), (request.ffn_hidden_size, "FFN columns")):
        if number % size:
            return f"{number} {what} cannot be split over {size}"
    groups = request.num_query_groups
    if max(groups, size) % min(groups, size):
        return f"{groups} query groups and {size}: neither divides the other"
    return ""


def _refused_context(size: int, request: TuningRequest) -> str:
    tokens = request.sequence_length // size
    if request.num_ranks % size:
        return f"{request.num_ranks} ranks are not a multiple of it"
    if size > 1 and request.sequence_length % (2 * size):
        return _indivisible(request.sequence_length, 2 * size)
    if size > 1 and tokens < MINIMUM_CONTEXT_TOKENS and size != request.context_size:
        return (
            f"a sequence of {request.sequence_length} leaves {tokens} tokens per rank, below "
            f"{MINIMUM_CONTEXT_TOKENS}; give --context-parallel-size {size} to have it searched"
        )
    return ""


def _refused_expert(size: int, request: TuningRequest) -> str:
    unmet = unmet_expert_size(request.least_expert_sizes, size)
    return "" if unmet is None else f"{unmet[0]} needs {unmet[1]} or more"


def _refused_batch(size: int, request: TuningRequest) -> str:
    return _indivisible(request.global_batch_size, size) if request.global_batch_size % size else ""


def switches(context: SearchContext) -> Dimensions:
    """Return the switches of optimizer, communication and pipeline that this Megatron has: none needs a trace."""
    left_out = context.left_out
    uneven = context.has("pipeline_model_parallel_layout") or context.has(LIST_ARGUMENT)
    if not uneven:
        left_out["uneven stages"] = context.missing("pipeline_model_parallel_layout", "0.13 and newer have it")
    gathering = context.has("overlap_param_gather")
    if not gathering:
        left_out["overlap of parameter gathering"] = context.missing("overlap_param_gather")
    dropping = context.missing("moe_expert_capacity_factor") or "changes what is trained: kept as given"
    left_out["expert capacity and token dropping"] = dropping
    return Dimensions(
        recompute=recompute_kinds(context),
        uneven_stages=uneven,
        ramp=context.request.ramp,
        bucket_elements=int(context.value("ddp_bucket_size") or 0),
        overlap_parameter_gather=(True, False) if gathering else (False,),
    )


_VARIANTS: tuple[Callable[[SearchContext], list[Variant]], ...] = (
    attention_exchanges,
    dispatchers,
    token_rearrangement,
    whole_experts,
)
"""Functions that each add their variants, or the reason why there are none."""


@dataclass(frozen=True, kw_only=True)
class SearchPlan:
    """The points and variants to trace and search."""

    points: tuple[MeasuredAt, ...]
    variants: tuple[Variant, ...]
    """The script's own first."""
    recompute: dict[str, dict[str, object]]
    """Recompute kinds that are traced in addition to none: Megatron's argument destinations and values."""
    dimensions: Dimensions
    searched: dict[str, str]
    """Dimension to its values, for display."""
    left_out: dict[str, str]
    """Dimension, or a value of it, to the reason."""


def plan_search(request: TuningRequest, arguments: argparse.Namespace, device_name: str) -> SearchPlan:
    """Return the points and variants worth tracing for ``request`` on this host and device."""
    context = SearchContext(request=request, arguments=arguments, device_name=device_name)
    sizes = worthwhile_sizes(context)
    variants = [Variant(), *(variant for dimension in _VARIANTS for variant in dimension(context))]
    for variant in variants:
        if not any(variant.applies_to(point) for point in sizes.points):
            context.left_out[variant.title] = "no layout that is traced differs from the script's own"
    variants = [variant for variant in variants if variant.title not in context.left_out]
    dimensions = switches(context)
    recompute = selective_kinds(context)
    return SearchPlan(
        points=sizes.points,
        variants=tuple(variants),
        recompute=recompute,
        dimensions=dimensions,
        searched=_searched(request, sizes, variants, recompute, dimensions),
        left_out=context.left_out,
    )


def _searched(
    request: TuningRequest, sizes: Sizes, variants: list[Variant], recompute: Iterable[str], dimensions: Dimensions
) -> dict[str, str]:
    kinds = ["none", *(policy_of(kind).words for kind in recompute)]
    if "full" in dimensions.recompute:
        kinds.append("full (the first layers of each stage, or groups of layers)")
    searched = {
        "tensor parallel": words(sizes.tensor),
        "sequence parallel": "on and off"
        if max(sizes.tensor) > 1 and not request.num_experts
        else "with tensor parallel",
        "pipeline stages": "every divisor of the ranks, uneven ones too"
        if dimensions.uneven_stages
        else "every divisor of the ranks that divides the layers",
        "virtual stages": words(dimensions.virtual_sizes),
        "context parallel": words(sizes.context),
        "expert parallel": words(sizes.expert),
        "micro batch": words(sizes.micro_batch),
        "distributed optimizer (ZeRO-1)": words(dimensions.distributed_optimizer),
        "overlap of gradient reduction": words(dimensions.overlap_gradient_reduce),
        "overlap of parameter gathering": words(dimensions.overlap_parameter_gather),
        "recompute": ", ".join(kinds),
    }
    if len(variants) > 1:
        searched["variants of the layers"] = ", ".join(variant.title or "as in the script" for variant in variants)
    return searched
