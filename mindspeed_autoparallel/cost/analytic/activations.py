"""Bytes that layers and the head keep for their backward passes, and their transient bytes."""

from __future__ import annotations

from mindspeed_autoparallel.cost.analytic.model_shape import LayerKind, common_kind
from mindspeed_autoparallel.cost.analytic.parameters import padded_vocabulary
from mindspeed_autoparallel.cost.analytic.workload import Workload

_LAYERS_ON_THEIR_WAY = 2
_PLAIN = LayerKind("attention", "dense")
_ASCEND_STATISTICS = 64
"""Bytes per token and head: maxima and sums of the softmax, eight fp32 each (``npu_fusion_attention``)."""
_DELTA_CHUNK = 64
"""Tokens of a chunk of the delta rule (``fla.ops``)."""
_KEPT_WIDTHS = {"fused": 3, "gelu": 4, "gelu_tanh": 7}
"""Tensors as wide as a gated MLP that its backward reads. ``fused``: both halves of the first product, and what the
second product reads. ``gelu``, gated by a separate kernel: also the function's output. ``gelu_tanh``, in elementary
kernels: also half of the input, the tanh, and one plus the tanh."""


def layer_activation_bytes(work: Workload, kind: LayerKind | None = None, recomputed: bool | None = None) -> float:
    """Return the bytes that one layer of ``kind`` (the most frequent) saves for its backward pass, per microbatch.

    Unfused attention, GeLU and dropout: Korthikanti et al. 2022 (arXiv 2205.05198), table 2, with 34 = 10 replicated +
    24 split by the tensor size. Fused attention: the tensors that Transformer Engine saves, counted one by one.
    """
    kind = kind or common_kind(work.model.layers)
    recomputed = work.recompute == "full" if recomputed is None else recomputed
    state = work.tokens * work.model.hidden * work.element_bytes
    if recomputed:
        # A group of layers keeps only the input of its first one.
        return state / work.hidden_split / max(1, _group(work))
    if work.stack != "megatron-core" and kind == _PLAIN:
        return state / 2 * (10 / work.hidden_split + 24 / work.tensor_size) + _attention_matrix_bytes(work)
    modules = work.recompute_detail.modules if work.recompute == "selective" else ()
    saved = 0.0
    if kind.mixer != "none":
        # The residual stream, and its norm's output as the first product reads it.
        saved += (state + ("layernorm" not in modules) * _read_bytes(work, state)) / work.hidden_split
        saved += _mixer_bytes(work, kind, modules)
    if kind.mlp == "dense":
        saved += (state + ("layernorm" not in modules) * _read_bytes(work, state)) / work.hidden_split
    elif kind.mlp == "experts":
        # The router reads the norm's output in the training precision.
        saved += (1 if "layernorm" in modules else 2) * state / work.hidden_split
    if kind.mlp != "none":
        saved += _mlp_bytes(work, kind, modules)
    if work.model.residual_blocks:
        # The mixed states in fp32, as they are and normalized: both are operands of products.
        mixed = work.model.residual_blocks * work.tokens * work.model.hidden * 8
        saved += mixed * ((kind.mixer != "none") + (kind.mlp != "none")) / work.hidden_split
    # Norms after blocks keep what they normalize.
    saved += work.model.extra_norms * state / work.hidden_split
    return saved - _saved_by_mindspeed(work, kind, state)


def _read_bytes(work: Workload, size: float) -> float:
    """Return the bytes that a product saves of an input that takes ``size`` in the training precision."""
    return size * work.operand_bytes / work.element_bytes


def _group(work: Workload) -> int:
    detail = work.recompute_detail
    return detail.num_layers if detail.method == "uniform" and work.recompute == "full" else 1


def _mixer_bytes(work: Workload, kind: LayerKind, modules: tuple[str, ...]) -> float:
    """Return the bytes that a mixer saves between its norm and its output projection's input."""
    model, tensor, size = work.model, work.tensor_size, work.element_bytes
    if kind.mixer == "mamba" and model.state_space:
        space = model.state_space
        states = 2 * space.groups * space.state_size / min(tensor, space.groups)
        inner = space.inner / tensor
        # The input projection's output, the convolution's, the scan's, and the gated norm's.
        kept = (2 * inner + states) + (inner + states) + inner
        return work.tokens * (size * kept + work.operand_bytes * inner)
    if kind.mixer == "linear" and model.linear:
        linear = model.linear
        keys, values = linear.key_heads * linear.key_size, linear.value_heads * linear.value_size
        kept = size * (2 * (2 * keys + values) + 3 * values)
        if linear.decay_rank:
            # The decay and its sums over a chunk in fp32, and two matrices of each chunk (``chunk_kda``).
            kept += (size + 4) * keys + 2 * size * _DELTA_CHUNK * linear.key_heads
        return work.tokens * kept / tensor
    norm = _attention_matrix_bytes(work)
    if work.fused_attention:
        norm = (_ASCEND_STATISTICS if work.on_ascend else 4) * work.tokens * model.heads / tensor
    norm += work.own_masks * work.sequences * (model.sequence / work.context_size) * model.sequence
    if work.on_ascend:
        norm += _rotary_tables_bytes(work)
    if not model.latent:
        # A gate keeps its sigmoid's input, and attention's ungated output.
        saved = (
            work.tokens
            * ((1 + 2 * model.attention_gate) * model.query_size + 2 * work.attended_kv_size)
            * size
            / tensor
        )
        return saved + work.tokens * model.query_size * _output_bytes(work) / tensor + norm
    latent, heads = model.latent, model.heads / tensor
    # Normalized before they are projected up.
    kept = latent.query_rank + latent.key_value_rank + latent.rope_size
    read = (latent.query_rank + latent.key_value_rank) * work.operand_bytes
    read += heads * latent.value_size * (_output_bytes(work) + 2 * size * model.attention_gate)
    if "mla_up_proj" not in modules:
        # Queries and keys with their position, and values.
        kept += heads * (2 * latent.query_size + latent.value_size)
        if work.on_ascend:
            # Fused attention requires values as wide as queries: they and the output are padded copies.
            kept += heads * (2 * latent.query_size - latent.value_size)
    return work.tokens * (size * kept + read) + norm


def _output_bytes(work: Workload) -> float:
    """Return bytes per element of attention's output: its own backward and the projection read it, which is one tensor
    if both read the training precision."""
    return work.element_bytes + (work.operand_bytes if work.recipe else 0.0)


def _rotary_tables_bytes(work: Workload) -> float:
    """Return the bytes of cosines and sines for queries and keys, which each layer computes and keeps."""
    model = work.model
    if not model.modern:
        return 0.0
    width = model.latent.rope_size if model.latent else model.query_size // model.heads
    return 4 * (model.sequence / work.context_size) * width * work.element_bytes


def _mlp_bytes(work: Workload, kind: LayerKind, modules: tuple[str, ...]) -> float:
    """Return the bytes that an MLP saves between its norm and its output."""
    model, tensor, size = work.model, work.tensor_size, work.element_bytes
    products = _KEPT_WIDTHS[model.activation] if model.gated else 2
    if kind.mlp == "dense":
        saved = 0.0
        if not model.gated and not model.num_experts and work.dropout:
            saved += work.tokens * model.hidden * 2 / work.hidden_split  # two dropout masks of one byte each
        width = (products - 1) * size + work.operand_bytes
        return saved + (0 if "mlp" in modules else width * work.tokens * model.ffn / tensor)
    shared = (products - 1) * size + work.operand_bytes
    shared *= 0.0 if {"shared_experts", "moe"} & set(modules) else work.tokens * model.shared_ffn
    if "moe" in modules:
        return shared / tensor
    # Of each routed row: the experts' input and the tensors between their matrices; the router's weights are applied
    # there, so the output is not kept (megatron-core from 0.12).
    clamped = 2 * (model.expert_clamp and not work.fused_activation)
    between = (products - 1 + clamped) * size + ("moe_act" not in modules) * work.operand_bytes
    kept = model.expert_width * work.operand_bytes + between * model.expert_ffn / work.expert_tensor_size
    # In a latent space: the input of the norm after the experts, and that of the second projection.
    latent = work.tokens * model.expert_hidden * (size + work.operand_bytes)
    # Gathered dispatch keeps all ranks' tokens, before and after the experts.
    gathered = (
        2 * work.tokens / work.hidden_split * work.expert_size * model.expert_width * size
        if work.gathered_experts
        else 0.0
    )
    return work.routed_rows * kept + shared / tensor + latent + gathered


def _saved_by_mindspeed(work: Workload, kind: LayerKind, state: float) -> float:
    """Return the bytes that MindSpeed's recompute of activation functions and norms frees, as a mean over a stage's
    layers."""
    detail, model = work.recompute_detail, work.model
    if work.recompute == "full" or (detail.activation_layers is None and detail.norm_layers is None):
        return 0.0
    layers = max(1, model.num_layers / work.pipeline_size)
    saved = 0.0
    if detail.activation_layers is not None:
        width = work.tokens * model.ffn / work.tensor_size
        if kind.mlp == "experts":
            width = work.routed_rows * model.expert_ffn / work.expert_tensor_size
        saved += min(1.0, detail.activation_layers / layers) * width * work.element_bytes * (kind.mlp != "none")
    if detail.norm_layers is not None:
        saved += min(1.0, detail.norm_layers / layers) * 2 * state / work.hidden_split
    return saved


def _attention_matrix_bytes(work: Workload) -> float:
    """Return the bytes of softmax, dropout mask and their product, if attention is neither fused nor recomputed."""
    if work.fused_attention or work.recompute != "none":
        return 0.0
    kept = 2 * work.element_bytes + 1 if work.dropout else work.element_bytes
    return kept * work.model.heads * work.tokens * work.model.sequence / work.tensor_size


def kept_share(work: Workload, num_layers: int) -> float:
    """Return the share of its layers' activations that a stage keeps on the device while others wait on the host.

    One offloaded layer is being copied out or in while another one runs.
    """
    there = min(work.offloaded_layers, max(0, num_layers - _LAYERS_ON_THEIR_WAY))
    return 1 - there / max(1, num_layers)


def encoder_activation_bytes(work: Workload) -> float:
    """Return the bytes that one layer of the encoder saves per microbatch; 0 if it is frozen."""
    encoder = work.model.encoder
    if encoder is None or encoder.frozen:
        return 0.0
    tokens = work.sequences * encoder.tokens / work.context_size
    if work.recompute == "full":
        return tokens * encoder.hidden * work.element_bytes
    products = 3 if encoder.gated else 2
    return (
        tokens
        * work.element_bytes
        * (4 * encoder.hidden + (4 * encoder.hidden + products * encoder.ffn) / work.tensor_size)
    )


def backward_transient_bytes(work: Workload, kind: LayerKind | None = None) -> float:
    """Return the bytes of the largest weight gradient before it joins the fp32 buffer, and of the widest gradients of
    one layer of ``kind`` (the most frequent)."""
    model, size = work.model, work.element_bytes
    products = 2 if model.gated else 1
    width = model.ffn / work.tensor_size
    kind = kind or common_kind(work.model.layers)
    if kind.mlp == "experts":
        width = model.expert_ffn * max(1, model.num_experts // work.expert_size) / work.expert_tensor_size
        rows = work.routed_rows
        gradients = 2 * rows * (products * model.expert_ffn / work.expert_tensor_size + model.expert_width) * size
    else:
        gradients = products * work.tokens * width * size
    inputs = model.expert_width if kind.mlp == "experts" else model.hidden
    weight = 0.0 if work.adapters else 2 * products * inputs * width * size
    transient = weight + gradients
    partly = work.recompute == "full"
    if work.stack != "megatron-core" or partly:
        again = layer_activation_bytes(work, kind, recomputed=False) * _group(work) if partly else 0
        transient = max(transient, again + gradients)
    if kind.mlp == "experts" and work.gathered_experts:
        # Gathered tokens, the results returned to them, and the gradients of both.
        transient += 4 * work.tokens / work.hidden_split * work.expert_size * model.expert_width * size
    if model.sparse and not model.sparse.fused:
        transient += _masked_scores_bytes(work)
    if work.context_size > 1:
        transient += 4 * work.tokens * model.hidden * size / work.tensor_size
    return transient


_PREFERENCE_BYTES = {(True, True): 24, (True, False): 16, (False, True): 16, (False, False): 12}
"""Per logit of the policy, by whether there is a reference and whether tensor ranks share the vocabulary. Both models'
logits are kept in fp32 (8), the policy's exponentials (4), and of the reference its exponentials, differences and their
result (12). ``log_softmax`` on one rank keeps one result of each."""


def _masked_scores_bytes(work: Workload) -> float:
    """Return the bytes of the scores of all pairs of tokens, per head of attention and of the indexer, if no kernel
    reads only the chosen ones.

    Twelve bytes per attention head (scores and their softmax in fp32, probabilities and their gradient) and six per
    head of the indexer.
    """
    model = work.model
    assert model.sparse is not None
    return work.tokens * model.attention_reach * (12 * model.heads / work.tensor_size + 6 * model.sparse.heads)


def head_bytes(work: Workload) -> float:
    """Return the bytes of logits, the head's weight gradient and, without the fused loss, an fp32 copy of the logits.

    That copy becomes softmax and gradient in place, and is cast back once it is the gradient; the software of 2021
    wrote the exponentials to a second one. Preference training has logits of its own, see ``_PREFERENCE_BYTES``.
    """
    logits = work.tokens * padded_vocabulary(work) / work.tensor_size / work.loss_slices
    table = padded_vocabulary(work) * work.model.hidden / work.tensor_size * work.element_bytes
    table *= work.adapters is None
    if work.preference:
        return logits * _PREFERENCE_BYTES[work.preference == "dpo", work.tensor_size > 1]
    kept = work.element_bytes * (2 if work.model.capped_logits else 1)
    if work.cross_entropy_fusion:
        return logits * kept + table
    return logits * (kept + (4 if work.stack == "megatron-core" and work.loss_in_place else 8))
