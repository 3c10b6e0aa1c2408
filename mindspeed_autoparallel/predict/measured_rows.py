"""Turns a measured row of a public source into a prediction request."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from mindspeed_autoparallel.cost.analytic.fields import integer, optional_integer, part
from mindspeed_autoparallel.cost.analytic.request_keys import KNOWN, SILENT
from mindspeed_autoparallel.cost.analytic.spellings import ALIASES
from mindspeed_autoparallel.cost.analytic.workload import RECOMPUTE
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import shown
from mindspeed_autoparallel.predict.arguments import Arguments
from mindspeed_autoparallel.predict.megatron_arguments import own_masks, request_of_arguments
from mindspeed_autoparallel.predict.predict import predict_one

SIZE_NAMES = {
    "num_layers": ("num_layers", "num_blocks"),
    "hidden": ("hidden", "hidden_size"),
    "heads": ("heads", "head_num", "attn_heads"),
    "kv_heads": ("kv_heads", "kv_head_num"),
    "ffn": ("ffn", "intermediate_size", "feedforward"),
    "seq": ("seq", "seq_size"),
    "vocab": ("vocab", "vocab_size"),
    "swiglu": ("swiglu", "use_swiglu"),
    "head_size": ("head_size", "head_dim", "attn_size"),
    "num_experts": ("num_experts", "expert_num"),
    "topk": ("topk", "moe_router_topk"),
    "num_dense_layers": ("num_dense_layers", "dense_layers"),
    "moe_ffn": ("moe_ffn", "moe_ffn_hidden_size"),
    "shared_expert_ffn": ("shared_expert_ffn", "moe_shared_expert_intermediate_size"),
}
"""The sources' names for the sizes of a model."""
_NOT_SIZES = frozenset({"name", "type", "config", "category", "params", "params_b", "structure", "seq_source"})
_CATEGORIES = (None, "gpt", "moe", "mixtral", "hybrid")
_INFORMATION = frozenset({"mbs_source", "micro_batch_count", "kernels", "lbs", "ga", "balanced_router", "config", "o2"})
_LOSS_IN_PLACE_SINCE = "2025-08-09"
"""When MindSpeed's loss stopped to make a second fp32 copy of the logits (its commit 55859a22)."""
_PUBLISHED_BY = {"images/model_table.png": "nemo-24.07"}
"""Containers of the month in which figures without a date were published: Megatron-LM's on H100, f2e5db402c."""
_GRAPH_NAMES = {True: "transformer_engine", False: "none"}


MEASURED_NUMBERS = (
    *("iter_time_ms", "step_time_ms", "iter_time_s", "iter_time_s_median_second_half", "tokens_per_s_per_gpu"),
    *("tflops_per_gpu", "peak_alloc_gib", "peak_memory_gib", "peak_gib", "mem_max_allocated_bytes", "activations_gib"),
    *("activation_pct_of_tp_baseline", "params_plus_optimizer_gib"),
)
"""Figures of a row's ``measured`` that are compared with a prediction."""


def broken_part(row: Mapping[str, object]) -> str | None:
    """Return the part of ``row`` that must be an object or a measured figure and is not; ``None`` if all are."""
    sections = {name: row[name] for name in ("model", "hw", "train", "measured", "megatron_args") if name in row}
    model = row.get("model")
    if isinstance(model, Mapping) and "config" in model and isinstance(model["config"], (list, int, float)):
        sections["model.config"] = model["config"]
    for name, section in sections.items():
        if not isinstance(section, Mapping):
            return f"{name} is {section!r}, must be an object"
    for key in MEASURED_NUMBERS:
        value = part(row, "measured").get(key)
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and 1e-30 < value < 1e30
        if value is not None and not number:
            return f"measured.{key} is {shown(value)}, must be a number above 0"
    return None


def _check_counts(hardware: Mapping[str, object], parallel: Mapping[str, object]) -> None:
    counts = [("hw", key, hardware.get(key)) for key in ("num_gpus", "gpus_per_node")]
    counts += [("parallel", key, parallel.get(key)) for key in ("tp", "pp", "dp", "cp", "layers_per_vpp")]
    for where, key, value in counts:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{where}.{key} is {value!r}, must be a whole number of at least 1.")


def request_of_row(row: Mapping[str, object]) -> dict[str, object] | None:
    """Return a request as ``predict`` takes it, or ``None`` if the row does not fully describe a run. Raises
    ``ConfigError`` for unmodelled features and invalid counts. Its sections must be objects (see ``broken_part``).
    """
    if not isinstance(row.get("parallel", {}), Mapping):
        return None
    hardware, parallel, train = (part(row, name) for name in ("hw", "parallel", "train"))
    category = part(row, "model").get("category")
    if category not in _CATEGORIES:
        raise ConfigError(f"models of the category {category!r} are not modelled.")
    model = _model(row)
    if model is None or not hardware.get("gpu") or not hardware.get("num_gpus"):
        return None
    _check_counts(hardware, parallel)
    arguments = part(row, "megatron_args")
    layout = _layout(parallel, hardware, model)
    batch = _batch(train, layout, hardware)
    if batch is None:
        return None
    _read_features(model, str(train.get("flags", "")))
    request_train = _train(train, batch)
    if str(part(row, "source").get("date") or _LOSS_IN_PLACE_SINCE) < _LOSS_IN_PLACE_SINCE:
        request_train["loss_in_place"] = False
    if software := _PUBLISHED_BY.get(str(part(row, "source").get("path"))):
        request_train["software"] = software
    request = {
        "id": row.get("id", ""),
        "model": model,
        "hw": dict(hardware),
        "parallel": layout,
        "train": request_train,
    }
    if arguments:
        stated = request_of_arguments(arguments, hardware)
        own_model, own_train = part(stated, "model"), part(stated, "train")
        request["model"] = {**own_model, **model, **_sized(own_model)}
        request["parallel"] = {**part(stated, "parallel"), **layout}
        request["train"] = {**request_train, **own_train, "gbs": batch, "mbs": request_train["mbs"]}
    return request if train.get("recompute") or arguments else _with_room(request)


def _read_features(model: dict[str, object], flags: str) -> None:
    """Add to ``model`` the features that only the flags of a launch show."""
    for flag, name in (("--gelu-tanh", "gelu_tanh"), ("--geglu", "gelu")):
        if flag in flags:
            model.update(swiglu=True, activation=name)  # gated, whatever the function
    if "--output-logit-softcapping" in flags:
        model["logit_softcap"] = True
    if isinstance(indexer := model.get("dsa"), Mapping):
        model["dsa"] = {**indexer, "fused": "--use-sparse-flash-attn" in flags}


def _sized(model: Mapping[str, object]) -> dict[str, object]:
    """Return keys for which a run's arguments are more exact than a source's summary."""
    return {
        key: model[key] for key in ("layer_pattern", "type", "mla", "tied_embeddings") if model.get(key) is not None
    }


def _model(row: Mapping[str, object]) -> dict[str, object] | None:
    source, arguments = part(row, "model"), part(row, "megatron_args")
    config = part(source, "config")
    if config.get("attention_type") == "mla":
        source = {**source, "mla": _latent_of(config)}
    merged = {**source, **config}
    fields = {key: value for key, value in merged.items() if key in KNOWN["model"] | set(ALIASES["model"])}
    # Features that a source names beyond sizes stay, so that what is not modelled is refused by name.
    fields.update(
        {
            key: value
            for key, value in source.items()
            if key not in fields and key not in _NOT_SIZES and key not in SILENT["model"]
        }
    )
    for key, names in SIZE_NAMES.items():
        value = next((merged[name] for name in names if merged.get(name) is not None), None)
        fields.pop(key, None)
        if value is not None:
            fields[key] = value
    # A source that trains fewer layers than the named model gives their number in addition to the configuration.
    fields["num_layers"] = next(
        (source[name] for name in SIZE_NAMES["num_layers"] if source.get(name)), None
    ) or config.get("layer_num")
    fields.pop("head_dim", None)
    for name in (
        *(other for names in SIZE_NAMES.values() for other in names if other not in SIZE_NAMES),
        "text_decoder",
        "vision_projector",
    ):
        fields.pop(name, None)
    if arguments and fields["num_layers"] is None:
        fields["num_layers"] = Arguments(arguments).integer("num_layers")
    if any(fields.get(name) is None for name in ("num_layers", "hidden", "heads", "seq")):
        return None
    encoder = part(fields, "vision_encoder")
    if fields.get("vision_encoder") and not (
        encoder.get("num_layers") and (encoder.get("hidden_size") or encoder.get("hidden"))
    ):
        raise ConfigError("the encoder's sizes are not stated.")
    if fields.get("topk") is None:
        fields.pop("topk", None)
    pattern = fields.get("layer_pattern")
    fields["type"] = "hybrid" if pattern else "moe" if fields.get("num_experts") else "gpt"
    return {key: value for key, value in fields.items() if value is not None}


def _latent_of(config: Mapping[str, object]) -> dict[str, object]:
    """Return latent attention as SimuMax's model files name its sizes."""
    names = {"q_lora_rank": "q_lora_rank", "kv_lora_rank": "kv_lora_rank", "qk_nope_head_dim": "qk_head_dim",
             "qk_rope_head_dim": "qk_pos_emb_head_dim", "v_head_dim": "v_head_dim"}  # fmt: skip
    return {key: config.get(name, config.get(key)) for key, name in names.items()}


def _layout(
    parallel: Mapping[str, object], hardware: Mapping[str, object], model: Mapping[str, object]
) -> dict[str, object]:
    layout = {key: value for key, value in parallel.items() if value is not None and key != "layers_per_vpp"}
    stages, chunk = integer(layout, "pp", 1, "parallel"), optional_integer(parallel, "layers_per_vpp", "parallel")
    if chunk and stages > 1:
        layout["vpp"] = integer(model, "num_layers", None, "model") // (stages * chunk)
    if layout.get("fsdp") == 1:
        layout.pop("fsdp")
    devices, shards = integer(hardware, "num_gpus", None, "hw"), _shards(layout)
    if devices != shards * integer(layout, "dp", devices // shards, "parallel"):
        layout.pop("dp", None)
    if layout.pop("encoder_layer_list", None) and not model.get("vision_encoder"):
        raise ConfigError("the encoder's sizes are not stated.")
    return layout


def _batch(train: Mapping[str, object], layout: Mapping[str, object], hardware: Mapping[str, object]) -> int | None:
    microbatches = optional_integer(train, "micro_batch_count", "train")
    if train.get("gbs") is not None or not microbatches:
        return optional_integer(train, "gbs", "train")
    data = integer(layout, "dp", integer(hardware, "num_gpus", None, "hw") // _shards(layout), "parallel")
    return microbatches * integer(train, "mbs", 1, "train") * data


def _shards(layout: Mapping[str, object]) -> int:
    """Return the number of devices per replica."""
    return math.prod(integer(layout, key, 1, "parallel") for key in ("tp", "pp", "cp"))


def _train(train: Mapping[str, object], batch: int) -> dict[str, object]:
    named = train.get("recompute")
    recompute = "none" if named is None else "selective" if named == "attn_only" else named
    # What else a source names stays, so that what is not modelled is refused or noted by name.
    kept = {key: value for key, value in train.items() if value is not None and key not in _INFORMATION}
    kept.pop("schedule", None)
    result = {**kept, "gbs": batch, "mbs": train.get("mbs", 1), "recompute": recompute}
    if isinstance(graph := result.get("cuda_graph"), bool):
        result["cuda_graph"] = _GRAPH_NAMES[graph]
    if isinstance(flags := train.get("flags"), str) and "--tensor-model-parallel-size" in flags:
        result = {**_of_flags(flags), **result}
    if str(result.get("task")).startswith(("pretrain", "checkpoint")):
        result.pop("task")
    return result


def _of_flags(flags: str) -> dict[str, object]:
    """Return the switches that only the flags of a launch show; an absent flag means off."""
    given = set(re.findall(r"--([a-z0-9][\w-]*)", flags))
    return {
        "overlap_grad_reduce": "overlap-grad-reduce" in given,
        "tp_comm_overlap": bool({"tp-comm-overlap", "use-mc2", "use-ascend-mc2", "use-ascend-coc"} & given),
        "gradient_accumulation_fusion": "no-gradient-accumulation-fusion" not in given
        or "gemm-gradient-accumulation-fusion" in given,
        "grouped_gemm": "moe-grouped-gemm" in given,
        "dropout": "attention-dropout 0.0" not in flags,
        "rope_fusion": "use-fused-rotary-pos-emb" in given or "position-embedding-type rope" not in flags,
        "own_masks": own_masks("interleave-sliding-window" in given, "tokenizer-padding-side left" in flags),
        # Ascend's software has no fused loss, regardless of the flag.
        "cross_entropy_fusion": False,
    }


def _with_room(request: dict[str, object]) -> dict[str, object]:
    """Return the request of a run published without its recompute, with the least recompute that fits."""
    for recompute in RECOMPUTE:
        request = {**request, "train": {**part(request, "train"), "recompute": recompute}}
        if predict_one(request)["status"] != "out_of_memory":
            break
    return request
