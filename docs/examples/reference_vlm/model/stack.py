"""Stacks of transformer layers: Megatron's config, layer spec and block for the layers of one pipeline chunk."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from typing import Any

import torch
from megatron.core import activations
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.utils import sharded_state_dict_default

from reference_vlm.configuration import StackDescription
from reference_vlm.configuration.stages import StageLayers
from reference_vlm.model.core_attention import PackedAttention
from reference_vlm.model.dropout import DropoutRates, DroppingContextAttention, ReproducibleLayer
from reference_vlm.model.norm import Norm

ACTIVATIONS = {
    "gelu": torch.nn.functional.gelu,
    "quick_gelu": activations.quick_gelu,
    "silu": torch.nn.functional.silu,
    "relu": torch.nn.functional.relu,
}


def stack_config(
    base: Any, stack: StackDescription, chunk: int, *, sequence_parallel: bool, context_size: int = 1
) -> Any:
    """Return a copy of Megatron's ``base`` config for the layers of ``stack`` on ``chunk``.

    It describes one stage only: the description decides the stage of each layer, not a division of num_layers.
    """
    count = stack.recompute_counts[chunk]
    granularity = stack.recompute_granularity if count or stack.recompute_granularity == "selective" else None
    changes: dict[str, object] = {
        "num_layers": stack.num_layers,
        "hidden_size": stack.hidden_size,
        "ffn_hidden_size": stack.ffn_hidden_size,
        "num_attention_heads": stack.num_attention_heads,
        "num_query_groups": stack.num_query_groups,
        "kv_channels": stack.kv_channels,
        "normalization": stack.normalization,
        "layernorm_epsilon": stack.layernorm_epsilon,
        "activation_func": ACTIVATIONS[stack.activation],
        "gated_linear_unit": stack.gated,
        "add_bias_linear": stack.add_bias_linear,
        "add_qkv_bias": stack.add_qkv_bias,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_activation_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "sequence_parallel": sequence_parallel,
        "context_parallel_size": context_size,
        "variable_seq_lengths": False,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "recompute_granularity": granularity,
        "recompute_method": stack.recompute_method if granularity == "full" else None,
        "recompute_num_layers": count if granularity == "full" else None,
        "output_layer_init_method": None,
    }
    if granularity is None and base.recompute_granularity is not None and stack.recompute_granularity is None:
        # Not set in model.json: the flags of the command line apply to the text decoder and the encoders alike.
        for name in ("recompute_granularity", "recompute_method", "recompute_num_layers"):
            changes[name] = getattr(base, name)
    return changed_config(base, **changes)


def with_dropout(config: Any, base: Any, stack: StackDescription, module: int) -> Any:
    """Set the dropout rates of the layers in ``config``: model.json's, otherwise those of the command line
    (``base``)."""
    hidden = base.hidden_dropout if stack.hidden_dropout is None else stack.hidden_dropout
    attention = base.attention_dropout if stack.attention_dropout is None else stack.attention_dropout
    if getattr(base, "dropout_seed", None) is None:
        # Modules that are built by hand, outside this training, have no dropout.
        return config
    rates = DropoutRates(hidden=hidden, attention=attention, seed=int(base.dropout_seed), module=module)
    config.reproducible_dropout = rates if hidden or attention else None
    return config


def changed_config(base: Any, **changes: Any) -> Any:
    """Return a checked copy of a Megatron config; names that this release lacks are left out."""
    known = {field.name for field in dataclasses.fields(base) if field.init}
    config = dataclasses.replace(base, **{name: value for name, value in changes.items() if name in known})
    for name, value in vars(base).items():
        if name not in vars(config):
            setattr(config, name, value)
    return config


def layer_spec(config: Any, *, causal: bool, core_attention: type = PackedAttention) -> Any:
    """Return Megatron's local layer spec with this project's norms and core attention."""
    parameters = inspect.signature(get_gpt_layer_local_spec).parameters
    named = {"normalization": config.normalization} if "normalization" in parameters or "kwargs" in parameters else {}
    spec = copy.deepcopy(get_gpt_layer_local_spec(**named))
    if getattr(config, "reproducible_dropout", None) is not None:
        spec.module = ReproducibleLayer
    spec.submodules.input_layernorm = Norm
    spec.submodules.pre_mlp_layernorm = Norm
    spec.submodules.self_attention.submodules.core_attention = core_attention
    spec.submodules.self_attention.params = {
        **spec.submodules.self_attention.params,
        "attn_mask_type": AttnMaskType.causal if causal else AttnMaskType.no_mask,
    }
    return spec


class PlacedBlock(TransformerBlock):
    """Megatron's block with ``num_layers`` layers, the first of which is layer ``first_layer`` of the whole stack."""

    def __init__(
        self,
        config: Any,
        spec: Any,
        *,
        num_layers: int,
        first_layer: int,
        pre_process: bool,
        post_process: bool,
        final_norm: bool,
        **groups: Any,
    ) -> None:
        submodules = TransformerBlockSubmodules(
            layer_specs=[spec] * num_layers, layer_norm=Norm if final_norm else None
        )
        super().__init__(
            config, submodules, post_layer_norm=final_norm, pre_process=pre_process, post_process=post_process, **groups
        )
        self.first_layer = first_layer
        for index, layer in enumerate(self.layers):
            layer.layer_number = first_layer + index + 1
            core = getattr(layer.self_attention, "core_attention", None)
            if isinstance(core, PackedAttention | DroppingContextAttention):
                core.layer_number = layer.layer_number

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Return Megatron's, with each layer at its place in the whole stack under any pipeline split."""
        metadata = metadata or {}
        apart = metadata.get("non_homogeneous_layers") or metadata.get("singleton_local_shards")
        sharded: dict[str, object] = {}
        for index, layer in enumerate(self.layers):
            number = self.first_layer + index
            local = f"{prefix}layers.{index}."
            offsets = [] if apart else [(0, number, self.config.num_layers)]
            entries = layer.sharded_state_dict(local, offsets, metadata)
            replace_prefix_for_sharding(entries, local, f"{prefix}layers.{number}." if apart else f"{prefix}layers.")
            sharded.update(entries)
        # Newer releases need the group over which plain modules are replicated.
        takes_group = "tp_group" in inspect.signature(sharded_state_dict_default).parameters
        group = {"tp_group": self.tp_group} if takes_group else {}
        for name, module in self.named_children():
            if module is not self.layers:
                sharded.update(
                    sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata, **group)
                )
        return sharded


def encoder_block(config: Any, stages: StageLayers, chunk: int) -> PlacedBlock:
    """Return the encoder layers of ``chunk``, which start from its input rows and end without a norm."""
    return PlacedBlock(
        config,
        layer_spec(config, causal=False),
        num_layers=stages.flat[chunk],
        first_layer=stages.first_layer(chunk),
        pre_process=True,
        post_process=False,
        final_norm=False,
    )
