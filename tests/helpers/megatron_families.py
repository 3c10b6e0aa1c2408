"""Megatron's own GPTModel for a tiny model of transformers: what its flags would set, and what its local layers lack.

Local layers have no zero-centred norms (the loader adds the one), no linear attention (its spec asks for Transformer Engine), and
nothing of Gemma's own: norms behind the products, capped attention and scaled embeddings are modules here, as in Megatron-Bridge.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

LENGTH = 12
ZERO_CENTRED = ("gemma2", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


class NormedRowParallelLinear(RowParallelLinear):
    """A product with a norm behind it."""

    def __init__(self, input_size: int, output_size: int, **keywords: Any) -> None:
        super().__init__(input_size, output_size, **keywords)
        self.post_layernorm = torch.nn.RMSNorm(output_size, eps=self.config.layernorm_epsilon)

    def forward(self, inputs: Any) -> Any:
        output, bias = super().forward(inputs)
        return self.post_layernorm(output), bias


class PlainAttention(DotProductAttention):
    """Attention with a soft cap on its scores, and values that may be narrower than keys (latent attention)."""

    cap, causal = 0.0, True

    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **keywords: Any) -> None:
        super().__init__(*args, **keywords)

    def forward(self, query: Any, key: Any, value: Any, *args: Any, **keywords: Any) -> Any:
        length, batch, heads, _ = query.shape
        key, value = (part.repeat_interleave(heads // part.shape[2], dim=2) for part in (key, value))
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * self.softmax_scale
        if self.cap:
            scores = self.cap * torch.tanh(scores / self.cap)
        if self.causal:
            scores = scores.masked_fill(torch.triu(torch.ones(length, length, dtype=torch.bool), 1), float("-inf"))
        return torch.einsum("bhqk,kbhd->qbhd", scores.softmax(-1), value).reshape(length, batch, -1)


def flags_of(family: str, theirs: Any) -> dict[str, Any]:
    """Return the fields of TransformerConfig for the language model ``theirs`` (its config)."""
    get = lambda key, default=None: getattr(theirs, key, default)
    num_experts = get("num_experts") or get("num_local_experts") or get("n_routed_experts")
    flags: dict[str, Any] = {
        "num_layers": theirs.num_hidden_layers,
        "hidden_size": theirs.hidden_size,
        "ffn_hidden_size": get("intermediate_size_mlp") or theirs.intermediate_size,
        "num_attention_heads": theirs.num_attention_heads,
        "num_query_groups": theirs.num_key_value_heads,
        "kv_channels": get("head_dim") or theirs.hidden_size // theirs.num_attention_heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": theirs.rms_norm_eps,
        "add_bias_linear": False,
        "add_qkv_bias": family in ("qwen2", "qwen2_moe") or bool(get("attention_bias", False)),
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "bias_activation_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "params_dtype": torch.float32,
        "qk_layernorm": family
        in ("qwen3", "qwen3_moe", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
        or bool(family == "glm4_moe" and theirs.use_qk_norm),
    }
    if num_experts:
        words: Any = _kinds_of_layers(family, theirs)
        if set(words) == {1} and family != "mixtral":
            words = 1  # Megatron stores layers each under its number where it has a list
        flags |= {
            "num_moe_experts": num_experts,
            "moe_layer_freq": words,
            "moe_ffn_hidden_size": get("moe_intermediate_size") or theirs.intermediate_size,
            "moe_router_topk": theirs.num_experts_per_tok,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
            "moe_router_pre_softmax": family in ("qwen2_moe", "qwen3_moe", "deepseek_v2")
            and not get("norm_topk_prob", True),
            "moe_shared_expert_intermediate_size": get("shared_expert_intermediate_size")
            or (get("n_shared_experts") or 0) * (get("moe_intermediate_size") or 0)
            or None,
            "moe_shared_expert_gate": get("shared_expert_intermediate_size") is not None,
        }
    if family in ("deepseek_v3", "kimi_k2", "glm4_moe"):
        flags |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_pre_softmax": True,
            "moe_router_topk_scaling_factor": theirs.routed_scaling_factor,
        }
    return flags | _own_flags(family, theirs)


def _kinds_of_layers(family: str, theirs: Any) -> list[int]:
    layers = range(theirs.num_hidden_layers)
    if family == "llama4_text":
        return [int(layer in theirs.moe_layers) for layer in layers]
    dense = set(getattr(theirs, "mlp_only_layers", None) or ()) | set(
        range(getattr(theirs, "first_k_dense_replace", 0))
    )
    return [int(layer not in dense) for layer in layers]


def _own_flags(family: str, theirs: Any) -> dict[str, Any]:
    """Return what only one or two families have."""
    if family in ("deepseek_v2", "deepseek_v3", "kimi_k2"):
        return {
            "multi_latent_attention": True,
            "qk_layernorm": True,
            "rope_type": "rope",
            "rotary_base": theirs.rope_parameters["rope_theta"],
            "q_lora_rank": theirs.q_lora_rank,
            "kv_lora_rank": theirs.kv_lora_rank,
            "qk_head_dim": theirs.qk_nope_head_dim,
            "qk_pos_emb_head_dim": theirs.qk_rope_head_dim,
            "v_head_dim": theirs.v_head_dim,
            "add_qkv_bias": False,
        }
    if family in ("gemma2", "gemma3_text"):
        return {
            "activation_func": partial(torch.nn.functional.gelu, approximate="tanh"),
            "softmax_scale": theirs.query_pre_attn_scalar**-0.5,
        }
    if family == "gpt_oss":
        return {
            "add_bias_linear": True,
            "softmax_type": "learnable",
            "activation_func": lambda x: x * torch.sigmoid(1.702 * x),
            "activation_func_clamp_value": 7.0,
            "glu_linear_offset": 1.0,
        }
    if family == "llama4_text":
        return {
            "qk_l2_norm": True,
            "rotary_interleaved": True,
            "no_rope_freq": [int(not used) for used in theirs.no_rope_layers],
            "moe_router_score_function": "sigmoid",
            "moe_apply_probs_on_input": True,
            "moe_shared_expert_intermediate_size": theirs.intermediate_size,
        }
    if family.startswith(("qwen3_next", "qwen3_5")):
        return {
            "attention_output_gate": True,
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": [int(kind == "linear_attention") for kind in theirs.layer_types],
            "linear_conv_kernel_dim": theirs.linear_conv_kernel_dim,
            "linear_key_head_dim": theirs.linear_key_head_dim,
            "linear_value_head_dim": theirs.linear_value_head_dim,
            "linear_num_key_heads": theirs.linear_num_key_heads,
            "linear_num_value_heads": theirs.linear_num_value_heads,
            "deterministic_mode": True,
        }
    return {}


def gpt_model(family: str, theirs: Any, tied: bool, *, multi_token: int | None = None) -> Any:
    """Return Megatron's model of the sizes of ``theirs``, the config of a language model; ``multi_token``: its layers
    for multi-token prediction."""
    flags = {**flags_of(family, theirs), "mtp_num_layers": multi_token}
    config = (MLATransformerConfig if flags.get("multi_latent_attention") else TransformerConfig)(**flags)
    rope = theirs.rope_parameters
    rope = rope.get("sliding_attention", rope)  # the only kind in a tiny Gemma 3
    scaling = {}
    if family == "gpt_oss":
        _set_yarn(config, rope)
    if rope["rope_type"] == "llama3":
        scaling = {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    elif rope["rope_type"] == "linear":
        scaling = {"seq_len_interpolation_factor": rope["factor"]}
    layers = _layers(family, theirs, config)
    return GPTModel(
        config,
        layers,
        theirs.vocab_size,
        64,
        position_embedding_type="yarn" if family == "gpt_oss" else "rope",
        rotary_percent=rope.get("partial_rotary_factor", 1.0),
        rotary_base=rope["rope_theta"],
        share_embeddings_and_output_weights=tied,
        parallel_output=False,
        mtp_block_spec=get_gpt_mtp_block_spec(config, layers, False) if multi_token else None,
        **scaling,
    ).eval()


def _set_yarn(config: Any, rope: Any) -> None:
    """Set what Megatron's argument parser sets beside the fields of TransformerConfig."""
    config.yarn_rotary_scaling_factor = rope["factor"]
    config.yarn_original_max_position_embeddings = rope["original_max_position_embeddings"]
    config.yarn_beta_fast, config.yarn_beta_slow = rope["beta_fast"], rope["beta_slow"]
    config.yarn_mscale = config.yarn_mscale_all_dim = None
    config.yarn_correction_range_round_to_int = rope["truncate"]


def _layers(family: str, theirs: Any, config: Any) -> Any:
    plain = copy.copy(config)
    plain.experimental_attention_variant = None
    if config.num_moe_experts is None:
        plain.moe_layer_freq = [0] * config.num_layers
    block = get_gpt_decoder_block_spec(
        plain, use_transformer_engine=False, normalization="RMSNorm", qk_l2_norm=family == "llama4_text"
    )
    block.layer_norm = WrappedTorchNorm
    block.layer_specs = [copy.deepcopy(spec) for spec in block.layer_specs]
    for number, spec in enumerate(block.layer_specs):
        parts = spec.submodules
        if family in ("gemma2", "gemma3_text"):
            parts.self_attention.submodules.linear_proj = NormedRowParallelLinear
            parts.mlp.keywords["submodules"].linear_fc2 = NormedRowParallelLinear
        if family == "gemma2":
            parts.self_attention.submodules.core_attention = type(
                "CappedAttention", (PlainAttention,), {"cap": theirs.attn_logit_softcapping}
            )
        if config.multi_latent_attention:
            parts.self_attention.submodules.core_attention = PlainAttention
            if not theirs.q_lora_rank:
                parts.self_attention.submodules.q_layernorm = IdentityOp
        if family == "llama4_text" and not theirs.no_rope_layers[number]:
            parts.self_attention.submodules.q_layernorm = parts.self_attention.submodules.k_layernorm = IdentityOp
        if config.linear_attention_freq and config.linear_attention_freq[number]:
            parts.self_attention = _delta_attention()
    return block


def _delta_attention() -> Any:
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, common

    common.HAVE_FLA = True  # in deterministic mode one function of its alone is called
    common.l2norm = lambda x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
    return ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
        ),
    )


def load(family: str, model: Any, state: dict[str, Any]) -> None:
    """Load converted weights, every one of them and no other; norms that the family centres at zero get their one back."""
    if family in ZERO_CENTRED:
        state = {name: tensor + 1 if "norm.weight" in name else tensor for name, tensor in state.items()}
    model.load_state_dict(state, strict=True)


def logits(family: str, theirs: Any, model: Any, ids: Any) -> Any:
    """Return the logits of ``model`` for token numbers [batch, length]."""
    scale = theirs.hidden_size**0.5 if family in ("gemma2", "gemma3_text") else 1.0
    hook = model.embedding.register_forward_hook(lambda module, inputs, output: output * scale)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    hidden = torch.triu(torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool), 1)[None, None]
    found = model(ids, positions, hidden)
    hook.remove()
    cap = getattr(theirs, "final_logit_softcapping", None)
    return found if cap is None else cap * torch.tanh(found / cap)
