"""The names one tensor has in checkpoints of different hosts: fused norms, experts in one tensor, layers renamed in a
release.

The canonical names are those of Megatron's local layers with separate experts. Readers accept all spellings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_autoparallel.weights.names import Rule

LOCAL, TRANSFORMER_ENGINE = "local", "transformer_engine"
IMPLEMENTATIONS = (LOCAL, TRANSFORMER_ENGINE)
EACH, GROUPED = "each", "grouped"
EXPERT_FORMS = (EACH, GROUPED)
STACKED = "stacked"
LAYER_FORMS = (STACKED, EACH)

FUSED = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("self_attention.in_proj.layer_norm_", "input_layernorm."),
    ("self_attention.linear_q_up_proj.layer_norm_", "self_attention.q_layernorm."),
    ("self_attention.linear_kv_up_proj.layer_norm_", "self_attention.kv_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)
"""Names of norms inside the linear layer after them, as Transformer Engine keeps them, and their canonical names."""
_OF_ENGINE = re.compile(r"mlp\.experts\.linear_fc([12])\.(weight|bias)([0-9]+)$")
_OF_SEQUENCE = re.compile(r"mlp\.experts\.local_experts\.([0-9]+)\.linear_fc([12])\.(weight|bias)$")
_IN_ONE = re.compile(r"mlp\.experts\.weight([12])$")


@dataclass(frozen=True)
class Spelling:
    """``implementation``: of the host's layers. ``experts``: each its own tensor, or all of a rank in ``weight1`` and
    ``weight2`` (Megatron's and MindSpeed's grouped products without Transformer Engine). ``host``: naming scheme of the
    tensors. ``layers``: of ``torch_dist``, layers of one kind in one tensor, or each under its number (Megatron's
    choice where a list gives the kinds of layers)."""

    implementation: str = LOCAL
    experts: str = EACH
    host: str = "megatron"
    layers: str = STACKED

    def stored(self, local: str, rule: Rule, words: frozenset[str]) -> str:
        """Return the name of the tensor of ``rule`` in a file, in a layer of the conditions ``words``."""
        if self.implementation == LOCAL:
            return local
        if rule.per_expert:
            return _OF_SEQUENCE.sub(r"mlp.experts.linear_fc\2.\3\1", local)
        for fused, plain in _fused_in(words):
            if plain in local:
                return local.replace(plain, fused)
        return local


def _fused_in(words: frozenset[str]) -> list[tuple[str, str]]:
    """Return (fused, plain) of the norms that Transformer Engine fuses in a layer of these conditions."""
    found = []
    for fused, plain in FUSED:
        if plain == "pre_mlp_layernorm." and "experts" in words:
            continue
        if plain == "input_layernorm.":
            mine = "in_proj" if "linear" in words else "" if "latent" in words else "linear_qkv"
            if not mine or mine not in fused:
                continue
        if plain.startswith("self_attention.") and "latent" not in words:
            continue
        found.append((fused, plain))
    return found


def forms_of(stored: Iterable[str]) -> set[str]:
    """Return the implementations that may have written these names (``IMPLEMENTATIONS``), and ``GROUPED`` if experts
    share one tensor."""
    names = list(stored)
    of_engine = any(fused in name for name in names for fused, _ in FUSED) or any(map(_OF_ENGINE.search, names))
    grouped = {GROUPED} if any(map(_IN_ONE.search, names)) else set()
    return grouped | ({TRANSFORMER_ENGINE} if of_engine else {LOCAL})


def canonical_names(state: Mapping[str, object], experts_per_rank: int) -> dict[str, object]:
    """Return the tensors of one file of any spelling under canonical local names; grouped experts become views."""
    found: dict[str, object] = {}
    for name, value in state.items():
        if _IN_ONE.search(name) and hasattr(value, "reshape") and experts_per_rank:
            found |= _of_one(name, value, experts_per_rank)
        else:
            found[canonical_name(name)] = value
    return found


def canonical_name(name: str) -> str:
    """Return the canonical local name for any spelling."""
    name = name.replace(".mtp_model_layer.", ".transformer_layer.")
    for fused, plain in FUSED:
        if fused in name:
            return name.replace(fused, plain)
    return _OF_ENGINE.sub(r"mlp.experts.local_experts.\3.linear_fc\1.\2", name)


def _of_one(name: str, value: Any, experts_per_rank: int) -> dict[str, object]:
    """Return the experts in ``weight1`` [hidden, experts x rows] or ``weight2`` [experts x columns, hidden], whose
    memory is that of [expert, in, out]."""
    number = name[-1]
    shape = (experts_per_rank, value.shape[0], -1) if number == "1" else (experts_per_rank, -1, value.shape[-1])
    begin = name.removesuffix(f"weight{number}")
    return {
        f"{begin}local_experts.{expert}.linear_fc{number}.weight": part.t()
        for expert, part in enumerate(value.reshape(shape))
    }


def grouped_name(local: str) -> tuple[str, int] | None:
    """Return (name of the tensor of all experts of a rank, number of the expert on it); None except for experts'
    weights."""
    match = _OF_SEQUENCE.search(local)
    if match is None or match[3] != "weight":
        return None
    return local[: match.start()] + f"mlp.experts.weight{match[2]}", int(match[1])
