"""Turns a measured row, as public sources write it, into a prediction request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_autoparallel.cost.analytic.workload import RECOMPUTE
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.predict.predict import predict_one


def _first(section: Mapping[str, Any], *names: str) -> Any:
    for name in names:
        if section.get(name) is not None:
            return section[name]
    return None


def _flag(arguments: Mapping[str, Any], name: str) -> bool:
    return bool(arguments.get(name)) and str(arguments.get(name)).lower() != "false"


def _is_unmodelled(row: Mapping[str, Any]) -> bool:
    arguments = row.get("megatron_args", {})
    config = row.get("model", {}).get("config", {})
    words = (
        "--multi-latent-attention",
        "--mtp-num-layers",
        "--is-hybrid-model",
        "--fp8-format",
        "--use-megatron-fsdp",
        "--pipeline-model-parallel-layout",
        "--optimizer-cpu-offload",
        "--cpu-offloading-num-layers",
        "--use-torch-fsdp2",
        "--heterogeneous-layers-config-path",
        "--moe-layer-freq",
    )
    category = row.get("model", {}).get("category")
    odd = category not in (None, "gpt", "moe", "mixtral") or config.get("attention_type") == "mla"
    precision = str(row.get("train", {}).get("precision", "bf16")).lower()
    return odd or any(word in arguments for word in words) or "fp8" in precision or "fp4" in precision


def _model(row: Mapping[str, Any]) -> dict[str, Any] | None:
    source, arguments = row.get("model", {}), row.get("megatron_args", {})
    config = source.get("config", {})
    merged = {**source, **config}
    fields: dict[str, Any] = {
        # A source that trains fewer layers than the model of that name has says so beside the configuration.
        "num_layers": _first(source, "num_layers", "num_blocks") or config.get("layer_num"),
        "hidden": _first(merged, "hidden", "hidden_size"),
        "heads": _first(merged, "heads", "head_num", "attn_heads"),
        "kv_heads": _first(merged, "kv_heads", "kv_head_num") or arguments.get("--num-query-groups"),
        "ffn": _first(merged, "ffn", "intermediate_size", "feedforward") or arguments.get("--ffn-hidden-size"),
        "seq": _first(merged, "seq", "seq_size"),
        "vocab": _first(merged, "vocab", "vocab_size") or arguments.get("--vocab-size"),
        "swiglu": _first(merged, "swiglu", "use_swiglu") or _flag(arguments, "--swiglu"),
        "head_size": _first(merged, "head_size", "attn_size") or arguments.get("--kv-channels"),
        "num_experts": _first(merged, "num_experts", "expert_num"),
        "topk": _first(merged, "topk") or arguments.get("--moe-router-topk"),
        "moe_ffn": _first(merged, "moe_ffn", "moe_ffn_hidden_size") or arguments.get("--moe-ffn-hidden-size"),
        "shared_expert_ffn": _first(merged, "shared_expert_ffn", "moe_shared_expert_intermediate_size"),
    }
    if arguments:
        fields["tied_embeddings"] = not _flag(arguments, "--untie-embeddings-and-output-weights")
    if any(fields[name] is None for name in ("num_layers", "hidden", "heads", "seq")):
        return None
    fields["type"] = "moe" if fields["num_experts"] else "gpt"
    return {key: value for key, value in fields.items() if value is not None}


def broken_part(row: Mapping[str, Any]) -> str | None:
    """What in ``row`` is no object although it must be one, or ``None``."""
    sections = {name: row[name] for name in ("model", "hw", "train", "measured", "megatron_args") if name in row}
    model = row.get("model")
    if isinstance(model, Mapping) and "config" in model:
        sections["model.config"] = model["config"]
    for name, section in sections.items():
        if not isinstance(section, Mapping):
            return f"{name} is {section!r}, must be an object"
    return None


def _check_counts(hardware: Mapping[str, Any], parallel: Mapping[str, Any]) -> None:
    counts = [("hw", key, hardware.get(key)) for key in ("num_gpus", "gpus_per_node")]
    counts += [("parallel", key, parallel.get(key)) for key in ("tp", "pp", "dp", "cp", "layers_per_vpp")]
    for where, key, value in counts:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{where}.{key} is {value!r}, must be a whole number of at least 1.")


def request_of_row(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """A request as ``predict`` takes it, or ``None`` where the row describes no gpt or moe run in full.

    Raises ``ConfigError`` where a count of its layout is none. Its sections must be objects (see ``broken_part``).
    """
    hardware, parallel, train = (row.get(name, {}) for name in ("hw", "parallel", "train"))
    if not isinstance(parallel, Mapping) or _is_unmodelled(row) or "fsdp" in parallel:
        return None
    model = _model(row)
    if model is None or not hardware.get("gpu") or not hardware.get("num_gpus"):
        return None
    _check_counts(hardware, parallel)
    arguments = row.get("megatron_args", {})
    layout = {
        name: parallel[name]
        for name in ("tp", "pp", "dp", "cp", "ep", "vpp", "sp", "dist_opt")
        if parallel.get(name) is not None
    }
    if parallel.get("layers_per_vpp") and layout.get("pp", 1) > 1:
        layout["vpp"] = model["num_layers"] // (layout["pp"] * parallel["layers_per_vpp"])
    micro = train.get("mbs", 1)
    batch = train.get("gbs")
    shards = layout.get("tp", 1) * layout.get("pp", 1) * layout.get("cp", 1)
    if batch is None and train.get("micro_batch_count"):
        data = layout.get("dp") or hardware["num_gpus"] // shards
        batch = train["micro_batch_count"] * micro * data
    if batch is None:
        return None
    if hardware["num_gpus"] != shards * layout.get("dp", hardware["num_gpus"] // shards):
        layout.pop("dp", None)
    recompute = {"attn_only": "selective", None: "none"}.get(train.get("recompute"), train.get("recompute"))
    request_train: dict[str, Any] = {"gbs": batch, "mbs": micro, "recompute": recompute}
    for name in (
        "precision",
        "cross_entropy_fusion",
        "stack",
        "attention",
        "overlap_grad_reduce",
        "tp_comm_overlap",
        "moe_a2a_overlap",
    ):
        if train.get(name) is not None:
            request_train[name] = train[name]
    if arguments:
        # Megatron's own fused loss keeps fp32 logits, Transformer Engine's does not.
        request_train["cross_entropy_fusion"] = arguments.get("--cross-entropy-fusion-impl") == "te"
        unfused = arguments.get("--attention-backend") == "unfused" or arguments.get("--transformer-impl") == "local"
        request_train["attention"] = "unfused" if unfused else "fused"
        request_train["stack"] = "megatron-core"
    request = {"id": row.get("id", ""), "model": model, "hw": dict(hardware), "parallel": layout}
    request["train"] = request_train
    return request if train.get("recompute") or arguments else _with_room(request)


def _with_room(request: dict[str, Any]) -> dict[str, Any]:
    """The least recompute with which a run fits that was published without saying what it recomputed."""
    for recompute in RECOMPUTE:
        request = {**request, "train": {**request["train"], "recompute": recompute}}
        if predict_one(request)["status"] != "out_of_memory":
            break
    return request
