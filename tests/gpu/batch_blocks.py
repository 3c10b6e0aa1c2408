"""Forty blocks: measured on the device beside the prediction of the catalogue for it."""

from __future__ import annotations

import functools
import statistics
from typing import Any

KINDS: dict[str, dict[str, Any]] = {
    "dense": {"hidden": 4096, "heads": 32, "ffn": 11008, "gated": True},
    "gqa": {"hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "gated": True},
    "experts": {
        "hidden": 2048,
        "heads": 16,
        "ffn": 5632,
        "gated": True,
        "num_experts": 8,
        "topk": 2,
        "expert_ffn": 1408,
    },
    "vit": {"hidden": 1280, "heads": 16, "ffn": 5120},
    "mla": {"hidden": 2048, "heads": 16, "ffn": 5632, "gated": True, "mla": True},
    "linear_attention": {"hidden": 2048, "heads": 16, "ffn": 5632, "gated": True, "linear_attention": True},
}
LATENT = {"q_lora_rank": 768, "kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
LENGTHS = (1024, 4096, 8192)
NUM_REPEATS = 10


def items(small: bool) -> list[dict[str, Any]]:
    """Return forty blocks; small: two of each kind."""
    found = [
        {"block": kind, "sequence": length, "recompute": recompute}
        for kind in KINDS
        for length in LENGTHS
        for recompute in ("none", "full", "selective")
        if recompute != "selective" or (length == 4096 and kind in ("dense", "gqa", "experts", "vit"))
    ]
    if small:
        return [dict(item, sequence=64) for item in found if item["sequence"] == 1024]
    return found[:40]


def run(figures: Any) -> None:
    """Measure and predict every block."""
    import torch

    import mindspeed_autoparallel  # noqa: F401  # before megatron
    from mindspeed_autoparallel.runtime.devices.selection import current_device, prepare_for_megatron
    from mindspeed_autoparallel.runtime.profiling.balanced_routing import balance_routing

    prepare_for_megatron()
    balance_routing()
    device = current_device()
    torch.manual_seed(1)
    _groups()

    def measure(item: dict[str, Any]) -> dict[str, Any]:
        sizes = _small(KINDS[item["block"]]) if figures.small else KINDS[item["block"]]
        measured = _measured(sizes, item["sequence"], item["recompute"], device)
        predicted = predicted_block(sizes, item["sequence"], item["recompute"], _catalogue_name(device))
        errors = {
            f"{name}_error": predicted[name] / measured[name] - 1
            for name in ("forward_us", "backward_us")
            if predicted and measured[name]
        }
        return {"measured": measured, "predicted": predicted, **errors}

    figures.each(items(figures.small), measure)


def _small(sizes: dict[str, Any]) -> dict[str, Any]:
    return {**sizes, "hidden": 64, "heads": 4, "ffn": 128, **({"expert_ffn": 32} if "expert_ffn" in sizes else {})} | (
        {"kv_heads": 2} if "kv_heads" in sizes else {}
    )


def _catalogue_name(device: Any) -> str:
    return "CPU" if device.name == "cpu" else device.fingerprint()["device"]


def _groups() -> None:
    """Make groups of one rank, faked: a block alone needs no peers."""
    import torch.distributed as distributed
    from megatron.core import parallel_state, tensor_parallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def build(sizes: dict[str, Any], sequence: int, recompute: str) -> Any:
    """Return the block of megatron-core, filled with random numbers."""
    import torch

    from mindspeed_autoparallel.runtime.profiling.trace.building import build_layer
    from mindspeed_autoparallel.runtime.profiling.trace.request import read_request

    if sizes.get("mla"):
        layer = _latent_layer(sizes)
    elif sizes.get("linear_attention"):
        layer = _linear_layer(sizes)
    else:
        layer = build_layer(read_request({**sizes, "sequence": sequence, "recompute": recompute}))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, 0.02)
    return layer.bfloat16().cuda()  # norms, too, as Megatron's Float16Module has them


def _fields(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return fields of Megatron's config that the layers built here share."""
    import torch

    return {
        "num_layers": 1,
        "hidden_size": sizes["hidden"],
        "num_attention_heads": sizes["heads"],
        "ffn_hidden_size": sizes["ffn"],
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "params_dtype": torch.bfloat16,
        "bf16": True,
    }


def _latent_layer(sizes: dict[str, Any]) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    config = MLATransformerConfig(rope_type="rope", **_fields(sizes), **LATENT)
    spec = get_gpt_layer_local_spec(multi_latent_attention=True, normalization="RMSNorm")
    return build_module(spec, config=config, layer_number=1)


def _linear_layer(sizes: dict[str, Any]) -> Any:
    """Return a layer with a gated delta net, of flash-linear-attention's kernels where that package is there, else of
    torch's operators."""
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, common
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    has_kernels = common.chunk_gated_delta_rule is not None
    if not has_kernels:
        common.HAVE_FLA = True  # in deterministic mode one function of that package is called
        common.l2norm = lambda x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
    config = TransformerConfig(
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=[1],
        linear_conv_kernel_dim=4,
        linear_key_head_dim=sizes["hidden"] // sizes["heads"],
        linear_value_head_dim=sizes["hidden"] // sizes["heads"],
        linear_num_key_heads=sizes["heads"],
        linear_num_value_heads=2 * sizes["heads"],
        deterministic_mode=not has_kernels,
        **_fields(sizes),
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention = ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
        ),
    )
    return build_module(spec, config=config, layer_number=1)


def _measured(sizes: dict[str, Any], sequence: int, recompute: str, device: Any) -> dict[str, Any]:
    import torch
    from megatron.core.tensor_parallel import checkpoint

    layer = build(sizes, sequence, recompute)
    dtype = next(layer.parameters()).dtype
    causal = torch.triu(torch.ones(1, 1, sequence, sequence, dtype=torch.bool), 1).cuda() if sizes.get("mla") else None

    def forward(hidden: Any) -> Any:
        if recompute == "full":
            return checkpoint(functools.partial(_first, layer), False, hidden, causal)
        return _first(layer, hidden, causal)

    times: list[tuple[float, float]] = []
    for _ in range(3 + NUM_REPEATS):
        hidden = torch.randn(sequence, 1, sizes["hidden"], dtype=dtype).cuda().requires_grad_()
        device.synchronize()
        points = [device.clock()]
        output = forward(hidden)
        points.append(device.clock())
        output.backward(torch.ones_like(output))
        points.append(device.clock())
        device.synchronize()
        times.append((device.seconds_between(*points[:2]) * 1e6, device.seconds_between(*points[1:]) * 1e6))
    del hidden, output  # what they hold would be counted as there before, and go meanwhile
    hidden = torch.randn(sequence, 1, sizes["hidden"], dtype=dtype).cuda().requires_grad_()
    with device.tracked_memory() as memory:
        before = memory.current_bytes()
        output = forward(hidden)
        kept = memory.current_bytes() - before
        output.backward(torch.ones_like(output))
        peak = memory.take_peak_bytes() - before
    forward_us, backward_us = (list(column) for column in zip(*times[3:], strict=True))
    return {
        "forward_us": statistics.median(forward_us),
        "backward_us": statistics.median(backward_us),
        "forward_us_each": forward_us,
        "backward_us_each": backward_us,
        "kept_bytes": kept,
        "peak_bytes": peak,
    }


def _first(layer: Any, hidden: Any, mask: Any) -> Any:
    output = layer(hidden, attention_mask=mask)
    return output[0] if isinstance(output, tuple) else output


def predicted_block(sizes: dict[str, Any], sequence: int, recompute: str, device: str) -> dict[str, Any] | None:
    """Return times and kept bytes of one layer as a computed profile has them; ``None`` for linear attention, which
    computed profiles refuse."""
    if sizes.get("linear_attention"):
        return None
    from mindspeed_autoparallel.cost.catalogue import find_device
    from mindspeed_autoparallel.predict.analytic_profile import analytic_profile
    from mindspeed_autoparallel.predict.model_file import Section
    from mindspeed_autoparallel.profiles import MeasuredAt

    shape: dict[str, Any] = {
        "num_layers": 2,
        "hidden": sizes["hidden"],
        "heads": sizes["heads"],
        "ffn": sizes["ffn"],
        "seq": sequence,
        "vocab": 32000,
        "swiglu": bool(sizes.get("gated")),
    }
    if sizes.get("kv_heads"):
        shape["kv_heads"] = sizes["kv_heads"]
    if sizes.get("num_experts"):
        shape |= {
            "type": "moe",
            "num_experts": sizes["num_experts"],
            "topk": sizes["topk"],
            "moe_ffn": sizes["expert_ffn"],
        }
    if sizes.get("mla"):
        names = {"qk_head_dim": "qk_nope_head_dim", "qk_pos_emb_head_dim": "qk_rope_head_dim"}
        shape["mla"] = {names.get(name, name): value for name, value in LATENT.items()}
    profile = analytic_profile([Section("text_decoder", shape)], find_device(device), 8, points=[MeasuredAt()])
    block = profile.measurements[0].modules["text_decoder"].layer
    cost = block.recompute.get(recompute, block.recompute["none"])
    return {
        "forward_us": block.forward_us,
        "backward_us": block.backward_us + cost.extra_backward_us,
        "kept_bytes": cost.saved_bytes,
    }
