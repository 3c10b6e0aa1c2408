"""The subject of a prediction: model, hardware, layout, batch and switches of one run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mindspeed_autoparallel.cost.analytic.model_shape import LayerKind, ModelShape
from mindspeed_autoparallel.spec.layout import Layout

Recipe = Literal["", "fp8", "fp8_blockwise", "mxfp8", "nvfp4"]
Sharding = Literal["", "gradients", "parameters"]
OPERAND_BYTES: dict[Recipe, float] = {
    "fp8": 1.0,
    "fp8_blockwise": 1 + 4 / 128,
    "mxfp8": 1 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16,
}
"""Bytes of one quantized element with its share of the scale: fp32 per 128 elements, a byte per 32, a byte per 16."""
RECOMPUTE = ("none", "selective", "full")
"""Recompute policies, from keeping everything to keeping only a layer's input."""


def is_ascend(gpu: str) -> bool:
    return any(word in gpu.lower() for word in ("ascend", "910b", "910c"))


@dataclass(frozen=True, kw_only=True)
class RecomputeDetail:
    """Details of ``full`` or ``selective`` recompute beyond Megatron's defaults."""

    method: str = "uniform"
    """``uniform``: all layers, in groups of ``num_layers``; ``block``: the first ``num_layers`` of each chunk."""
    num_layers: int = 1
    per_rank: bool = False
    """Whether ``num_layers`` counts the layers of a pipeline rank and not of each of its chunks."""
    modules: tuple[str, ...] = ("core_attn",)
    """Of ``selective``, in Megatron's words."""
    activation_layers: int | None = None
    """MindSpeed's ``--recompute-activation-function``: layers of a stage whose activation function runs again."""
    norm_layers: int | None = None
    """MindSpeed's ``--recompute-norm``: layers of a stage whose norms run again."""


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Low-rank adapters of frozen matrices."""

    rank: int
    targets: tuple[str, ...]
    """Megatron's names: linear_qkv, linear_proj, linear_fc1, linear_fc2."""


@dataclass(frozen=True, kw_only=True)
class StageLayers:
    """Layers of one pipeline stage: kinds by chunk, and what else lives there."""

    chunks: tuple[tuple[LayerKind, ...], ...]
    encoder_chunks: tuple[int, ...] = ()
    """Layers of the encoder by chunk; empty without one."""
    mtp_layers: int = 0

    @property
    def encoder_layers(self) -> int:
        """Return the number of encoder layers on the stage."""
        return sum(self.encoder_chunks)

    @property
    def num_layers(self) -> int:
        """Return the number of decoder layers on the stage."""
        return sum(len(chunk) for chunk in self.chunks)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training run whose step is predicted."""

    model: ModelShape
    gpu: str
    num_devices: int
    devices_per_node: int
    inter_node_gbit_per_s: float | None
    tensor_size: int
    pipeline_size: int
    data_size: int
    context_size: int
    expert_size: int
    expert_tensor_size: int
    """Ranks that share one expert's matrices; the tensor size by default, as in Megatron."""
    virtual_size: int
    sequence_parallel: bool
    distributed_optimizer: bool
    global_batch: int
    micro_batch: int
    recompute: str
    stack: str
    fused_attention: bool
    """Whether the attention matrix is never stored."""
    stages: tuple[StageLayers, ...]
    recompute_detail: RecomputeDetail = field(default_factory=RecomputeDetail)
    cross_entropy_fusion: bool = True
    """Whether Transformer Engine's loss is used, which keeps logits only in the training precision."""
    loss_in_place: bool = True
    """Whether the unfused loss works in its one fp32 copy of the logits; MindSpeed's made a second until 08/2025."""
    own_masks: float = 0.0
    """Share of the layers that keep an attention mask of their own (a byte per pair of tokens)."""
    gradient_overlap: bool | None = None
    """Whether the reduction of gradients hides behind the backward pass; ``None``: as in the device's measured runs."""
    tensor_overlap: bool | None = None
    """Whether collectives of tensor parallelism hide behind products; ``None`` as above."""
    expert_overlap: bool = False
    """Whether exchanges of tokens with experts hide behind the opposite pass of another microbatch."""
    element_bytes: int = 2
    half_precision: bool = False
    """fp16: gradients are reduced as they are."""
    recipe: Recipe = ""
    """Form of the operands of matrix products if it is narrower than the training precision; else empty."""
    reduced_in_two_bytes: bool = False
    """Whether gradients are accumulated and reduced in the training precision and not in fp32."""
    quantized_parameters: bool = False
    """Whether the parameters of quantized products exist in the recipe's form only (``--fp8-param-gather``)."""
    master_bytes: float = 4.0
    """Bytes of the optimizer's copy of each parameter; 2: only what the parameter itself lacks."""
    moment_bytes: float = 8.0
    """Bytes of both of Adam's moments of each parameter."""
    optimizer_on_host: float = 0.0
    """Share of the optimizer's state that is kept and updated on the host."""
    sharding: Sharding = ""
    """What Megatron's FSDP shards besides the optimizer; empty without it."""
    sharding_replicas: int = 1
    """Groups of data-parallel ranks that each hold all shards (HSDP)."""
    offloaded_layers: int = 0
    """Layers of each stage whose saved activations are offloaded to the host's memory."""
    context_kind: str = "ring"
    """``ring``, ``ulysses`` (all-to-all), ``hybrid`` (``ulysses_size`` ranks exchange heads, rings among them),
    ``allgather``."""
    ulysses_size: int = 1
    tensor_grid: tuple[int, int] | None = None
    """MindSpeed's TP-2D: both sides of the grid of tensor ranks."""
    group_microbatches: int = 0
    """Microbatches that a chunk runs in a row under interleaving; 0: the pipeline size."""
    adapters: Adapters | None = None
    grouped_products: bool = True
    """Whether a rank's experts run as one grouped kernel and not one after another."""
    fused_weight_gradients: bool = True
    """Whether products add weight gradients to the fp32 buffer themselves."""
    shared_master_weights: bool = False
    """MindSpeed's ``--reuse-fp32-param``: the fp32 copy holds the training precision's bits."""
    swapped_optimizer: bool = False
    """Whether the optimizer's state is swapped to the host's memory between updates."""
    gathered_experts: bool = False
    """Whether all tokens are gathered to all ranks of the experts (dispatcher ``allgather``) and not exchanged."""
    exchanged_per_expert: bool = False
    """Whether a token is sent once for each of its experts (dispatcher ``alltoall``) and not once to each rank."""
    replayed_launches: float = 0.0
    """Share of the host's launches that a captured graph replays, of those that it captures."""
    quantized_attention: bool = False
    """Whether attention's products are quantized, too, on Blackwell (``fp8_dot_product_attention``)."""
    replays_experts: bool = True
    """Whether a captured graph holds the experts, too."""
    preference: str = ""
    """``dpo``: pairs, and a forward pass of a frozen reference; ``simpo``: pairs."""
    supervised: bool = False
    """Whether the run is supervised fine-tuning."""
    dropout: bool = True
    """Whether dropout is on, whose masks are kept."""
    fused_activation: bool = True
    """Whether the experts' activation function is one kernel, which clamps, too (Megatron from 0.16)."""
    fused_rotary: bool = True
    """Whether one kernel rotates queries, and one keys."""
    loss_slices: int = 1
    """Pieces in which the head and the loss are computed, one after another."""
    imbalance: float = 1.0
    """Rows on the busiest rank of experts, relative to the balanced number."""

    @property
    def on_ascend(self) -> bool:
        """Return whether the run is on Ascend devices, whose software replaces some of Megatron's kernels."""
        return is_ascend(self.gpu)

    @property
    def on_rack(self) -> bool:
        """Return whether devices share the links of a rack (NVL72), with Grace as their host."""
        return any(word in self.gpu.lower() for word in ("gb200", "gb300"))

    @property
    def on_blackwell(self) -> bool:
        """Return whether the run is on B200, B300 or racks of them."""
        return any(word in self.gpu.lower() for word in ("b200", "b300"))

    @property
    def on_hopper(self) -> bool:
        """Return whether eight-bit products need their operands transposed, as Hopper's do for both gradients."""
        return any(word in self.gpu.lower() for word in ("h100", "h200", "h800", "h20"))

    @property
    def operand_bytes(self) -> float:
        """Return bytes per element of what a matrix product saves for its weight's gradient."""
        return OPERAND_BYTES[self.recipe] if self.recipe else float(self.element_bytes)

    @property
    def gradient_bytes(self) -> int:
        """Return bytes per element of the gradients that are accumulated and reduced."""
        return self.element_bytes if self.half_precision or self.reduced_in_two_bytes else 4

    @property
    def optimizer_bytes(self) -> float:
        """Return bytes per owned parameter that the optimizer keeps on the device."""
        # With shared master weights two bytes of these are the parameters' own.
        state = self.master_bytes + self.moment_bytes - 2.0 * self.shared_master_weights
        return 0.0 if self.swapped_optimizer else state * (1 - self.optimizer_on_host)

    @property
    def attended_kv_size(self) -> int:
        """Return the width of all key heads as attention reads them: MindSpeed repeats them before it exchanges
        heads."""
        repeated = self.on_ascend and self.context_size > 1 and self.context_kind in ("ulysses", "hybrid")
        return self.model.query_size if repeated else self.model.kv_size

    @property
    def layout(self) -> Layout:
        """Return the sizes and switches as the planner has them. Raises ``ConfigError`` for impossible ones."""
        interleaved, gathers = self.virtual_size > 1, bool(self.gradient_overlap) and self.distributed_optimizer
        return Layout(
            pipeline_size=self.pipeline_size,
            tensor_size=self.tensor_size,
            data_size=self.data_size,
            context_size=self.context_size,
            expert_size=self.expert_size,
            expert_tensor_size=self.expert_tensor_size if self.model.num_experts else 0,
            virtual_size=self.virtual_size,
            micro_batch_size=self.micro_batch,
            sequence_parallel=self.sequence_parallel,
            distributed_optimizer=self.distributed_optimizer,
            overlap_gradient_reduce=bool(self.gradient_overlap),
            overlap_parameter_gather=gathers,
            overlap_tensor_parallel=bool(self.tensor_overlap) and self.tensor_size > 1,
            schedule="interleaved" if interleaved else "1f1b",
            microbatch_group_size=self.group_microbatches if interleaved else 0,
            standalone_ends=True,
        )

    @property
    def num_microbatches(self) -> int:
        """Return the number of microbatches per step and pipeline."""
        return self.global_batch // (self.data_size * self.micro_batch)

    @property
    def sequences(self) -> int:
        """Return the number of sequences that run through the model at once: two for each sample of preference
        training."""
        return self.micro_batch * (2 if self.preference else 1)

    @property
    def tokens(self) -> int:
        """Return the number of tokens of one microbatch on one context-parallel rank."""
        return self.sequences * self.model.sequence // self.context_size

    @property
    def expert_data(self) -> int:
        """Return the number of ranks that hold the same experts."""
        return max(
            1, self.data_size * self.context_size * self.tensor_size // (self.expert_size * self.expert_tensor_size)
        )

    @property
    def routed_rows(self) -> float:
        """Return the number of token copies that the experts of one rank work on, on the busiest rank."""
        own = self.tokens / (self.tensor_size if self.sequence_parallel else 1)
        return own * self.model.topk * self.expert_tensor_size * (self.model.capacity_factor or self.imbalance)

    @property
    def hidden_split(self) -> int:
        """Return the number of tensor ranks that share hidden states between blocks."""
        return self.tensor_size if self.sequence_parallel else 1
