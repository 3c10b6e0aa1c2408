"""Shape of a model for predictions: sizes, and the mixer and MLP of every layer."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mindspeed_autoparallel.spec.model import DecoderSizes

Mixer = Literal["attention", "mamba", "linear", "none"]
Mlp = Literal["dense", "experts", "none"]
Activation = Literal["fused", "gelu", "gelu_tanh"]


class LayerKind(NamedTuple):
    """The components of one layer."""

    mixer: Mixer
    mlp: Mlp


@functools.lru_cache(maxsize=256)
def common_kind(layers: tuple[LayerKind, ...]) -> LayerKind:
    """Return the kind that most of ``layers`` have; the later of equally frequent ones, plain if there are none."""
    return max(reversed(layers), key=layers.count, default=LayerKind("attention", "dense"))


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): sizes in elements."""

    query_rank: int
    """0: queries come from the hidden state directly."""
    key_value_rank: int
    nope_size: int
    """Width per head without position."""
    rope_size: int
    """Width per head with position; one key of it serves all heads."""
    value_size: int

    @property
    def query_size(self) -> int:
        """Return the width of one head's query and key."""
        return self.nope_size + self.rope_size


@dataclass(frozen=True, kw_only=True)
class StateSpace:
    """Mamba-2 mixer (arXiv 2405.21060)."""

    heads: int
    head_size: int
    state_size: int
    groups: int

    @property
    def inner(self) -> int:
        """Return the mixer's inner width."""
        return self.heads * self.head_size


@dataclass(frozen=True, kw_only=True)
class LinearAttention:
    """Gated delta net and its kin: a state of key x value size per head (arXiv 2412.06464)."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    decay_rank: int = 0
    """Of the projection that gives every channel of a key its own decay (Kimi Delta Attention, arXiv 2510.26692); 0:
    one decay per head."""
    gate_rank: int = 0
    """Of the output gate's projection; 0: full."""


@dataclass(frozen=True, kw_only=True)
class SparseAttention:
    """DeepSeek's sparse attention: an indexer scores all tokens, attention reads the best of them."""

    heads: int
    """Heads of the indexer."""
    head_size: int
    topk: int
    """Number of tokens that attention reads."""
    fused: bool = True
    """Whether dedicated kernels read only these tokens; otherwise all scores are masked in memory."""


ENCODER = "encoder"
"""Module of an encoder that the decoder's section describes."""


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """An encoder in front of the decoder, on its first stages."""

    num_layers: int
    hidden: int
    heads: int
    ffn: int
    gated: bool
    tokens: int
    """Mean tokens per sample in the encoder."""
    frozen: bool
    layers_per_stage: tuple[int, ...] = ()
    """By stage, or by chunk in the order of the model; empty: all on the first stage."""


@dataclass(frozen=True, kw_only=True)
class ModelShape(DecoderSizes):
    """A decoder-only transformer, optionally with an encoder, for predictions."""

    sequence: int
    expert_ffn: int = 0
    shared_ffn: int = 0
    tied: bool = False
    causal: bool = True
    """Whether a token attends only to those before it; in encoders it attends to all."""
    window: int = 0
    """Tokens that a token attends to in layers with a window; 0 if no layer has one."""
    windowed_share: float = 0.0
    """Share of the layers that have the window."""
    expert_bias: bool = False
    """Whether experts have biases, the second of which Megatron adds row by row in fp32, outside of its kernels."""
    expert_clamp: bool = False
    """Whether both halves of the experts' gated activation are clamped, in separate passes."""
    layers: tuple[LayerKind, ...] = ()
    mtp_layers: int = 0
    """Layers that predict further tokens; each has a projection of two hidden states and a pass through the head."""
    latent: LatentAttention | None = None
    state_space: StateSpace | None = None
    linear: LinearAttention | None = None
    sparse: SparseAttention | None = None
    encoder: Encoder | None = None
    extra_norms: int = 0
    """Norms of a layer beyond two: on queries and keys (counted as a quarter of the hidden state), after blocks."""
    attended: float = 0.0
    """Mean number of tokens of a document, weighted by tokens: sum of squares over sum; 0: the whole sequence."""
    activation: Activation = "fused"
    """How a gated MLP's activation function runs; ``fused``: one kernel that keeps its input and its output."""
    attention_gate: bool = False
    """Whether a projection of the hidden state gates attention's output."""
    expert_hidden: int = 0
    """Width that routed experts read and write, between two projections of the hidden state; 0: the hidden state's."""
    residual_blocks: float = 0.0
    """Mean number of hidden states that a layer mixes by attention over depth before its mixer and before its MLP
    (attention residuals of Kimi K3); 0: plain residuals."""
    linear_bias: bool | None = None
    """Whether linear layers have biases; ``None``: only without gates and experts, as in GPT."""
    capped_logits: bool = False
    """Whether logits go through a tanh before the loss, whose output is kept."""
    capacity_factor: float = 0.0
    """Limit on the rows of an expert, relative to the balanced number; 0: no limit."""

    @property
    def expert_width(self) -> int:
        """Return the width that routed experts read and write."""
        return self.expert_hidden or self.hidden

    @property
    def modern(self) -> bool:
        """Return whether only software with fused attention trains this: gated, grouped heads, experts, long
        sequences."""
        return self.gated or self.num_experts > 0 or self.kv_heads != self.heads or self.sequence > 2048

    @property
    def attention_reach(self) -> float:
        """Return the number of tokens that attention spans: a document's if several share the sequence."""
        return min(self.attended or self.sequence, self.sequence)
