"""Parameters of one pipeline rank, counted from the shapes."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_autoparallel.cost.analytic.model_shape import LayerKind, common_kind
from mindspeed_autoparallel.cost.analytic.workload import Workload


@dataclass(frozen=True, kw_only=True)
class RankParameters:
    """Parameters on one rank: ``shared`` over all data-parallel ranks, ``expert`` over fewer."""

    shared: float
    expert: float


def padded_vocabulary(work: Workload) -> int:
    """Return the vocabulary as Megatron pads it: a multiple of 128 x tensor size."""
    multiple = 128 * work.tensor_size
    return -(-work.model.vocabulary // multiple) * multiple


def has_bias(work: Workload) -> bool:
    """Return whether linear layers have biases and positions are learned, as in GPT-2 and GPT-3."""
    if work.model.linear_bias is not None:
        return work.model.linear_bias
    return not work.model.gated and not work.model.num_experts


def layer_parameters(work: Workload, kind: LayerKind | None = None) -> RankParameters:
    """Count one layer of ``kind`` (the model's most frequent) on one rank, biases and norms included."""
    model, tensor = work.model, work.tensor_size
    kind = kind or common_kind(model.layers)
    bias = has_bias(work)
    blocks = (kind.mixer != "none") + (kind.mlp != "none")
    shared = blocks * (2 if bias else 1) * model.hidden + _mixer_parameters(work, kind)
    if model.residual_blocks:
        shared += blocks * 2 * model.hidden  # a norm and a query over depth
    if bias and kind.mixer == "attention":
        shared += (model.query_size + 2 * model.kv_size) / tensor + model.hidden
    products = 3 if model.gated else 2
    if kind.mlp == "dense":
        shared += products * model.hidden * model.ffn / tensor
        if bias:
            shared += model.ffn / tensor + model.hidden
    if kind.mlp != "experts":
        return RankParameters(shared=shared, expert=0)
    shared += model.hidden * model.num_experts + products * model.hidden * model.shared_ffn / tensor
    if model.expert_hidden:
        shared += (2 * model.hidden + 1) * model.expert_hidden
    held = model.num_experts / (work.expert_size * work.expert_tensor_size)
    expert = products * model.expert_width * model.expert_ffn * held
    return RankParameters(shared=shared, expert=expert)


def _mixer_parameters(work: Workload, kind: LayerKind) -> float:
    model, tensor = work.model, work.tensor_size
    if kind.mixer == "mamba" and model.state_space:
        space = model.state_space
        states = 2 * space.groups * space.state_size / min(tensor, space.groups)
        into = 2 * space.inner / tensor + states + space.heads / tensor
        return model.hidden * (into + space.inner / tensor) + 4 * (space.inner / tensor + states)
    if kind.mixer == "linear" and model.linear:
        linear = model.linear
        keys, values = linear.key_heads * linear.key_size, linear.value_heads * linear.value_size
        decays = (
            _ranked(model.hidden, keys, linear.decay_rank) if linear.decay_rank else model.hidden * linear.value_heads
        )
        own = model.hidden * (2 * keys + 2 * values + linear.value_heads) + decays
        return (own + _ranked(model.hidden, values, linear.gate_rank)) / tensor
    if kind.mixer != "attention":
        return 0.0
    sparse = 0.0
    if model.sparse:
        source = model.latent.query_rank if model.latent and model.latent.query_rank else model.hidden
        sparse = source * model.sparse.heads * model.sparse.head_size
        sparse += model.hidden * (model.sparse.head_size + model.sparse.heads)
    if not model.latent:
        return sparse + model.hidden * ((2 + model.attention_gate) * model.query_size + 2 * model.kv_size) / tensor
    latent, heads = model.latent, model.heads / tensor
    count = sparse + (latent.query_rank or model.hidden) * heads * latent.query_size
    count += model.hidden * (latent.query_rank + latent.key_value_rank + latent.rope_size)
    count += latent.key_value_rank * heads * (latent.nope_size + latent.value_size)
    return count + (1 + model.attention_gate) * heads * latent.value_size * model.hidden


def _ranked(inputs: float, outputs: float, rank: int) -> float:
    """Return a projection's parameters; with a ``rank``, those of two thin matrices."""
    return rank * (inputs + outputs) if rank else inputs * outputs


def prediction_parameters(work: Workload) -> RankParameters:
    """Count one layer of multi-token prediction on one rank: a layer and the product that joins two hidden states."""
    layer = layer_parameters(work, work.model.layers[-1])
    return RankParameters(shared=layer.shared + 2 * work.model.hidden**2, expert=layer.expert)


def adapter_parameters(work: Workload, kind: LayerKind) -> float:
    """Count the low-rank adapters of one dense or attention layer on one rank (experts share their adapters' sizes)."""
    model, tensor = work.model, work.tensor_size
    assert work.adapters is not None
    rank, ffn = work.adapters.rank, (2 if model.gated else 1) * model.ffn
    sizes = {
        "linear_qkv": (model.hidden, (model.query_size + 2 * model.kv_size) / tensor),
        "linear_proj": (model.query_size / tensor, model.hidden),
        "linear_fc1": (model.hidden, ffn / tensor),
        "linear_fc2": (model.ffn / tensor, model.hidden),
    }
    experts = model.num_experts / work.expert_size if kind.mlp == "experts" else 1
    return sum(
        rank * (inputs + outputs) * (experts if "fc" in name else 1)
        for name, (inputs, outputs) in sizes.items()
        if name in work.adapters.targets
    )


def encoder_parameters(work: Workload) -> float:
    """Count one layer of the encoder on one rank."""
    encoder = work.model.encoder
    if encoder is None:
        return 0.0
    products = 3 if encoder.gated else 2
    return (4 * encoder.hidden**2 + products * encoder.hidden * encoder.ffn) / work.tensor_size + 4 * encoder.hidden


def stage_parameters(work: Workload, stage: int) -> RankParameters:
    """Count pipeline stage ``stage`` (from 0): its layers, and the embedding and head if they are on it.

    Frozen encoders are not counted: they have neither gradients nor optimizer state.
    """
    model, place = work.model, work.stages[stage]
    shared = expert = 0.0
    for kind in set(model.layers):
        number = sum(chunk.count(kind) for chunk in place.chunks)
        if number:
            layer = layer_parameters(work, kind)
            shared, expert = shared + number * layer.shared, expert + number * layer.expert
    table = padded_vocabulary(work) * model.hidden / work.tensor_size
    classic = has_bias(work)
    if model.encoder and not model.encoder.frozen:
        shared += place.encoder_layers * encoder_parameters(work)
    if stage == 0:
        shared += table + (model.sequence * model.hidden if classic else 0)
    if stage == work.pipeline_size - 1:
        shared += (2 if classic else 1) * model.hidden
        # A tied head has its own copy of the table unless the first stage is also the last.
        if not (model.tied and stage == 0):
            shared += table
        if place.mtp_layers:
            ahead = prediction_parameters(work)
            shared, expert = shared + place.mtp_layers * ahead.shared, expert + place.mtp_layers * ahead.expert
            if stage != 0:
                shared += table
    return RankParameters(shared=shared, expert=expert)
