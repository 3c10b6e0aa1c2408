"""All dimensions together: what is traced and searched for a request."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mindspeed_autoparallel.planner.tuner.candidates import Dimensions
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.attention import attention_exchanges
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.context import SearchContext, words
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.experts import (
    dispatchers,
    token_rearrangement,
    whole_experts,
)
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.recompute import selective_kinds
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.sizes import Sizes, worthwhile_sizes
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.switches import switches
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.unsearched import name_unsearched
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.variants import Variant
from mindspeed_autoparallel.runtime.features.auto_tuning.request import TuningRequest
from mindspeed_autoparallel.spec.recompute import policy_of

_VARIANTS: tuple[Callable[[SearchContext], list[Variant]], ...] = (
    attention_exchanges,
    dispatchers,
    token_rearrangement,
    whole_experts,
)
"""Each adds its variants, or the reason why there are none."""


@dataclass(frozen=True, kw_only=True)
class SearchPlan:
    """What is traced and searched."""

    points: tuple[MeasuredAt, ...]
    variants: tuple[Variant, ...]
    """The script's own first."""
    recompute: dict[str, dict[str, object]]
    """Kinds that are traced beside none: Megatron's argument destinations and values."""
    dimensions: Dimensions
    searched: dict[str, str]
    """Dimension to its values, for people."""
    left_out: dict[str, str]
    """Dimension, or a value of it, to the reason."""


def plan_search(request: TuningRequest, arguments: argparse.Namespace, device_name: str) -> SearchPlan:
    """Plan all that is worth tracing for ``request`` with what the host's ``arguments`` and the device have."""
    context = SearchContext(request=request, arguments=arguments, device_name=device_name)
    sizes = worthwhile_sizes(context)
    variants = [Variant(), *(variant for dimension in _VARIANTS for variant in dimension(context))]
    for variant in variants:
        if not any(variant.applies_to(point) for point in sizes.points):
            context.left_out[variant.title] = "it differs from the script's own way in no layout that is traced"
    variants = [variant for variant in variants if variant.title not in context.left_out]
    dimensions = switches(context)
    recompute = selective_kinds(context)
    name_unsearched(context)
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
