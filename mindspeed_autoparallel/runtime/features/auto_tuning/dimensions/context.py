"""Ways to exchange rows of attention over context ranks."""

from __future__ import annotations

from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.asked import Asked
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.ways import Way

_RING = "ring attention (--cp-comm-type p2p, a2a+p2p)"
_HEADS = "all-to-all of attention heads"


def attention_exchanges(asked: Asked) -> list[Way]:
    """All-to-all beside the script's own, where heads divide; Megatron's local layers take an attention of ours."""
    if not asked.has("cp_comm_type"):
        asked.left_out["ways of context parallelism"] = "this Megatron has no --cp-comm-type"
        return []
    if asked.value("transformer_impl", "transformer_engine") != "local":
        asked.left_out["ways of context parallelism"] = (
            "they are Transformer Engine's attention, whose kernels cannot be traced: kept as the script gives it"
        )
        return []
    asked.left_out[_RING] = "Transformer Engine's attention has it only, and --transformer-impl is local"
    if list(asked.value("cp_comm_type") or ()) == ["a2a"]:
        return []
    request = asked.request

    def divide(point: MeasuredAt) -> bool:
        shards = point.tensor_size * point.context_size
        heads = (request.num_heads, request.num_query_groups)
        return point.context_size > 1 and not any(number % shards for number in heads)

    return [Way(title=_HEADS, settings={"cp_comm_type": ["a2a"]}, matters=divide)]
