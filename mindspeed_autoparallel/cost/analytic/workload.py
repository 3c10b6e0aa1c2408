"""What is predicted: model, hardware, layout and batch, checked for legality."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_autoparallel.errors import ConfigError

DEFAULT_VOCABULARY = 51200
RECOMPUTE = ("none", "selective", "full")
"""From keeping all to keeping a layer's input only."""
_KEYS = {
    "model": frozenset(
        {
            "type",
            "num_layers",
            "hidden",
            "heads",
            "kv_heads",
            "head_size",
            "ffn",
            "seq",
            "vocab",
            "swiglu",
            "num_experts",
            "topk",
            "moe_ffn",
            "shared_expert_ffn",
            "tied_embeddings",
            "causal",
            "window",
            "windowed_share",
            "expert_bias",
            "expert_clamp",
        }
    ),
    "hw": frozenset({"gpu", "num_gpus", "gpus_per_node", "inter_node_gbps"}),
    "parallel": frozenset({"tp", "pp", "dp", "cp", "ep", "etp", "vpp", "sp", "dist_opt"}),
    "train": frozenset(
        {
            "gbs",
            "mbs",
            "recompute",
            "precision",
            "stack",
            "attention",
            "cross_entropy_fusion",
            "overlap_grad_reduce",
            "tp_comm_overlap",
            "moe_a2a_overlap",
        }
    ),
}
"""Keys of a request's sections that say something about the run."""
_LARGEST = 10**12
_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4, "float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder-only transformer; sizes are counts."""

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    sequence: int
    vocabulary: int
    gated: bool
    num_experts: int = 0
    topk: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    head_size: int = 0
    tied: bool = False
    causal: bool = True
    """Whether a token attends to those before it only; encoders attend to all."""
    window: int = 0
    """Tokens that a token attends to in layers with a window; 0 where no layer has one."""
    windowed_share: float = 0.0
    """Share of the layers that have the window."""
    expert_bias: bool = False
    """Whether experts have biases, the second of which Megatron adds row by row in fp32, outside of its kernels."""
    expert_clamp: bool = False
    """Whether both halves of the experts' gated activation are clamped, in passes of their own."""

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.heads * (self.head_size or self.hidden // self.heads)

    @property
    def kv_size(self) -> int:
        """Width of all key heads together (the same as of all value heads)."""
        return self.kv_heads * (self.head_size or self.hidden // self.heads)

    @property
    def modern(self) -> bool:
        """Whether only software with fused attention trains this: gated, grouped heads, experts, long sequences."""
        return self.gated or self.num_experts > 0 or self.kv_heads != self.heads or self.sequence > 2048


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training run whose step is predicted."""

    model: Model
    gpu: str
    num_devices: int
    devices_per_node: int
    inter_node_gbit_per_s: float | None
    tensor: int
    pipeline: int
    data: int
    context: int
    expert: int
    expert_tensor: int
    """Ranks that share one expert's matrices; Megatron takes the tensor size where nothing is said."""
    virtual: int
    sequence_parallel: bool
    distributed_optimizer: bool
    global_batch: int
    micro_batch: int
    recompute: str
    stack: str
    fused_attention: bool
    """Whether the attention matrix is never stored."""
    cross_entropy_fusion: bool = True
    """Whether Transformer Engine's loss is used, which keeps logits in the training precision only."""
    gradient_overlap: bool | None = None
    """Whether the reduction of gradients hides behind the backward pass; ``None``: as in the device's measured runs."""
    tensor_overlap: bool | None = None
    """Whether collectives of tensor parallelism hide behind products; ``None`` as above."""
    expert_overlap: bool = False
    """Whether tokens travel to experts and back behind the computing of another microbatch's other direction."""
    element_bytes: int = 2

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step and pipeline."""
        return self.global_batch // (self.data * self.micro_batch)

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch on one context-parallel rank."""
        return self.micro_batch * self.model.sequence // self.context

    @property
    def expert_data(self) -> int:
        """Ranks that hold the same experts."""
        return max(1, self.data * self.context * self.tensor // (self.expert * self.expert_tensor))

    @property
    def routed_rows(self) -> float:
        """Token copies that the experts of one rank work on, with balanced routing."""
        own = self.tokens / (self.tensor if self.sequence_parallel else 1)
        return own * self.model.topk * self.expert_tensor


def _integer(section: Mapping[str, Any], key: str, default: int | None, where: str, minimum: int = 1) -> int:
    value = section.get(key)
    if value is None:
        if default is None:
            raise ConfigError(f"{where}.{key} is missing.")
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ConfigError(f"{where}.{key} is {value!r}, must be a whole number.")
    try:
        number = int(float(value))
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{where}.{key} is {value!r}, must be a whole number.") from error
    if number != float(value) or number < minimum:
        raise ConfigError(f"{where}.{key} is {value!r}, must be a whole number of at least {minimum}.")
    if number > _LARGEST:
        raise ConfigError(f"{where}.{key} is {value!r}, must be at most {_LARGEST}.")
    return number


def _switch(section: Mapping[str, Any], key: str, default: bool | None, where: str) -> bool | None:
    value = section.get(key)
    if value is None:
        return default
    if value not in (True, False) or not isinstance(value, (bool, int)):
        raise ConfigError(f"{where}.{key} is {value!r}, must be true or false.")
    return bool(value)


def unknown_keys(request: Mapping[str, Any]) -> list[str]:
    """Keys of the request's sections that nothing is known about, such as misspelt ones: they change no figure."""
    return [
        f"{name}.{key}"
        for name, known in _KEYS.items()
        if isinstance(request.get(name), Mapping)
        for key in request[name]
        if key not in known
    ]


def _section(request: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = request.get(key)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} is missing or not an object.")
    return value


def _model(section: Mapping[str, Any]) -> Model:
    kind = section.get("type", "moe" if section.get("num_experts") else "gpt")
    if kind not in ("gpt", "moe"):
        raise ConfigError(f"model.type is {kind!r}, must be gpt or moe.")
    hidden = _integer(section, "hidden", None, "model")
    heads = _integer(section, "heads", None, "model")
    kv_heads = _integer(section, "kv_heads", heads, "model")
    head_size = _integer(section, "head_size", 0, "model", 0)
    if not head_size and hidden % heads:
        raise ConfigError(
            f"model.hidden {hidden} is not divisible by model.heads {heads}; give head_size if it is apart."
        )
    if heads % kv_heads:
        raise ConfigError(f"model.heads {heads} is not divisible by model.kv_heads {kv_heads}.")
    gated = bool(_switch(section, "swiglu", False, "model"))
    # Megatron's own defaults: a gated layer has three matrices, each two thirds as wide, in steps of 64.
    ffn = _integer(section, "ffn", int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden, "model")
    experts = _integer(section, "num_experts", 0, "model", 0)
    if kind == "moe" and not experts:
        raise ConfigError("model.num_experts is missing for model.type moe.")
    topk = _integer(section, "topk", 2, "model")
    if experts and topk > experts:
        raise ConfigError(f"model.topk {topk} is above model.num_experts {experts}.")
    return Model(
        num_layers=_integer(section, "num_layers", None, "model"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        sequence=_integer(section, "seq", None, "model"),
        vocabulary=_integer(section, "vocab", DEFAULT_VOCABULARY, "model"),
        gated=gated,
        num_experts=experts,
        topk=topk if experts else 0,
        expert_ffn=_integer(section, "moe_ffn", ffn, "model") if experts else 0,
        shared_ffn=_integer(section, "shared_expert_ffn", 0, "model", 0) if experts else 0,
        head_size=head_size,
        tied=bool(section.get("tied_embeddings", not gated and not experts)),
        causal=bool(section.get("causal", True)),
        **_window(section),
        expert_bias=bool(section.get("expert_bias", False)),
        expert_clamp=bool(section.get("expert_clamp", False)),
    )


def _window(section: Mapping[str, Any]) -> dict[str, Any]:
    """Size and share of the layers with windowed attention: all of them where only the size is said."""
    size = _integer(section, "window", 0, "model", 0)
    share = section.get("windowed_share", 1.0 if size else 0.0)
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise ConfigError(f"model.windowed_share is {share!r}, must be a number from 0 to 1.")
    if share and not size:
        raise ConfigError(f"model.windowed_share is {share!r}, but model.window is missing.")
    return {"window": size, "windowed_share": float(share)}


def read_workload(request: Mapping[str, Any]) -> Workload:
    """The workload a request describes.

    Raises ``ConfigError`` with the key, the value and the rule for anything that no run could be started with.
    """
    model = _model(_section(request, "model"))
    hardware, parallel, train = (_section(request, key) for key in ("hw", "parallel", "train"))
    gpu = hardware.get("gpu")
    if not isinstance(gpu, str) or not gpu:
        found = "missing" if gpu in (None, "") else f"{gpu!r}"
        raise ConfigError(f"hw.gpu is {found}; name a device, for example A100-80GB.")
    devices = _integer(hardware, "num_gpus", None, "hw")
    node = _integer(hardware, "gpus_per_node", min(8, devices), "hw")
    if devices > node and devices % node:
        raise ConfigError(
            f"hw.num_gpus {devices} does not fill nodes of gpus_per_node {node}; the nearest are "
            f"{devices // node * node} and {(devices // node + 1) * node}."
        )
    tensor, pipeline = (_integer(parallel, key, 1, "parallel") for key in ("tp", "pp"))
    context, expert, virtual = (_integer(parallel, key, 1, "parallel") for key in ("cp", "ep", "vpp"))
    shards = tensor * pipeline * context
    if devices % shards:
        raise ConfigError(f"tp {tensor} x pp {pipeline} x cp {context} = {shards} does not divide {devices} devices.")
    data = _integer(parallel, "dp", devices // shards, "parallel")
    if data * shards != devices:
        raise ConfigError(f"dp {data} x tp {tensor} x pp {pipeline} x cp {context} is not {devices} devices.")
    batch, micro = _integer(train, "gbs", None, "train"), _integer(train, "mbs", None, "train")
    recompute = train.get("recompute") or "none"
    if recompute not in RECOMPUTE:
        raise ConfigError(f"train.recompute is {recompute!r}, must be one of {', '.join(RECOMPUTE)}.")
    precision = str(train.get("precision") or "bf16").lower()
    if precision not in _BYTES:
        raise ConfigError(f"train.precision is {precision!r}, known: {', '.join(_BYTES)}; fp8 is not modelled.")
    stack = train.get("stack")
    if stack is None:
        old_device = any(word in gpu.upper() for word in ("A100", "A800", "V100"))
        stack = "megatron-2021" if old_device and not model.modern else "megatron-core"
    if stack not in ("megatron-2021", "megatron-core"):
        raise ConfigError(f"train.stack is {stack!r}, must be megatron-2021 or megatron-core.")
    attention = train.get("attention") or ("fused" if stack == "megatron-core" else "unfused")
    if attention not in ("fused", "unfused"):
        raise ConfigError(f"train.attention is {attention!r}, must be fused or unfused.")
    bandwidth = hardware.get("inter_node_gbps")
    if bandwidth is not None and (not isinstance(bandwidth, (int, float)) or not 0 < bandwidth < math.inf):
        raise ConfigError(f"hw.inter_node_gbps is {bandwidth!r}, must be a number above 0.")
    modern = stack == "megatron-core"
    gradient_overlap, tensor_overlap = train.get("overlap_grad_reduce"), train.get("tp_comm_overlap")
    work = Workload(
        model=model,
        gpu=gpu,
        num_devices=devices,
        devices_per_node=node,
        inter_node_gbit_per_s=float(bandwidth) if bandwidth else None,
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        context=context,
        expert=expert,
        expert_tensor=_expert_tensor(parallel, tensor, expert, data * context),
        virtual=virtual,
        sequence_parallel=bool(_switch(parallel, "sp", modern, "parallel")) and tensor > 1,
        distributed_optimizer=bool(_switch(parallel, "dist_opt", modern, "parallel")),
        global_batch=batch,
        micro_batch=micro,
        recompute=recompute,
        stack=stack,
        fused_attention=attention == "fused",
        cross_entropy_fusion=bool(train.get("cross_entropy_fusion", modern)),
        gradient_overlap=None if gradient_overlap is None else bool(gradient_overlap),
        tensor_overlap=None if tensor_overlap is None else bool(tensor_overlap),
        expert_overlap=bool(train.get("moe_a2a_overlap", False)),
        element_bytes=_BYTES[precision],
    )
    _check(work)
    return work


def _expert_tensor(parallel: Mapping[str, Any], tensor: int, expert: int, replicas: int) -> int:
    """What is asked for; else the tensor size as Megatron takes it, or 1 where only that leaves room for ``expert``."""
    if parallel.get("etp") is not None:
        return _integer(parallel, "etp", None, "parallel")
    return tensor if replicas % expert == 0 else 1


def _check(work: Workload) -> None:
    model = work.model
    if model.heads % work.tensor:
        raise ConfigError(f"{model.heads} attention heads cannot be split over tp {work.tensor}.")
    if max(model.kv_heads, work.tensor) % min(model.kv_heads, work.tensor):
        raise ConfigError(f"{model.kv_heads} key-value heads and tp {work.tensor}: neither divides the other.")
    if model.ffn % work.tensor:
        raise ConfigError(f"ffn {model.ffn} cannot be split over tp {work.tensor}.")
    if model.num_layers % (work.pipeline * work.virtual):
        raise ConfigError(
            f"{model.num_layers} layers cannot be split over pp {work.pipeline} x vpp {work.virtual} evenly."
        )
    if work.virtual > 1 and work.pipeline == 1:
        raise ConfigError(f"vpp {work.virtual} needs pp above 1.")
    step = work.data * work.micro_batch
    if work.global_batch % step:
        below, above = work.global_batch // step * step, (work.global_batch // step + 1) * step
        nearest = f"the nearest are {below} and {above}" if below else f"the least is {above}"
        raise ConfigError(
            f"gbs {work.global_batch} is not a multiple of dp {work.data} x mbs {work.micro_batch}; {nearest}."
        )
    if work.virtual > 1 and work.num_microbatches % work.pipeline:
        raise ConfigError(
            f"vpp {work.virtual} needs microbatches ({work.num_microbatches}) to be a multiple of pp {work.pipeline}."
        )
    if work.context > 1 and model.sequence % (2 * work.context):
        raise ConfigError(f"sequence {model.sequence} cannot be split over 2 x cp {work.context}.")
    if work.sequence_parallel and (model.sequence // work.context) % work.tensor:
        raise ConfigError(f"sequence {model.sequence} cannot be split over tp {work.tensor} for sequence parallelism.")
    if work.expert > 1:
        if not model.num_experts:
            raise ConfigError(f"ep {work.expert} needs a model with experts.")
        if model.num_experts % work.expert:
            raise ConfigError(f"{model.num_experts} experts cannot be split over ep {work.expert}.")
    shards, ranks = work.expert * work.expert_tensor, work.data * work.context * work.tensor
    if model.num_experts and ranks % shards:
        raise ConfigError(f"ep {work.expert} x etp {work.expert_tensor} does not divide dp x cp x tp {ranks}.")
    if model.expert_ffn % work.expert_tensor:
        raise ConfigError(f"expert ffn {model.expert_ffn} cannot be split over etp {work.expert_tensor}.")
