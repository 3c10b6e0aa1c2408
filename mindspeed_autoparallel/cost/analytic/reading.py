"""Reads a prediction request into a workload; refuses requests that no run can start with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from mindspeed_autoparallel.cost.analytic.fields import (
    counts,
    integer,
    number,
    optional_integer,
    optional_section,
    section_of,
    switch,
)
from mindspeed_autoparallel.cost.analytic.model_shape import ENCODER, ModelShape
from mindspeed_autoparallel.cost.analytic.placement import PlacementRequest, place_layers, unfold_layout
from mindspeed_autoparallel.cost.analytic.reading_model import read_model
from mindspeed_autoparallel.cost.analytic.reading_train import read_recompute, read_recompute_detail, read_training
from mindspeed_autoparallel.cost.analytic.releases import with_release
from mindspeed_autoparallel.cost.analytic.request_keys import refuse_unmodelled
from mindspeed_autoparallel.cost.analytic.spellings import canonical
from mindspeed_autoparallel.cost.analytic.workload import Sharding, Workload, is_ascend
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.spec import legality

_CONTEXT_KINDS = {
    **dict.fromkeys(("ring", "p2p", "megatron_cp_algo", "adaptive_cp_algo"), "ring"),
    **dict.fromkeys(("ulysses", "a2a", "ulysses_cp_algo", "mamba_cp_algo"), "ulysses"),
    **dict.fromkeys(("hybrid", "a2a+p2p", "hybrid_cp_algo", "hybrid_adaptive_cp_algo"), "hybrid"),
    **dict.fromkeys(("allgather", "all_gather", "kvallgather_cp_algo"), "allgather"),
}
_STRATEGIES: Mapping[str, Sharding] = {
    "no_shard": "",
    "optim": "",
    "optim_grads": "gradients",
    "optim_grads_params": "parameters",
}
"""``--data-parallel-sharding-strategy``."""
_TRAY = 4
"""Devices of a compute tray of a rack (NVIDIA GB200 and GB300 NVL72); other nodes have eight."""
VARIABLE_TOKENS = 1024
"""Tokens per sample if lengths vary and no mean is given; an answer's notes state it."""


def read_workload(request: Mapping[str, object], module: str = "text_decoder") -> Workload:
    """Return the workload a request describes; ``module`` names its model in messages.

    Raises ``ConfigError`` with the key, the value and the rule for anything that no run can start with, and for
    keys that would change the answer but are not modelled.
    """
    request = canonical(request)
    refuse_unmodelled(request)
    hardware, parallel, train = (section_of(request, key) for key in ("hw", "parallel", "train"))
    noop = counts(parallel, "noop_layers", "parallel")
    model = _documents(read_model(_with_predictions(section_of(request, "model"), parallel), len(noop)), train)
    gpu = gpu_name(hardware)
    devices, node = _devices(hardware)
    tensor, pipeline, context, data = _layout(parallel, devices)
    expert = integer(parallel, "ep", 1, "parallel")
    virtual = _virtual(parallel, model.num_layers + len(noop), pipeline)
    stack, attention = _software(train, gpu, model)
    modern = stack == "megatron-core"
    sequence_parallel = bool(switch(parallel, "sp", modern, "parallel")) and tensor > 1
    work = Workload(
        model=model,
        gpu=gpu,
        num_devices=devices,
        devices_per_node=node,
        inter_node_gbit_per_s=network_rate(hardware),
        tensor_size=tensor,
        pipeline_size=pipeline,
        data_size=data,
        context_size=context,
        expert_size=expert,
        expert_tensor_size=_expert_tensor(parallel, tensor, expert, data * context),
        virtual_size=virtual,
        sequence_parallel=sequence_parallel,
        distributed_optimizer=bool(switch(parallel, "dist_opt", modern, "parallel")),
        global_batch=integer(train, "gbs", None, "train"),
        micro_batch=integer(train, "mbs", None, "train"),
        recompute=read_recompute(train),
        recompute_detail=read_recompute_detail(train, model),
        stages=place_layers(model, _placement(parallel, pipeline, virtual, noop)),
        stack=stack,
        fused_attention=attention == "fused",
        cross_entropy_fusion=bool(train.get("cross_entropy_fusion", modern)),
        **_context(parallel, context),
        tensor_grid=_grid(parallel, tensor),
        group_microbatches=integer(parallel, "microbatch_group_size", 0, "parallel", 0),
        gathered_experts=section_of(request, "model").get("dispatcher") == "allgather",
        exchanged_per_expert=section_of(request, "model").get("dispatcher") == "alltoall",
        **read_training(train, gpu, stack),
        **_sharding(parallel, data * context, gpu),
    )
    _check_layout(work, module)
    return with_release(work, section_of(request, "model"), train)


def _check_layout(work: Workload, name: str) -> None:
    """Raise ``IllegalLayout`` if no run of the module ``name`` can start in the layout."""
    model, layout = work.model, work.layout
    own = legality.Shared(name=name, num_heads=model.heads, num_kv_heads=model.kv_heads, num_experts=model.num_experts)
    encoders = [legality.Shared(name=ENCODER, num_heads=model.encoder.heads)] if model.encoder else []
    broken = (
        legality.broken_shares(layout, [*encoders, own], bool(model.num_experts))
        or legality.uneven_sequence(layout, model.sequence)
        or legality.uneven_widths(layout, model.ffn, model.expert_ffn if model.num_experts else 0, name)
        or legality.broken_groups(layout, bool(model.num_experts))
        or legality.broken_batch(layout, work.global_batch)
        or legality.offloaded_beside_stages(layout, work.offloaded_layers)
    )
    if broken:
        raise legality.IllegalLayout(broken)


def gpu_name(hardware: Mapping[str, object]) -> str:
    """Return the device's name in the section ``hw``. Raises ``ConfigError`` if there is none."""
    gpu = hardware.get("gpu")
    if not isinstance(gpu, str) or not gpu:
        found = "missing" if gpu in (None, "") else f"{gpu!r}"
        raise ConfigError(f"hw.gpu is {found}; name a device, for example A100-80GB.")
    return gpu


def network_rate(hardware: Mapping[str, object]) -> float | None:
    """Return the Gbit/s of a node's network that the section ``hw`` gives; ``None`` if it gives none."""
    bandwidth = hardware.get("inter_node_gbps")
    if bandwidth is not None and (not isinstance(bandwidth, (int, float)) or not 0 < bandwidth < math.inf):
        raise ConfigError(f"hw.inter_node_gbps is {bandwidth!r}, must be a number above 0.")
    return float(bandwidth) if bandwidth else None


def _documents(model: ModelShape, train: Mapping[str, object]) -> ModelShape:
    """Return ``model`` with the mean length of packed documents, or of padded batches, if the request states it.

    Batches of varying length and packed examples without a mean: ``VARIABLE_TOKENS``, as instruction data has them.
    """
    if train.get("variable_seq") and not train.get("packing"):
        tokens = min(model.sequence, math.ceil((model.attended or VARIABLE_TOKENS) / 128) * 128)
        return dataclasses.replace(model, sequence=tokens, attended=0.0)
    length = number(train, "mean_document", model.attended, "train", 0.0, math.inf)
    if not length and packs_examples(train):
        length = float(min(model.sequence, VARIABLE_TOKENS))
    return dataclasses.replace(model, attended=length) if length != model.attended else model


def packs_examples(train: Mapping[str, object]) -> bool:
    """Return whether a run packs examples that attention separates, and the request gives no mean length of them."""
    return bool(train.get("packing")) and str(train.get("task")).startswith("sft") and not train.get("mean_document")


def _devices(hardware: Mapping[str, object]) -> tuple[int, int]:
    devices = integer(hardware, "num_gpus", None, "hw")
    usual = _TRAY if any(rack in gpu_name(hardware).lower() for rack in ("gb200", "gb300")) else 8
    node = integer(hardware, "gpus_per_node", min(usual, devices), "hw")
    if devices > node and devices % node:
        raise ConfigError(
            f"hw.num_gpus {devices} does not fill nodes of gpus_per_node {node}; the nearest are "
            f"{devices // node * node} and {(devices // node + 1) * node}."
        )
    return devices, node


def _layout(parallel: Mapping[str, object], devices: int) -> tuple[int, int, int, int]:
    tensor, pipeline, context = (integer(parallel, key, 1, "parallel") for key in ("tp", "pp", "cp"))
    data = optional_integer(parallel, "dp", "parallel")
    if uneven := legality.uneven_devices(devices, tensor, pipeline, context, data):
        raise legality.IllegalLayout(uneven)
    return tensor, pipeline, context, data or devices // (tensor * pipeline * context)


def _virtual(parallel: Mapping[str, object], layers: int, pipeline: int) -> int:
    each = optional_integer(parallel, "layers_per_chunk", "parallel")
    stated, layout = optional_integer(parallel, "vpp", "parallel", 0), parallel.get("pipeline_layout")
    if not stated and pipeline > 1 and isinstance(layout, str) and layout:
        # Megatron derives the virtual size from a layout's chunks, too.
        return max(1, (unfold_layout(layout).count("|") + 1) // pipeline)
    if stated is not None or each is None or pipeline == 1:
        return stated or 1
    if layers % (pipeline * each):
        raise ConfigError(f"{layers} layers in chunks of {each} do not fill {pipeline} stages evenly.")
    return layers // (pipeline * each)


def _with_predictions(section: Mapping[str, object], parallel: Mapping[str, object]) -> Mapping[str, object]:
    """Return a model's ``section`` with the layers of multi-token prediction that a layout string has, if it states
    no number of them."""
    layout = parallel.get("pipeline_layout")
    if section.get("mtp_layers") is not None or not isinstance(layout, str):
        return section
    written = unfold_layout(layout).count("m")
    return {**section, "mtp_layers": written} if written else section


def _software(train: Mapping[str, object], gpu: str, model: ModelShape) -> tuple[str, str]:
    stack = train.get("stack")
    if stack is None:
        old_device = any(word in gpu.upper() for word in ("A100", "A800", "V100"))
        stack = "megatron-2021" if old_device and not model.modern else "megatron-core"
    if stack not in ("megatron-2021", "megatron-core"):
        raise ConfigError(f"train.stack is {stack!r}, must be megatron-2021 or megatron-core.")
    attention = train.get("attention") or ("fused" if stack == "megatron-core" else "unfused")
    if attention not in ("fused", "unfused"):
        raise ConfigError(f"train.attention is {attention!r}, must be fused or unfused.")
    return stack, attention


def _placement(parallel: Mapping[str, object], pipeline: int, virtual: int, noop: tuple[int, ...]) -> PlacementRequest:
    layout = parallel.get("pipeline_layout") or ""
    if not isinstance(layout, str):
        raise ConfigError(f"parallel.pipeline_layout is {layout!r}, must be a layout string such as Ettt|ttL.")
    return PlacementRequest(
        pipeline_size=pipeline,
        virtual_size=virtual,
        layer_list=counts(parallel, "num_layer_list", "parallel"),
        layout=layout,
        noop_layers=noop,
        first_stage=optional_integer(parallel, "first_stage_layers", "parallel", 0),
        last_stage=optional_integer(parallel, "last_stage_layers", "parallel", 0),
        account_for_embedding=bool(switch(parallel, "account_for_embedding", False, "parallel")),
        account_for_loss=bool(switch(parallel, "account_for_loss", False, "parallel")),
    )


def _context(parallel: Mapping[str, object], context: int) -> dict[str, Any]:
    kind = parallel.get("cp_type") or "ring"
    if not isinstance(kind, str) or kind not in _CONTEXT_KINDS:
        raise ConfigError(f"parallel.cp_type is {kind!r}, known: {', '.join(_CONTEXT_KINDS)}.")
    name = _CONTEXT_KINDS[kind]
    degree = integer(parallel, "ulysses_degree", context if name == "ulysses" else 1, "parallel")
    if name == "ulysses":
        degree = context
    if context % degree:
        raise ConfigError(f"parallel.ulysses_degree {degree} does not divide cp {context}.")
    return {"context_kind": name, "ulysses_size": degree}


def _sharding(parallel: Mapping[str, object], ranks: int, gpu: str) -> dict[str, Any]:
    """Return the fields of Megatron's FSDP: ``fsdp`` ranks divide what is sharded, further ranks hold copies (HSDP)."""
    size = optional_integer(parallel, "fsdp", "parallel", 0) if parallel.get("fsdp") is not False else None
    strategy = parallel.get("sharding_strategy") or "optim_grads_params"
    if not isinstance(strategy, str) or strategy not in _STRATEGIES:
        raise ConfigError(f"parallel.sharding_strategy is {strategy!r}, known: {', '.join(_STRATEGIES)}.")
    if size in (None, 0, 1):
        if parallel.get("sharding_strategy"):
            raise ConfigError("parallel.sharding_strategy selects what fsdp shards, but parallel.fsdp is missing.")
        return {}
    assert size is not None
    if is_ascend(gpu):
        raise ConfigError(f"parallel.fsdp is {size}: fully sharded parameters of MindSpeed (FSDP2) are not modelled.")
    if ranks % size:
        raise ConfigError(f"parallel.fsdp {size} does not divide dp x cp {ranks}.")
    return {"sharding": _STRATEGIES[strategy], "sharding_replicas": ranks // size}


def _grid(parallel: Mapping[str, object], tensor: int) -> tuple[int, int] | None:
    values = optional_section(parallel, "tp_2d", "parallel")
    if values is None:
        return None
    grid = integer(values, "x", None, "parallel.tp_2d"), integer(values, "y", None, "parallel.tp_2d")
    if grid[0] * grid[1] != tensor:
        raise ConfigError(f"parallel.tp_2d {grid[0]} x {grid[1]} is not tp {tensor}.")
    return grid


def _expert_tensor(parallel: Mapping[str, object], tensor: int, expert: int, replicas: int) -> int:
    """Return the requested size; by default the tensor size, as in Megatron, or 1 if only that leaves room for
    ``expert``."""
    if parallel.get("etp") is not None:
        return integer(parallel, "etp", None, "parallel")
    return tensor if replicas % expert == 0 else 1
