"""Draws trainings: models of every family on several devices, in layouts and with switches that Megatron runs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from mindspeed_autoparallel.cost.analytic.reading import read_workload
from mindspeed_autoparallel.errors import ConfigError

_SIZES = {"num_layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256, "swiglu": True}
_DENSE = {"type": "gpt", **_SIZES, "seq": 4096}
_EXPERTS = {**_DENSE, "type": "moe", "num_experts": 64, "topk": 8, "moe_ffn": 1408, "num_dense_layers": 1}
_LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
MODELS: dict[str, dict[str, Any]] = {
    "dense": _DENSE,
    "tied": {**_DENSE, "hidden": 2048, "heads": 16, "ffn": 8192, "tied_embeddings": True},
    "gpt3": {"type": "gpt", "num_layers": 24, "hidden": 2048, "heads": 16, "ffn": 8192, "vocab": 51200, "seq": 2048},
    "experts": _EXPERTS,
    "latent": {**_EXPERTS, "kv_heads": None, "mla": _LATENT, "mtp_layers": 1},
    "hybrid": {
        **_DENSE,
        "layer_pattern": "M-M-M*-M-M-M*-M-M-M*-M-M-M*-M-M-",
        "mamba_num_heads": 64,
        "mamba_head_dim": 128,
        "mamba_state_dim": 128,
        "mamba_num_groups": 8,
    },
    "vision": {
        **_DENSE,
        "vision_encoder": {"num_layers": 24, "hidden": 1024, "heads": 16, "ffn": 4096, "tokens_per_sample": 1024},
    },
}
DEVICES = ("A100-80GB", "H100", "B200", "910B")


def drawn(count: int, seed: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield names and requests whose sizes divide, every family and device equally often."""
    random_ = random.Random(seed)
    number = 0
    while number < count:
        family = list(MODELS)[number % len(MODELS)]
        device = DEVICES[number // len(MODELS) % len(DEVICES)]
        request = _request(random_, family, device)
        try:
            read_workload(request)
        except ConfigError:
            continue
        yield f"{number}-{family}-{device}", request
        number += 1


def _request(random_: random.Random, family: str, device: str) -> dict[str, Any]:
    devices = 2 ** random_.randint(3, 10)
    model = MODELS[family]
    pipeline = random_.choice([1, 1, 2, 4, 8])
    # Megatron lays hybrid patterns and encoders out its own way: whole stages.
    virtual = random_.choice([1, 2]) if pipeline > 1 and family in ("dense", "gpt3", "experts", "tied") else 1
    parallel: dict[str, Any] = {
        "tp": random_.choice([1, 2, 4, 8]),
        "pp": pipeline,
        "vpp": virtual,
        "cp": random_.choice([1, 1, 1, 2]) if family != "hybrid" else 1,
        "dist_opt": random_.random() < 0.8,
    }
    if model["type"] == "moe":
        parallel |= {"ep": random_.choice([1, 4, 8, 16]), "etp": 1}
    return {
        "model": model,
        "hw": {"gpu": device, "num_gpus": devices, "gpus_per_node": 8},
        "parallel": parallel,
        "train": {
            "gbs": devices * random_.choice([2, 8]),
            "mbs": random_.choice([1, 2, 4]),
            "recompute": random_.choice(["none", "selective", "full"]),
            "overlap_grad_reduce": random_.random() < 0.7,
            "tp_comm_overlap": random_.random() < 0.3,
            "stack": "megatron-core",
        },
    }
