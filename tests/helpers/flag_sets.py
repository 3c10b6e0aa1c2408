"""Flag sets of drawn plans: twenty models on every accelerator of the catalogue, as ``--script`` writes them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mindspeed_autoparallel.cli._launch import MEGATRON, NEWEST, host_of, launch_flags
from mindspeed_autoparallel.cli._script import model_flags
from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan, PlanError
from mindspeed_autoparallel.planner.layouts.assembly import plan_of
from mindspeed_autoparallel.planner.layouts.layout_solver import simple_splits
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions, enumerate_layouts
from mindspeed_autoparallel.predict.analytic_profile import analytic_profile, stated_train, usual_points
from mindspeed_autoparallel.predict.model_file import Section
from mindspeed_autoparallel.spec import Cluster, Plan
from mindspeed_autoparallel.spec.plan_records import SearchRecord

DEVICES = (
    *("A100-40GB", "A100-80GB", "H100", "H200", "B200", "B300", "GB200", "GB300", "MI300X", "MI355X"),
    *("910B", "910C", "910C die"),
)


def _dense(layers: int, hidden: int, heads: int, kv: int, ffn: int, **more: Any) -> dict[str, Any]:
    sizes = {"num_layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv, "head_size": 128, "ffn": ffn}
    return {**sizes, "seq": 4096, "vocab": 128000, "swiglu": True, **more}


def _experts(layers: int, hidden: int, heads: int, kv: int, ffn: int, **more: Any) -> dict[str, Any]:
    return {**_dense(layers, hidden, heads, kv, ffn), "type": "moe", **more}


_LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
MODELS: dict[str, dict[str, Any]] = {
    "llama 1B": _dense(16, 2048, 32, 8, 8192, head_size=64, tied_embeddings=True),
    "llama 8B": _dense(32, 4096, 32, 8, 14336),
    "llama 70B": _dense(80, 8192, 64, 8, 28672),
    "llama 405B": _dense(126, 16384, 128, 8, 53248),
    "qwen 0.6B": _dense(28, 1024, 16, 8, 3072, tied_embeddings=True, qk_norm=True),
    "qwen 7B": _dense(28, 3584, 28, 4, 18944),
    "qwen 14B": _dense(48, 5120, 40, 8, 13824),
    "qwen 32B": _dense(64, 5120, 64, 8, 25600, qk_norm=True),
    "gpt 175B": {
        **_dense(96, 12288, 96, 0, 49152, seq=2048, vocab=51200, tied_embeddings=True),
        **dict.fromkeys(("kv_heads", "swiglu")),
    },
    "long 8B": _dense(32, 4096, 32, 8, 14336, seq=131072),
    "prime 13 layers": _dense(13, 2048, 16, 4, 8192),
    "prediction": _dense(32, 4096, 32, 8, 14336, mtp_layers=1),
    "mixtral 8x7B": _experts(32, 4096, 32, 8, 14336, num_experts=8, topk=2, moe_ffn=14336),
    "mixtral 8x22B": _experts(56, 6144, 48, 8, 16384, num_experts=8, topk=2, moe_ffn=16384),
    "qwen 30B-A3B": _experts(48, 2048, 32, 4, 6144, num_experts=128, topk=8, moe_ffn=768, qk_norm=True),
    "qwen 235B-A22B": _experts(94, 4096, 64, 4, 12288, num_experts=128, topk=8, moe_ffn=1536, qk_norm=True),
    "shared experts": _experts(46, 4096, 96, 8, 10944, num_experts=128, topk=8, moe_ffn=1408, shared_expert_ffn=1408),
    "fine experts": _experts(28, 2048, 16, 16, 10944, num_experts=64, topk=6, moe_ffn=1408, shared_expert_ffn=2816),
    "latent attention": _dense(60, 5120, 128, 128, 12288, mla=_LATENT),
    "latent experts": _experts(
        27, 2048, 16, 16, 10944, num_experts=64, topk=6, moe_ffn=1408, shared_expert_ffn=2816,
        mla={**_LATENT, "q_lora_rank": None},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class FlagSet:
    """What a launch of one plan has."""

    name: str
    host: str
    num_devices: int
    words: tuple[str, ...]


def drawn_flag_sets(seed: int, *, release: tuple[int, int] = NEWEST, every: int = 1) -> Iterator[FlagSet]:
    """Yield the flags of a drawn legal layout of every model on every device (of every so many of these pairs); plans
    that no flags describe are left out: the script trains them by their file."""
    pairs = [(model, device) for model in MODELS for device in DEVICES]
    for model, device in pairs[::every]:
        shape = MODELS[model]
        plan = drawn_plan(shape, device, random.Random(f"{seed} {model} {device}"))
        if plan is None:
            continue
        host = host_of(plan)
        if host != MEGATRON and model_flags(shape, host) is None:
            continue  # sizes that MindSpeed-LLM's user writes
        try:
            words = launch_flags(plan, host, int(shape.get("mtp_layers") or 0), release)
        except (PlanError, ConfigError):
            continue  # no flags, or none that the release could train with
        name = f"{model}, {device}: {plan.layout.label()} {plan.profile.train}"
        yield FlagSet(name, host, plan.cluster.num_devices, (*_model_words(shape, host), *words))


def drawn_plan(shape: dict[str, Any], name: str, drawn: random.Random) -> Plan | None:
    """Return a drawn layout with a simple split; ``None`` where none of four has one."""
    device = find_device(name)
    sections = [Section("text_decoder", shape)]
    cluster = Cluster(num_nodes=drawn.choice([1, 2, 4, 16]), devices_per_node=8)
    batch = drawn.choice([1, 2, 3]) * cluster.num_devices
    usual = list(usual_points(sections, device, 8, {}))
    points = drawn.sample(usual, min(6, len(usual)))
    train = stated_train(sections, device, drawn_switches(device, drawn, shape.get("num_experts")))
    profile = analytic_profile(sections, device, 8, train=train, points=points)
    space = SpaceOptions(overlap_gradient_reduce=True, standalone_ends="Ascend" not in device.name)
    candidates, _ = enumerate_layouts(profile, cluster, batch, space)
    drawn.shuffle(candidates)
    for candidate in candidates[:4]:
        try:
            splits = list(simple_splits(candidate).values())
        except (InfeasiblePlan, ConfigError):
            continue
        if splits:
            split = drawn.choice([one for one in splits if one.fits] or splits)
            record = SearchRecord(
                status="feasible", lower_bound_us=0.0, gap_fraction=1.0, num_configurations=1, num_solved=1, seconds=0.0
            )
            return plan_of(profile, cluster, candidate.layout, split, batch, record)
    return None


def drawn_switches(device: Device, drawn: random.Random, num_experts: int | None = None) -> dict[str, Any]:
    """Return switches of a training that the device takes, as a request's section ``train`` has them."""
    recipes = [*(["fp8", "fp8_blockwise", "mxfp8"] if device.peak_fp8_tflops else [])]
    recipes += ["nvfp4"] if device.peak_fp4_tflops else []
    train: dict[str, Any] = {"precision": drawn.choice(["bf16", *recipes])}
    on_ascend = "Ascend" in device.name
    names = ["fp32", "torch.float32", "bf16", "bfloat16", "fp16", "float16", "fp8"]
    state = {key: drawn.choice(names) for key in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")}
    train |= {key: name for key, name in state.items() if drawn.random() < 0.3}
    train |= {key: False for key in ("rope_fusion", "bias_activation_fusion") if drawn.random() < 0.3}
    train |= {"attention": "unfused"} if drawn.random() < 0.2 else {}
    if not on_ascend:
        others = {
            "cross_entropy_fusion": [True, False],
            "grad_reduce_in_bf16": [None, True, False],
            "optimizer_cpu_offload": [None, True],
            "moe_a2a_overlap": [None, True] if num_experts else [None],
            "cuda_graph": [None, None, "local", "transformer_engine", "full_iteration"],
        }
        train |= {key: value for key, values in others.items() if (value := drawn.choice(values)) is not None}
    train |= {"dropout": False} if drawn.random() < 0.5 else {}
    train |= {"gradient_accumulation_fusion": False} if drawn.random() < 0.5 else {}
    return train


def _model_words(shape: dict[str, Any], host: str) -> list[str]:
    """Return the model's flags: as ``--script`` writes them, or where it leaves them to the user, a user's."""
    words = model_flags(shape, host)
    if words is not None:
        return words
    latent = shape.get("mla") or {}
    words = model_flags({key: value for key, value in shape.items() if key not in ("mla", "kv_heads")}, host) or []
    names = {
        "qk_nope_head_dim": "--qk-head-dim",
        "v_head_dim": "--v-head-dim",
        "qk_rope_head_dim": "--qk-pos-emb-head-dim",
    }
    names |= {"q_lora_rank": "--q-lora-rank", "kv_lora_rank": "--kv-lora-rank"}
    given = [word for key, flag in names.items() if latent.get(key) for word in (flag, str(latent[key]))]
    return [*words, "--multi-latent-attention", *given]
