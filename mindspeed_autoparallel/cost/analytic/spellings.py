"""Other names and spellings of a request's keys and values: those of Megatron's arguments, NeMo, Hugging Face."""

from __future__ import annotations

import re
from collections.abc import Mapping

from mindspeed_autoparallel.cost.analytic.fields import is_section
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import shown

ALIASES: Mapping[str, Mapping[str, str]] = {
    "model": {
        "hidden_size": "hidden",
        **dict.fromkeys(("num_attention_heads", "num_heads", "attention_heads"), "heads"),
        **dict.fromkeys(("num_query_groups", "num_key_value_heads", "num_kv_heads"), "kv_heads"),
        **dict.fromkeys(("head_dim", "kv_channels"), "head_size"),
        **dict.fromkeys(("ffn_hidden_size", "intermediate_size"), "ffn"),
        **dict.fromkeys(("seq_length", "seq_len", "sequence_length"), "seq"),
        "vocab_size": "vocab",
        **dict.fromkeys(
            ("tie_embeddings", "tie_word_embeddings", "share_embeddings_and_output_weights"), "tied_embeddings"
        ),
        "mtp_num_layers": "mtp_layers",
        "num_moe_experts": "num_experts",
        **dict.fromkeys(("moe_router_topk", "top_k", "num_experts_per_tok"), "topk"),
        **dict.fromkeys(("moe_ffn_hidden_size", "moe_intermediate_size"), "moe_ffn"),
        "moe_shared_expert_intermediate_size": "shared_expert_ffn",
        "first_k_dense_replace": "num_dense_layers",
        "moe_token_dispatcher_type": "dispatcher",
        "moe_expert_capacity_factor": "capacity_factor",
        **dict.fromkeys(("hybrid_layer_pattern", "hybrid_override_pattern"), "layer_pattern"),
        **dict.fromkeys(("sliding_window", "sliding_window_size"), "window"),
        "qk_layernorm": "qk_norm",
    },
    "hw": {
        **dict.fromkeys(("device", "gpu_type", "gpu_name", "accelerator"), "gpu"),
        **dict.fromkeys(("num_devices", "world_size"), "num_gpus"),
        **dict.fromkeys(("devices_per_node", "nproc_per_node"), "gpus_per_node"),
    },
    "parallel": {
        **dict.fromkeys(("tensor_model_parallel_size", "tensor_parallel_size"), "tp"),
        **dict.fromkeys(("pipeline_model_parallel_size", "pipeline_parallel_size"), "pp"),
        **dict.fromkeys(
            (
                *("virtual_pipeline_model_parallel_size", "virtual_pipeline_parallel_size", "vp", "vp_size"),
                "num_virtual_stages_per_pipeline_rank",
            ),
            "vpp",
        ),
        "context_parallel_size": "cp",
        "data_parallel_size": "dp",
        **dict.fromkeys(("expert_model_parallel_size", "expert_parallel_size"), "ep"),
        **dict.fromkeys(("expert_tensor_parallel_size", "expert_tensor_model_parallel_size"), "etp"),
        "sequence_parallel": "sp",
        **dict.fromkeys(("use_distributed_optimizer", "distributed_optimizer"), "dist_opt"),
        "cp_comm_type": "cp_type",
        **dict.fromkeys(("pipeline_model_parallel_layout", "pp_layout"), "pipeline_layout"),
        "num_layers_per_virtual_pipeline_stage": "layers_per_chunk",
        **dict.fromkeys(
            ("decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage"), "first_stage_layers"
        ),
        **dict.fromkeys(("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage"), "last_stage_layers"),
        "account_for_embedding_in_pipeline_split": "account_for_embedding",
        "account_for_loss_in_pipeline_split": "account_for_loss",
        "schedule_group_size": "microbatch_group_size",
        "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size",
    },
    "train": {
        "global_batch_size": "gbs",
        "micro_batch_size": "mbs",
        "recompute_granularity": "recompute",
        "overlap_moe_expert_parallel_comm": "moe_a2a_overlap",
        "cuda_graph_impl": "cuda_graph",
        "container": "software",
    },
}
"""Other names of a request's keys, by section: one value, two names."""

_RECIPES = {
    **dict.fromkeys(("delayed", "tensorwise", "current", "cs", "ds", "hybrid", "e4m3"), "fp8"),
    **dict.fromkeys(("blockwise", "subchannel", "sc"), "fp8_blockwise"),
    **dict.fromkeys(("mxfp8", "mx"), "mxfp8"),
}
"""Megatron's and Transformer Engine's recipes, and Megatron-Bridge's two letters for them."""
_FILLERS = re.compile(r"^bf16_with_|_mixed$|_(scaling|per_tensor)(?=_|$)|_precision$")
INFORMATION = frozenset({"id", "name", "source", "note", "notes", "family", "group", "kind", "measured", "comment"})
"""Keys outside the sections: they describe a run's origin. Only the container in ``source`` changes figures."""
_CONTAINER = re.compile(r"(?<![\d.])(2[3-9])\.(0[1-9]|1[0-2])(?!\d)")


def canonical(request: Mapping[str, object]) -> dict[str, object]:
    """Return ``request`` with other names of keys, and spellings of a precision, replaced; sections that are no objects
    stay as they are. Raises ``ConfigError`` if two names of one key have different values."""
    result = dict(request)
    for section, names in ALIASES.items():
        values = result.get(section)
        if is_section(values) and any(key in names for key in values):
            result[section] = _renamed(section, values, names)
    train = result.get("train")
    if is_section(train):
        result["train"] = _with_container(_with_precision(train), request.get("source"))
    return result


def _renamed(section: str, values: Mapping[str, object], names: Mapping[str, str]) -> dict[str, object]:
    renamed: dict[str, object] = {}
    stated: dict[str, str] = {}
    for key, value in values.items():
        name = names.get(key, key)
        if value is None and name in renamed:
            continue
        if renamed.get(name) is not None and renamed[name] != value:
            raise ConfigError(
                f"{section}.{stated[name]} is {shown(renamed[name])} and {section}.{key} is {shown(value)}: "
                "two names of one key must have one value."
            )
        renamed[name], stated[name] = value, key
    return renamed


def _with_precision(train: Mapping[str, object]) -> Mapping[str, object]:
    """Return ``train`` with ``precision`` as a request has it: ``FP8-CS``, ``fp8_mx``, ``bf16_mixed``, and Megatron's
    ``fp8_recipe`` with ``fp8``."""
    stated = train.get("precision")
    name = re.sub(r"[\s\-+./()]+", "_", str(stated or "").lower()).strip("_")
    name = _FILLERS.sub("", _FILLERS.sub("", name))
    recipe = str(train.get("fp8_recipe") or "").lower().rpartition(".")[2]
    if recipe in _RECIPES and name in ("", "fp8", _RECIPES[recipe]):
        kept = {key: value for key, value in train.items() if key != "fp8_recipe"}
        return {**kept, "precision": _RECIPES[recipe]}
    if name == "nv_fp4":
        name = "nvfp4"
    elif name in ("mx_fp8", "fp8_mx", "fp8_mxfp8"):
        name = "mxfp8"
    elif name.startswith("fp8_"):
        name = _RECIPES.get(name.removeprefix("fp8_"), name)
    return {**train, "precision": name} if name and name != stated else train


def _with_container(train: Mapping[str, object], source: object) -> Mapping[str, object]:
    """Return ``train`` with the NeMo container that a run's ``source`` names, where ``software`` is not stated."""
    if train.get("software") is not None or not isinstance(source, str):
        return train
    named = container_of(source)
    return {**train, "software": named} if named else train


def container_of(source: str) -> str | None:
    """Return the container, as ``nemo-26.04``, that a text on NeMo or Megatron-Bridge names by year and month."""
    found = _CONTAINER.search(source) if re.search(r"nemo|bridge", source, re.IGNORECASE) else None
    return f"nemo-{found.group()}" if found else None
