"""What a hetero plan adds to a plan: every encoder's phase, and the homogeneous plan it was compared with."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from mindspeed_autoparallel.spec.layout import Layout, ModuleLayout


@dataclass(frozen=True, kw_only=True)
class EncoderMemory:
    """What an encoder holds on one rank, in bytes."""

    state_bytes: int = 0
    kept_bytes: int = 0
    transient_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class EncoderPhase:
    """One encoder's part of a step, or a generator's, on the rank that has most to do. Times in microseconds per
    step."""

    module: str
    layout: ModuleLayout
    num_macro_batches: int
    """Times the encoder runs forward in a step."""
    samples: int
    """Most samples that one replica computes together."""
    forward_us: float
    backward_us: float
    """Before the encoder's gradients are reduced; with its second forward in memory mode recompute."""
    exchange_us: float
    """Inputs to the owners, outputs to the first stage, gradients back."""
    reduction_us: float
    optimizer_us: float
    moved_bytes: int
    """On the busiest rank, per step: the larger of what it sends and receives."""
    state_bytes: int
    """Parameters, gradients, optimizer: on every rank, the whole step."""
    kept_bytes: int
    """On every rank, from the encoder's forward to its backward; of the fullest stage, as ``state_bytes``."""
    transient_bytes: int
    """On top of these while the encoder runs, before and after the pipeline."""
    first_stage_bytes: int
    """Its outputs and their gradients, on the backbone's first stage."""
    num_layers: int = 0
    stage_layers: tuple[int, ...] = ()
    """Layers on each stage of its own pipeline; empty without one."""
    stage_memory: tuple[EncoderMemory, ...] = ()
    """By stage of its own pipeline, without one by stage of the backbone; empty where all ranks hold the same."""
    interpolated_from: tuple[str, ...] = ()
    generator: bool = False
    """It runs inside the backbone's pipeline, between forward and backward of the last stage."""

    def memory_at(self, place: float) -> EncoderMemory:
        """Return what it holds on the rank at ``place``, its number by the number of ranks."""
        if not self.stage_memory:
            return EncoderMemory(
                state_bytes=self.state_bytes, kept_bytes=self.kept_bytes, transient_bytes=self.transient_bytes
            )
        return self.stage_memory[int(place * len(self.stage_memory))]

    @property
    def total_us(self) -> float:
        """Return what the phase adds to the step."""
        return self.forward_us + self.backward_us + self.exchange_us + self.reduction_us + self.optimizer_us


@dataclass(frozen=True, kw_only=True)
class HomogeneousBest:
    """The best plan with one layout for all modules, on the same cluster and batch."""

    layout: Layout
    step_us: float
    lower_bound_us: float
    status: str
    throughput_tokens_per_s_per_device: float
    layers: dict[str, tuple[int, ...]]
    recompute: dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class HeteroBest:
    """The best plan found whose encoders have layouts of their own, on the same cluster and batch: what a plan with one
    layout for all was compared with."""

    layout: Layout
    step_us: float
    lower_bound_us: float
    status: str
    memory: str
    """``--hetero-memory`` that it counts on."""
    scale_one_us: float | None = None
    kept_us: float | None = None
    scale_one_again_us: float | None = None


@dataclass(frozen=True, kw_only=True)
class HeteroRecord:
    """Part of ``plan.json`` where modules train under layouts of their own."""

    memory: str
    """``--hetero-memory`` that the plan counts on."""
    balance: str
    encoders: tuple[EncoderPhase, ...]
    homogeneous: HomogeneousBest | None = None
    homogeneous_note: str = ""
    """Why there is no homogeneous plan."""
    scale_one_us: float | None = None
    """Step in the same layouts with batch scale 1 and the encoders' activations kept; ``None`` where that does not fit
    or was not found."""
    kept_us: float | None = None
    """Step in the same layouts and batch scales with the encoders' activations kept; ``None`` as above."""
    scale_one_again_us: float | None = None
    """Where the plan recomputes encoders and ``scale_one_us`` does not fit: that with recomputation; ``None`` as
    above."""
    interleaving_us: float = 0.0
    """Memory mode window: what waiting for one another inside the pipeline adds to the phases, or bubbles filled by
    encoders take off them."""

    @property
    def total_us(self) -> float:
        """Return what all encoders add to the step."""
        return sum(phase.total_us for phase in self.encoders) + self.interleaving_us

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes held on every rank while the pipeline runs."""
        return sum(phase.state_bytes + phase.kept_bytes for phase in self.encoders)

    @property
    def transient_bytes(self) -> int:
        """Return the most that an encoder needs while it runs; they run one at a time."""
        return max((phase.transient_bytes for phase in self.encoders), default=0)

    def memory_on(self, stage: int, num_stages: int) -> EncoderMemory:
        """Return what the encoders hold on the fullest rank of a stage of the backbone: ranks lie stage by stage, those
        of an encoder's pipeline likewise."""
        parts = lcm(num_stages, *(len(phase.stage_memory) or 1 for phase in self.encoders))
        first, last = stage * parts // num_stages, (stage + 1) * parts // num_stages
        ranks = [[phase.memory_at((part + 0.5) / parts) for phase in self.encoders] for part in range(first, last)]
        found = [
            EncoderMemory(
                state_bytes=sum(own.state_bytes for own in rank),
                kept_bytes=sum(own.kept_bytes for own in rank),
                transient_bytes=max((own.transient_bytes for own in rank), default=0),
            )
            for rank in ranks
        ]
        return max(found, key=lambda own: own.state_bytes + own.kept_bytes)

    @property
    def first_stage_bytes(self) -> int:
        return sum(phase.first_stage_bytes for phase in self.encoders)
