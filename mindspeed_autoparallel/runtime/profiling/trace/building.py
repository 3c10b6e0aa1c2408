"""Blocks of a megatron-core language model in a layout, with an attention that any device and context size can run."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from mindspeed_autoparallel.runtime.megatron.layout_arguments import recompute_arguments
from mindspeed_autoparallel.runtime.profiling.trace.request import TraceRequest


def configuration(request: TraceRequest) -> Any:
    """Return Megatron's configuration of ``request``; nothing is fused, nothing is initialised."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    ffn = request.ffn or 4 * request.hidden
    experts: dict[str, object] = {}
    if request.num_experts:
        experts = {
            "num_moe_experts": request.num_experts,
            "moe_router_topk": request.topk,
            "moe_router_pre_softmax": request.topk == 1,  # required by Megatron
            "moe_ffn_hidden_size": request.expert_ffn or ffn,
            "moe_shared_expert_intermediate_size": request.shared_ffn or None,
            "moe_token_dispatcher_type": request.dispatcher,
            "moe_router_load_balancing_type": "none",
            "add_bias_linear": False,
            "expert_model_parallel_size": request.expert,
            "expert_tensor_parallel_size": request.tensor_of_experts,
        }
    interleaved: dict[str, object] = {}
    if request.virtual > 1:
        # With batched messages gloo confuses chunks.
        interleaved = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
        interleaved["virtual_pipeline_model_parallel_size"] = request.virtual
    dtype = getattr(torch, request.dtype)
    return TransformerConfig(
        num_layers=request.num_layers,
        hidden_size=request.hidden,
        num_attention_heads=request.heads,
        num_query_groups=request.kv_heads or request.heads,
        kv_channels=request.head_size or None,
        ffn_hidden_size=ffn,
        tensor_model_parallel_size=request.tensor,
        pipeline_model_parallel_size=request.pipeline,
        context_parallel_size=request.context,
        cp_comm_type=request.context_exchange,
        sequence_parallel=request.sequence_parallel,
        use_cpu_initialization=True,
        perform_initialization=False,
        bf16=request.dtype == "bfloat16",
        fp16=request.dtype == "float16",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        gated_linear_unit=request.gated,
        activation_func=torch.nn.functional.silu if request.gated else torch.nn.functional.gelu,
        normalization="RMSNorm" if request.gated else "LayerNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        batch_p2p_sync=False,
        **{"add_bias_linear": not request.gated, **experts},
        **interleaved,
        **recompute_arguments(request.recompute),
    )


def _layer_spec(request: TraceRequest) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from mindspeed_autoparallel.runtime.attention.context_parallel import ContextParallelAttention

    spec = get_gpt_layer_local_spec(num_experts=request.num_experts or None, moe_grouped_gemm=False)
    spec.submodules.input_layernorm = WrappedTorchNorm
    spec.submodules.pre_mlp_layernorm = WrappedTorchNorm
    # The local attention of Megatron refuses context parallelism and stores the attention matrix.
    spec.submodules.self_attention.submodules.core_attention = ContextParallelAttention
    return spec


def build_layer(request: TraceRequest) -> Any:
    """Return one transformer layer; call it with hidden states ``[sequence, batch, hidden]`` of this rank."""
    from megatron.core.transformer.spec_utils import build_module

    return build_module(_layer_spec(request), config=configuration(request), layer_number=1)


def build_embedding(request: TraceRequest) -> Any:
    """Return the token embedding; call it with ``input_ids`` and ``position_ids``, ``[batch, sequence]``."""
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding

    return LanguageModelEmbedding(
        config=configuration(request),
        vocab_size=request.vocabulary,
        max_sequence_length=request.sequence,
        position_embedding_type="rope",
    )


class Head(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Final norm, output projection and loss, as Megatron's GPT model has them after its last layer."""

    def __init__(self, request: TraceRequest) -> None:
        super().__init__()
        from megatron.core.tensor_parallel import ColumnParallelLinear
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        config = configuration(request)
        self.norm = WrappedTorchNorm(config, request.hidden)
        self.output = ColumnParallelLinear(
            request.hidden,
            request.vocabulary,
            config=config,
            init_method=config.init_method,
            bias=False,
            skip_bias_add=False,
            gather_output=False,
        )

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss; ``labels``: ``[sequence, batch]``."""
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        logits, _ = self.output(self.norm(hidden))
        return vocab_parallel_cross_entropy(logits, labels).mean()


def build_stage(request: TraceRequest) -> list[Any]:
    """Return the model chunks of this process's pipeline rank, without wrappers."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    config, layer = configuration(request), _layer_spec(request)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    layers = request.num_layers // (request.pipeline * request.virtual)
    chunks = []
    for chunk in range(request.virtual):
        block = TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=WrappedTorchNorm)
        staged = {"vp_stage": chunk} if "vp_stage" in inspect.signature(GPTModel).parameters else {}
        chunks.append(
            GPTModel(
                config=config,
                transformer_layer_spec=block,
                vocab_size=request.vocabulary,
                max_sequence_length=request.sequence,
                pre_process=stage == 0 and chunk == 0,
                post_process=stage == request.pipeline - 1 and chunk == request.virtual - 1,
                share_embeddings_and_output_weights=False,
                position_embedding_type="rope",
                **staged,
            )
        )
    return chunks
