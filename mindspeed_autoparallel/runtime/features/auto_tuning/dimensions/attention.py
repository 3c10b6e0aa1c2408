"""Ways to exchange rows of attention over context ranks."""

from __future__ import annotations

from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.context import SearchContext
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.variants import Variant

_RING = "ring attention (--cp-comm-type p2p, a2a+p2p)"
_HEADS = "all-to-all of attention heads"


def attention_exchanges(context: SearchContext) -> list[Variant]:
    """Offer all-to-all beside the script's own, where heads divide; local layers take an attention of ours."""
    if not context.has("cp_comm_type"):
        context.left_out["ways of context parallelism"] = "this Megatron has no --cp-comm-type"
        return []
    if context.value("transformer_impl", "transformer_engine") != "local":
        context.left_out["ways of context parallelism"] = (
            "they are Transformer Engine's attention, whose kernels cannot be traced: kept as the script gives it"
        )
        return []
    context.left_out[_RING] = "Transformer Engine's attention has it only, and --transformer-impl is local"
    if list(context.value("cp_comm_type") or ()) == ["a2a"]:
        return []
    request = context.request

    def divide(point: MeasuredAt) -> bool:
        shards = point.tensor_size * point.context_size
        heads = (request.num_heads, request.num_query_groups)
        return point.context_size > 1 and not any(number % shards for number in heads)

    return [Variant(title=_HEADS, settings={"cp_comm_type": ["a2a"]}, applies_to=divide)]
