"""Modules of a family, and their names as the patterns of a sharded training's file have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.predict.hugging_face_modules import AUDIO, IMAGE
from mindspeed_autoparallel.predict.sharded_costs import joined_kinds
from mindspeed_autoparallel.profiles.sharded import ShardedModule


@dataclass(frozen=True, kw_only=True)
class TowerNames:
    """An encoder, and the pattern of its layers below it."""

    name: str
    layers: str = "blocks.{*}"
    recomputes: bool = True
    """Whether the layers accept the cache that MindSpeed-MM passes to every module it recomputes."""


@dataclass(frozen=True, kw_only=True)
class ModuleNames:
    """Where a family's model class has its parts."""

    around: str = ""
    """A module around all of them but the towers; empty: none of its own."""
    decoder: str = "model"
    """Around the layers, the last norm, and the embedding where that has no name of its own."""
    embedding: str = ""
    head: str = "lm_head"
    experts: str = "mlp.experts"
    """Below a layer."""
    stacked_experts: bool = True
    """Whether all experts of a layer are rows of two tensors; else each has matrices of its own."""
    joined: bool = True
    """Whether a mixer and the MLP behind it are one layer; else each is a layer of its own."""
    towers: Mapping[str, TowerNames] = field(default_factory=dict)
    """By module of ``hugging_face_modules``."""


MEGATRON = ModuleNames(decoder="decoder", embedding="embedding", head="output_layer", stacked_experts=False)
_VISUAL = {IMAGE: TowerNames(name="model.visual")}
_KIMI = {IMAGE: TowerNames(name="vision_tower", layers="encoder.blocks.{*}")}
_NAMES = {
    "qwen3_vl": ModuleNames(decoder="model.language_model", towers=_VISUAL),
    "qwen3_5": ModuleNames(decoder="model.language_model", towers=_VISUAL),
    "qwen3_omni": ModuleNames(
        towers={IMAGE: TowerNames(name="visual"), AUDIO: TowerNames(name="audio_tower", layers="layers.{*}")}
    ),
    "qwen3_asr": ModuleNames(
        decoder="thinker.model",
        head="thinker.lm_head",
        towers={AUDIO: TowerNames(name="thinker.audio_tower", layers="layers.{*}")},
    ),
    "kimi_k25": ModuleNames(
        decoder="language_model.model", head="language_model.lm_head", stacked_experts=False, towers=_KIMI
    ),
    "fun_asr_nano": ModuleNames(around="llm", decoder="llm.model", head="llm.lm_head"),
    "qwen3_tts": ModuleNames(
        around="talker", decoder="talker.model", embedding="talker.model.codec_embedding", head="talker.codec_head"
    ),
    "moss_tts": ModuleNames(decoder="language_model", head="lm_heads"),
    "kimi_k3": ModuleNames(
        decoder="language_model.model", head="language_model.lm_head", experts="block_sparse_moe.experts", towers=_KIMI
    ),
    "nemotron_h": ModuleNames(experts="mixer.experts", joined=False),
    "mimo_v2": ModuleNames(stacked_experts=False, towers={IMAGE: TowerNames(name="visual", recomputes=False)}),
    "step_robotics": ModuleNames(
        decoder="model.language_model",
        towers={IMAGE: TowerNames(name="model.vision_model", layers="transformer.resblocks.{*}")},
    ),
}
"""By beginning of the configuration's ``model_type``; read from MindSpeed-MM's native models."""


def names_of(family: str) -> ModuleNames:
    """Return the names of a family's modules; those of transformers' text models where it is not known."""
    return next((names for prefix, names in _NAMES.items() if family.startswith(prefix)), ModuleNames())


def decoder_modules(names: ModuleNames, whole: Workload, *, after_tower: bool) -> list[ShardedModule]:
    """Return the modules of a decoder, its head among them, in the order of forward; the root is not one of them."""
    prefix, layers = names.decoder, f"{names.decoder}.layers.{{*}}"
    own, embedding = names.embedding, names.embedding or f"{prefix}.embed_tokens"
    modules = [
        ShardedModule(
            name=prefix,
            kind="decoder",
            pattern=prefix,
            parent=names.around,
            input_requires_grad=after_tower or bool(own),
        ),
        ShardedModule(
            name=embedding,
            kind="embedding",
            pattern=embedding,
            parent="" if own else prefix,
            input_requires_grad=False,
            is_tied=whole.model.tied,
        ),
    ]
    modules = modules[::-1] if own else modules
    kinds = joined_kinds(whole.model.layers) if names.joined else whole.model.layers
    for number, kind in enumerate(kinds):
        name = f"{prefix}.layers.{number}"
        word = f"{kind.mixer} {kind.mlp}"
        modules.append(ShardedModule(name=name, kind=word, pattern=layers, parent=prefix, is_layer=True))
        if kind.mlp == "experts":
            modules.append(
                ShardedModule(
                    name=f"{name}.{names.experts}",
                    kind=f"{word}: experts",
                    pattern=f"{layers}.{names.experts}",
                    parent=name,
                    holds_experts=True,
                )
            )
    head = ShardedModule(name=names.head, kind="head", pattern=names.head, parent=names.around, is_head=True)
    return [*modules, head]
