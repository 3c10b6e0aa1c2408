"""Synthetic profiles shaped like Qwen2-VL-72B, in MindSpeed's format and in ours."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from mindspeed_autoparallel.profiles import BlockCost, Profile, RecomputeCost, read_profile

# ms, MiB and [parameters, optimizer, gradients] in MiB: invented, in the proportions of that model at TP 4.
BLOCKS = {
    "vit_pre": (10, 20, 50, [20, 120, 40]),
    "vit": (18, 36, 180, [40, 240, 80]),
    "vit_post": (6, 12, 30, [100, 600, 200]),
    "llm_pre": (3, 5, 40, [600, 1200, 600]),
    "llm": (42, 85, 620, [420, 630, 420]),
    "llm_post": (30, 60, 900, [600, 1200, 600]),
}


def mindspeed_file(folder: Path, encoder_layers: int = 32, decoder_layers: int = 80) -> Path:
    """A model_profile.json of the synthetic model."""
    content: dict[str, object] = {
        name: {"fwd_time": forward, "bwd_time": backward, "act_mem": memory, "module_param": state}
        for name, (forward, backward, memory, state) in BLOCKS.items()
    }
    content["image_encoder"] = {"vision_encoder": {"num_layers": encoder_layers}}
    content["text_decoder"] = {"num_layers": decoder_layers, "seq_length": 8192, "hidden_size": 8192}
    content |= {"micro_batch_size": 1, "grad_acc_step": 32}
    path = folder / "model_profile.json"
    path.write_text(json.dumps(content))
    return path


def our_file(folder: Path, encoder_layers: int = 32, decoder_layers: int = 80) -> Path:
    """The same model as a profile of ours: uneven times, selective recomputation, transients, host time."""
    profile = read_profile(mindspeed_file(folder, encoder_layers, decoder_layers), tensor_size=4, p2p_gbps=25.0)
    modules = {}
    for name, cost in profile.measurements[0].modules.items():
        blocks = {part: _measured(block) for part in ("pre", "post") if (block := getattr(cost, part)) is not None}
        modules[name] = replace(cost.with_layers(lambda _, layer: _measured(layer)), **blocks)
    path = folder / "profile.json"
    _ours(profile, modules).write(path)
    return path


def _measured(block: BlockCost) -> BlockCost:
    """Times that share no divisor, and the kinds of recomputation that Megatron has."""
    forward, saved = block.forward_us * 1.00713, block.recompute["none"].saved_bytes
    kinds = {"none": RecomputeCost(saved_bytes=saved, backward_peak_bytes=saved // 3)}
    if "full" in block.recompute:
        kinds["selective"] = RecomputeCost(
            saved_bytes=saved * 6 // 10, extra_backward_us=forward * 0.217, backward_peak_bytes=saved // 2
        )
        kinds["full"] = RecomputeCost(
            saved_bytes=block.output_bytes, extra_backward_us=forward, backward_peak_bytes=saved
        )
    return replace(block, forward_us=forward, backward_us=block.backward_us * 0.99371, recompute=kinds)


def _ours(profile: Profile, modules: dict[str, object]) -> Profile:
    return replace(
        profile,
        memory_semantics="program_points",
        device=replace(profile.device, operation_overhead_us=11.3, runtime_overhead_bytes=2**30),
        measurements=(replace(profile.measurements[0], modules=modules),),
    )
