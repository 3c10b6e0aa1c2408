"""Keys that MindSpeed-MM's native trainer reads, by section, and keys of users without effect.

From ``mindspeed_mm/fsdp/params`` and the trainer's ``getattr`` calls; the sections ``model``, ``data`` and ``tools``
are open, because models and data sets read additional keys.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from mindspeed_autoparallel.hosts.mindspeed_mm import NativeConfig

_PLAN = "parallel.fsdp_plan"
KNOWN: dict[str, frozenset[str]] = {
    section: frozenset(names.split())
    for section, names in {
        "parallel": "data_parallel_size fully_shard_parallel_size fsdp_plan tensor_parallel_size tp_plan "
        "ring_attention_size ulysses_parallel_size expert_parallel_size expert_fully_shard_parallel_size ep_plan "
        "recompute recompute_plan",
        _PLAN: "ignored_modules apply_modules param_dtype reduce_dtype output_dtype cast_forward_inputs "
        "reshard_after_forward num_to_forward_prefetch num_to_backward_prefetch pregather hook_modules cpu_offload",
        "parallel.ep_plan": "apply_modules use_npu_fused_ops dispatcher apply_efsdp_modules",
        "features": "recompute recompute_plan loss_cfg enable_chunk_loss enable_dynamic_chunk_loss chunkloss_plan "
        "enable_activation_offload activation_offload_plan enable_chunk_mbs chunkmbs_plan enable_ep_balance "
        "ep_balance_plan skip_moe_pad_tokens",
        "features.recompute_plan": "apply_modules use_reentrant",
        "features.activation_offload_plan": "apply_modules",
        "features.chunkloss_plan": "apply_module chunk_size total_chunk_size",
        "features.chunkmbs_plan": "apply_modules chunk_mbs batch_dim chunk_arg_indexs chunk_kwarg_names",
    }.items()
}
_MOVED = {
    "parallel.pregather": f"{_PLAN}.pregather",
    "parallel.recompute": "features.recompute",
    "parallel.recompute_plan": "features.recompute_plan",
    "parallel.context_parallel_size": "parallel.ulysses_parallel_size",
    "parallel.cpu_offload": f"{_PLAN}.cpu_offload",
}


@dataclass(frozen=True)
class IdleKey:
    """A key without effect; ``instead`` is the probably intended one, or empty."""

    key: str
    instead: str


def idle_keys(config: NativeConfig) -> list[IdleKey]:
    """Return keys without effect: of ``features`` under ``model``, of other sections, and unknown ones."""
    found = []
    for section, known in KNOWN.items():
        values = config.values.at(section)
        for key in values if isinstance(values, Mapping) else ():
            name = f"{section}.{key}"
            if name in _MOVED and values[key] not in (False, 1, None):
                found.append(IdleKey(name, _MOVED[name]))
            elif key not in known and name not in _MOVED:
                found.append(IdleKey(name, nearest(section, str(key), values)))
    model = config.values.at("model")
    for key in model if isinstance(model, Mapping) else ():
        if key in KNOWN["features"]:
            found.append(IdleKey(f"model.{key}", f"features.{key}"))
    return found


def nearest(section: str, key: str, present: Mapping[str, object]) -> str:
    """Return the known key of ``section``, dotted, that ``key`` misspells; empty if none is similar and unset."""
    unset = [name for name in KNOWN[section] if name not in present]
    close = difflib.get_close_matches(key, unset, 1, 0.8)
    return f"{section}.{close[0]}" if close else ""
