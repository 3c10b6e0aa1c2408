"""Switches of optimizer, communication and pipeline: what the cost model covers without a trace."""

from __future__ import annotations

from mindspeed_autoparallel.planner.tuner.candidates import Dimensions
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.context import SearchContext
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.recompute import recompute_kinds
from mindspeed_autoparallel.runtime.megatron.mindspeed_llm import LIST_ARGUMENT


def switches(context: SearchContext) -> Dimensions:
    """Return what this Megatron has of them."""
    uneven = context.has("pipeline_model_parallel_layout") or context.has(LIST_ARGUMENT)
    if not uneven:
        context.left_out["uneven stages"] = (
            "this Megatron has no --pipeline-model-parallel-layout (0.13 and newer have it)"
        )
    gathering = context.has("overlap_param_gather")
    if not gathering:
        context.left_out["overlap of parameter gathering"] = "this Megatron has no --overlap-param-gather"
    return Dimensions(
        recompute=recompute_kinds(context),
        uneven_stages=uneven,
        bucket_elements=int(context.value("ddp_bucket_size") or 0),
        overlap_parameter_gather=(True, False) if gathering else (False,),
    )
