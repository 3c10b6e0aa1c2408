"""Keys of a canonical tensor in Megatron's distributed checkpoints, and its index in a stack."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mindspeed_autoparallel.weights import names
from mindspeed_autoparallel.weights.architecture import Architecture
from mindspeed_autoparallel.weights.placement import Entry
from mindspeed_autoparallel.weights.spelling import FUSED, LOCAL, STACKED, Spelling

# Local layers are stored under the names of fused ones, except for latent attention.
_FUSED_WHEN_STORED = tuple(pair for pair in FUSED if "linear_qkv." in pair[0] or "linear_fc1." in pair[0])
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.([0-9]+)\.")
_SECTIONS = ("query", "key", "value", "z", "beta", "alpha")
_WITH_EXTRA_STATE = (
    *("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj", "eh_proj"),
    *("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"),
)


def stack_of(entry: Entry, architecture: Architecture, spelling: Spelling) -> list[tuple[int, int]]:
    """Return (place, size) of ``entry`` in the first dimensions of its key: of the layer, of the expert."""
    shape = architecture.modules[entry.rule.module]
    found = [(entry.layer, shape.num_layers)] if is_stacked(entry, architecture, spelling) else []
    return found + ([(entry.expert, shape.num_experts)] if entry.rule.per_expert else [])


def is_stacked(entry: Entry, architecture: Architecture, spelling: Spelling) -> bool:
    """Return whether Megatron stores the layers of this tensor together: if all are of one kind."""
    if spelling.layers != STACKED and entry.rule.module == names.TEXT:
        return False
    return entry.rule.place == names.LAYER and len(set(architecture.modules[entry.rule.module].layer_words)) == 1


def stored_key(entry: Entry, architecture: Architecture, spelling: Spelling) -> str:
    """Return the key under which ``entry`` is written."""
    shape = architecture.modules[entry.rule.module]
    words = shape.layer_words[entry.layer if entry.rule.place == names.LAYER else -1]
    name = entry.rule.target.replace("{n}.", "") if is_stacked(entry, architecture, spelling) else entry.name
    if spelling.implementation == LOCAL or entry.rule.module != names.TEXT:
        for fused, plain in _FUSED_WHEN_STORED:
            if plain in name and "latent" not in words:
                name = name.replace(plain, fused)
    elif not entry.rule.per_expert:
        name = spelling.stored(name, entry.rule, words)
    return _EXPERT.sub("mlp.experts.experts.", name.replace("local_experts.{e}.", f"local_experts.{entry.expert}."))


def candidates(entry: Entry) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (key, index in its first dimensions) of all forms in which ``entry`` may be stored."""
    layer = (entry.layer,) if entry.rule.place == names.LAYER else ()
    expert = (entry.expert,) if entry.rule.per_expert else ()
    own = entry.name
    stacked = entry.rule.target.replace("{n}.", "").replace("{e}", str(entry.expert))
    for name, place in ((own, expert), (stacked, layer + expert)):
        if name == stacked and not layer and name != own:
            continue
        for spelled in _spelled(_EXPERT.sub("mlp.experts.experts.", name)):
            yield spelled, place
    if expert:
        yield _EXPERT.sub(rf"mlp.experts.experts.{entry.expert}.", own), ()


def _spelled(name: str) -> Iterator[str]:
    yield name
    for fused, plain in FUSED:
        if plain in name:
            yield name.replace(plain, fused)


def sections_of(rule: names.Rule) -> list[tuple[str, int]]:
    """Return (end of the key, rows) of the parts that Megatron stores as separate tensors; empty for one tensor."""
    if not rule.target.endswith(("in_proj.weight", "conv1d.weight")) or not rule.sections:
        return []
    return [(f".{end}", rows) for end, rows in zip(_SECTIONS, rule.sections, strict=False)]


def extra_state(entry: Entry, key: str, architecture: Architecture, spelling: Spelling) -> str | None:
    """Return the key of the empty extra state that Megatron's parallel linear layers expect in addition to their
    weight."""
    linear = key.removesuffix(".weight")
    if linear == key or linear.rsplit(".", 1)[-1] not in _WITH_EXTRA_STATE:
        return None
    at, of = zip(*(stack_of(entry, architecture, spelling) or [(0, 1)]), strict=True)
    return f"{linear}._extra_state/shard_{'.'.join(map(str, at))}_{'.'.join(map(str, of))}"
