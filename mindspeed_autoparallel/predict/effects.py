"""Lists keys of a request without effect on its run, with the reason, so that none is dropped silently."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from mindspeed_autoparallel.cost.analytic.fields import counts, section_of
from mindspeed_autoparallel.cost.analytic.reading import packs_examples, read_workload
from mindspeed_autoparallel.cost.analytic.workload import Workload


class _Rule(NamedTuple):
    """Keys of one section that have no effect if ``holds``."""

    section: str
    keys: tuple[str, ...]
    holds: Callable[[Workload], bool]
    reason: str


def _has_experts(work: Workload) -> bool:
    return any(kind.mlp == "experts" for kind in work.model.layers)


_RULES = (
    _Rule(
        "model",
        (
            *("topk", "moe_ffn", "shared_expert_ffn", "capacity_factor", "expert_bias", "num_dense_layers"),
            *("dispatcher", "moe_layer_freq", "expert_clamp", "moe_latent"),
        ),
        lambda work: not _has_experts(work),
        "the model has no experts",
    ),
    _Rule(
        "model",
        ("expert_clamp",),
        lambda work: work.model.num_experts > 0 and work.fused_activation,
        "the fused activation kernel clamps (train.bias_activation_fusion)",
    ),
    _Rule(
        "model",
        ("num_dense_layers", "moe_layer_freq"),
        lambda work: any(kind.mixer == "none" or kind.mlp == "none" for kind in work.model.layers),
        "layer_pattern names the layers with experts",
    ),
    _Rule("model", ("qk_norm",), lambda work: True, "norms of queries and keys are too small to be modelled"),
    _Rule("model", ("head_size", "kv_heads"), lambda work: work.model.latent is not None, "mla has separate sizes"),
    _Rule(
        "model",
        ("window", "windowed_share"),
        lambda work: (
            not work.fused_attention
            or work.model.sparse is not None
            or 2 * work.model.window >= work.model.attention_reach
        ),
        "attention is not fused, is sparse, or reaches no further on average",
    ),
    _Rule(
        "model",
        ("causal",),
        lambda work: not work.fused_attention or work.model.windowed_share == 1,
        "only fused attention over whole sequences skips half",
    ),
    _Rule("train", ("own_masks",), lambda work: work.stack != "megatron-core", "the software of 2021 keeps none"),
    _Rule(
        "model",
        ("tied_embeddings",),
        lambda work: work.adapters is not None and work.pipeline_size > 1,
        "both ends hold a separate frozen table",
    ),
    _Rule(
        "train",
        ("rope_fusion",),
        lambda work: work.model.latent is not None or all(kind.mixer != "attention" for kind in work.model.layers),
        "only plain attention is rotated by kernels that may be fused",
    ),
    _Rule(
        "train",
        ("recompute_extra",),
        lambda work: work.stack != "megatron-core",
        "the software of 2021 lacks this switch",
    ),
    _Rule("model", ("activation",), lambda work: not work.model.gated, "the MLP is not gated"),
    _Rule("parallel", ("etp",), lambda work: not _has_experts(work), "the model has no experts"),
    _Rule("parallel", ("cp_type", "ulysses_degree"), lambda work: work.context_size == 1, "cp is 1"),
    _Rule("parallel", ("sp",), lambda work: work.tensor_size == 1, "tp is 1"),
    _Rule("parallel", ("microbatch_group_size",), lambda work: work.virtual_size == 1, "vpp is 1"),
    _Rule(
        "parallel",
        ("dist_opt",),
        lambda work: work.data_size * work.context_size == 1 and work.expert_data == 1,
        "one rank holds every parameter",
    ),
    _Rule("train", ("tp_comm_overlap",), lambda work: work.tensor_size == 1, "tp is 1"),
    _Rule(
        "train",
        ("overlap_grad_reduce",),
        lambda work: work.data_size * work.context_size == 1,
        "one rank holds every gradient",
    ),
    _Rule(
        "train",
        ("moe_a2a_overlap",),
        lambda work: work.expert_size == 1 or not _has_experts(work),
        "no tokens are exchanged between expert ranks",
    ),
    _Rule(
        "train",
        ("moe_a2a_overlap",),
        lambda work: work.expert_size > 1 and _has_experts(work) and not work.expert_overlap,
        "Megatron takes it for layers of attention, on one stage or several chunks per rank, without full recompute",
    ),
    _Rule("train", ("routing_imbalance", "grouped_gemm"), lambda work: not _has_experts(work), "no experts"),
    _Rule("train", ("routing_imbalance",), lambda work: work.model.capacity_factor > 0, "capacity_factor bounds rows"),
    _Rule(
        "train",
        ("bias_activation_fusion",),
        lambda work: not (work.model.expert_clamp and _has_experts(work)),
        "no experts are clamped",
    ),
    _Rule("parallel", ("ulysses_degree",), lambda work: work.context_kind != "hybrid", "cp_type is not a hybrid"),
    _Rule(
        "train",
        ("recompute_method", "recompute_num_layers", "recompute_per_pp_rank"),
        lambda work: work.recompute != "full",
        "recompute is not full",
    ),
    _Rule("train", ("recompute_modules",), lambda work: work.recompute != "selective", "recompute is not selective"),
    _Rule(
        "train",
        ("optimizer_offload_fraction",),
        lambda work: work.optimizer_on_host == 0,
        "the optimizer is not offloaded (train.optimizer_cpu_offload)",
    ),
    _Rule("train", ("cpu_offloading_num_layers",), lambda work: work.recompute == "full", "layers run again"),
    _Rule("train", ("grad_reduce_in_bf16",), lambda work: bool(work.recipe), "a quantized recipe's default"),
    _Rule("train", ("fp8_param_gather",), lambda work: work.adapters is not None, "frozen matrices are not gathered"),
    _Rule(
        "train",
        ("fp8_dot_product_attention",),
        lambda work: not (work.quantized_attention and work.model.latent and work.fused_attention),
        "measured gains are those of latent attention, fused, under a recipe",
    ),
    _Rule("train", ("dropout",), lambda work: work.model.gated or work.model.num_experts > 0, "such models have none"),
)


_SAID_OFF = ("causal", "bias_activation_fusion", "grouped_gemm", "rope_fusion")
"""Switches whose being off is what a request states."""
_LISTS = ("pipeline_layout", "num_layer_list")
_COUNTS = ("first_stage_layers", "last_stage_layers", "account_for_embedding", "account_for_loss")


def without_effect(request: Mapping[str, object], work: Workload) -> list[str]:
    """Return a sentence for every stated key that changes nothing in ``work``, and for every length that is assumed."""
    parallel = section_of(request, "parallel")
    return [
        *_named(request, work),
        *_overruled(parallel),
        *_assumed_lengths(request, work),
        *_assumed_switches(request, work),
        *_assumed_placement(parallel, work),
    ]


def _named(request: Mapping[str, object], work: Workload) -> Iterator[str]:
    for rule in _RULES:
        section = request.get(rule.section)
        if not isinstance(section, Mapping):
            continue
        stated = [key for key in rule.keys if section.get(key) is not None and (section[key] or key in _SAID_OFF)]
        if stated and rule.holds(work):
            names = ", ".join(f"{rule.section}.{key}" for key in stated)
            yield f"{names}: no effect here, {rule.reason}"


def _overruled(parallel: Mapping[str, object]) -> Iterator[str]:
    """Yield keys that place layers beside a key that places them in more detail."""
    listed = [key for key in _LISTS if parallel.get(key)]
    ends = [key for key in _COUNTS[:2] if parallel.get(key) is not None]
    less = [*listed[1:], *(key for key in _COUNTS if parallel.get(key))] if listed else []
    if ends and not listed:
        listed, less = ends, [key for key in _COUNTS[2:] if parallel.get(key)]
    if parallel.get("pp") in (None, 1):
        less = [*less, *(key for key in (*_COUNTS[2:], "layers_per_chunk") if parallel.get(key) and key not in less)]
        listed = listed or ["pp 1"]
    elif parallel.get("vpp") and parallel.get("layers_per_chunk"):
        less, listed = [*less, "layers_per_chunk"], listed or ["vpp"]
    if less:
        yield f"{', '.join(f'parallel.{key}' for key in less)}: no effect here with {', '.join(listed)}"


def _assumed_lengths(request: Mapping[str, object], work: Workload) -> Iterator[str]:
    train = section_of(request, "train")
    if packs_examples(train):
        yield (
            f"train.packing without train.mean_document: documents of {work.model.attention_reach:g} tokens are "
            "assumed, which attention keeps apart; state mean_document, weighted by tokens"
        )
    elif train.get("packing") and train.get("mean_document"):
        yield "train.packing: no effect here with mean_document"
    elif train.get("packing") and not work.model.attended:
        yield (
            "train.packing: attention over the whole sequence is assumed (the causal square); state mean_document "
            "where documents are kept apart"
        )


def _assumed_switches(request: Mapping[str, object], work: Workload) -> Iterator[str]:
    """Yield what the newest recipes set, or those of a container, and the request leaves open."""
    train = section_of(request, "train")
    recipes = f"the recipes of {train['software']}" if train.get("software") else "Megatron-Bridge's newest recipes"
    if work.expert_overlap and train.get("moe_a2a_overlap") is None:
        yield (
            f"train.moe_a2a_overlap is not stated: expert exchanges overlap computing, as in {recipes}; set "
            "it to false where they do not, or name the container (train.software)"
        )
    if work.replayed_launches and train.get("cuda_graph") is None:
        parts = "whole iterations" if work.replays_experts else "layers without their experts"
        yield f"train.cuda_graph is not stated: graphs of {parts} are assumed, as in {recipes}; set it to none without"
    if train.get("software") and read_workload({**request, "train": {**train, "software": None}}) == work:
        yield "train.software: no effect here, the request states what it would imply, or it implies nothing"


def _assumed_placement(parallel: Mapping[str, object], work: Workload) -> Iterator[str]:
    if any(parallel.get(key) for key in (*_LISTS, *_COUNTS[:2], "layers_per_chunk")):
        return
    counted = work.model.num_layers + sum(bool(parallel.get(key)) for key in _COUNTS[2:])
    counted += len(counts(parallel, "noop_layers", "parallel"))
    if counted % (work.pipeline_size * work.virtual_size):
        held = ", ".join(str(stage.num_layers) for stage in work.stages)
        yield (
            f"{work.model.num_layers} layers do not divide over pp {work.pipeline_size} x vpp {work.virtual_size}: "
            f"stages of {held} layers are assumed, which Megatron takes as a pipeline_layout only; give yours"
        )
