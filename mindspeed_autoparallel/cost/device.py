"""One accelerator: datasheet figures, and the share of them that software reaches."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

_RESERVED_SHARE = 0.06
"""Share of the memory that torch reports which tensors cannot use: contexts, buffers of communicators, and fragments of
the allocator (sources: docs/fsdp2.md).
"""


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of a datasheet's figures that a software stack reaches; ``provenance`` names the source of fitted ones."""

    gemm_fraction: float
    """Share of the peak that a large matrix product reaches."""
    gemm_inner_half: float
    """Inner dimension, in elements, at which a product runs at half of its speed (pipeline fill)."""
    attention_fraction: float
    """Share of the peak in attention."""
    memory_fraction: float
    """Share of the memory bandwidth that elementwise kernels reach."""
    softmax_passes: float
    """Passes over the attention matrix per forward, if attention is not fused."""
    head_passes: float
    """Passes over the logits per microbatch (loss, casts)."""
    launch_us: float
    """Host time of one forward pass of a layer; a backward pass costs twice that."""
    tensor_launch_us: float
    """Added host time of one forward pass of a layer per further tensor rank: all of them wait for the slowest."""
    unfused_softmax_us: float
    """Added host time of one forward pass if the fused softmax rejects the shape."""
    overlap_norm: float
    """Exponent that joins host and device time: large means max(host, device), 1 means their sum."""
    link_fraction: float
    """Share of the node's link bandwidth that a large collective reaches."""
    link_latency_us: float
    """Latency of one collective step inside a node, times log2 of the ranks."""
    inter_fraction: float
    """Share of the network bandwidth that a collective across nodes reaches."""
    inter_latency_us: float
    point_to_point_us: float
    """Fixed cost of one pipeline boundary per microbatch."""
    gradient_exposed: float
    """Share of the gradient communication that is not hidden."""
    optimizer_fraction: float
    """Share of the memory bandwidth that the optimizer reaches."""
    step_us: float
    """Fixed cost of one step (logging, clipping, data)."""
    relative_error: float
    """Mean absolute error of a step on held-out rows; a guess if ``provenance`` is estimated."""
    provenance: str
    tensor_exposed: float = 1.0
    """Share of the collectives of tensor parallelism that products do not hide."""
    overlapped_exposed: float = 0.3
    """The same in runs that overlap them with products; 0.28 in seven published on H100."""
    replica_fraction: float = 1.0
    """Share of a node's network that the reduction of gradients reaches if the node holds several replicas."""
    fp8_fraction: float = 0.75
    """Efficiency of eight-bit products at the eight-bit peak, relative to that of two-byte products at theirs."""
    expert_fraction: float = 0.6
    """Share of a single product's speed that the grouped products of experts reach; decision 0026 has its runs."""
    dispatch_fraction: float = 0.0
    """Share of the node's links that kernels reach which send a token once to each rank with an expert of its choice
    (DeepEP, HybridEP); 0: a token travels once per expert, in a collective."""
    corrections: tuple[tuple[float, ...], ...] = ()
    """Rows (log2 tokens, log2 hidden, log2 tensor size, log2 heads per rank, log correction) from measured layers; a
    correction of 0 means that the shape was measured and the formulas stand."""
    intervals: Mapping[str, float] = field(default_factory=dict[str, float])
    """Relative half widths that covered nine of ten held-out steps, by the kind of extrapolation
    (``predict.confidence.extrapolation``)."""
    measured_recompute: tuple[str, ...] = ()
    """Recompute of the measured steps; empty if nothing was measured."""
    measured_features: tuple[str, ...] = ()
    """Features beyond dense pretraining that the measured steps had; names as in ``predict.confidence.features``."""

    uncertainty: Mapping[str, float] = field(default_factory=dict[str, float])
    """Relative standard deviations of figures that were calibrated from a user's logs."""

    @functools.cached_property
    def _correction_table(self) -> Mapping[tuple[float, ...], float]:
        return {tuple(round(value, 6) for value in row[:-1]): row[-1] for row in self.corrections}

    def correction_of(self, key: tuple[float, ...]) -> float | None:
        """Return the log correction of a layer shape, or ``None`` if that shape was not measured."""
        return self._correction_table.get(tuple(round(value, 6) for value in key))


def usable_bytes(counted_bytes: int) -> int:
    """Return the memory that a training's tensors may use of what torch counts on a device."""
    return int(counted_bytes * (1 - _RESERVED_SHARE))


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator."""

    name: str
    aliases: tuple[str, ...]
    peak_tflops: float
    """Dense fp16/bf16."""
    memory_gib: float
    memory_bandwidth_gb_per_s: float
    num_cores: int
    """Units among which tiles are dealt out: streaming multiprocessors, AI cores, CPU cores."""
    link_gb_per_s: float
    """One direction, per device, inside a node."""
    network_gbit_per_s: float
    """Per node, by default."""
    source: str
    counted_gib: float | None = None
    """Memory that torch counts on the device; ``None`` if no published run states it."""
    host_link_gb_per_s: float | None = None
    """One direction, between a device and its host; ``None`` if no datasheet gives it."""
    peak_fp8_tflops: float | None = None
    """Dense, in eight bits; ``None`` if the device has no such products."""
    peak_fp4_tflops: float | None = None
    """Dense, in four bits with a scale per block; ``None`` if the device has no such products."""
    link_domain: int = 0
    """Devices that share fast links beyond a node, as in a rack; 0: only those of a node do."""
    mesh_peers: int = 0
    """Peers on the node to which a device has a dedicated link each; 0: links meet in a switch."""
    workspace_mib: float = 0.0
    """Memory that libraries of matrix products allocate once and keep."""
    efficiencies: Mapping[str, Efficiency] = field(default_factory=dict[str, Efficiency])
    """Per software stack: ``megatron-2021`` (unfused attention, no sequence parallelism) or ``megatron-core``."""

    @property
    def transposed_fp8(self) -> bool:
        """Return whether eight-bit products need transposed copies of their operands: NVIDIA's before Blackwell do,
        recognized by their lack of four-bit products."""
        return self.peak_fp4_tflops is None

    @property
    def counted_bytes(self) -> int:
        """Return ``counted_gib`` in bytes, or all of the memory if it is unknown."""
        return int((self.counted_gib or self.memory_gib) * 2**30)

    @property
    def usable_bytes(self) -> int:
        """Return the memory that a plan may use."""
        return usable_bytes(self.counted_bytes)

    @property
    def workspace_bytes(self) -> int:
        """Return ``workspace_mib`` in bytes."""
        return int(self.workspace_mib * 2**20)

    def efficiency(self, stack: str) -> Efficiency:
        """Return the figures for ``stack``, or those of the file's first stack."""
        if stack in self.efficiencies:
            return self.efficiencies[stack]
        return next(iter(self.efficiencies.values()))
