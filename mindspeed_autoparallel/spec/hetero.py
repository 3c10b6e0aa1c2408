"""The additional records of a hetero plan: every encoder's phase, and the homogeneous plan for comparison."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Literal, get_args

from mindspeed_autoparallel.spec.layout import Layout, ModuleLayout

Balance = Literal["local", "global", "off"]
BALANCES: tuple[Balance, ...] = get_args(Balance)
"""Values of ``--hetero-balance``."""
MemoryMode = Literal["upfront", "recompute", "window"]
MEMORY_MODES: tuple[MemoryMode, ...] = get_args(MemoryMode)
"""Values of ``--hetero-memory``: encoders keep their activations, run their forward again before their backward, or
interleave with the pipeline."""
WINDOW: MemoryMode = "window"


@dataclass(frozen=True, kw_only=True)
class EncoderMemory:
    """Memory of an encoder on one rank, in bytes."""

    state_bytes: int = 0
    kept_bytes: int = 0
    transient_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class EncoderPhase:
    """One encoder's or generator's part of a step, on the busiest rank. Times in microseconds per step."""

    module: str
    layout: ModuleLayout
    num_macro_batches: int
    """Number of the encoder's forward passes in a step."""
    samples: int
    """Most samples in one batch of a replica."""
    forward_us: float
    backward_us: float
    """Backward time without gradient reduction; includes the second forward in memory mode recompute."""
    exchange_us: float
    """Time of transfers: inputs to the owners, outputs to the first stage, gradients back."""
    reduction_us: float
    optimizer_us: float
    moved_bytes: int
    """Bytes per step on the busiest rank: the larger of sent and received."""
    state_bytes: int
    """Parameters, gradients and optimizer state, held on every rank during the whole step."""
    kept_bytes: int
    """Held on every rank from the encoder's forward to its backward; the fullest stage's, like ``state_bytes``."""
    transient_bytes: int
    """Held in addition while the encoder runs, before and after the pipeline."""
    first_stage_bytes: int
    """Its outputs and their gradients on the backbone's first stage."""
    num_layers: int = 0
    stage_layers: tuple[int, ...] = ()
    """Layers on each stage of the encoder's pipeline; empty without one."""
    stage_memory: tuple[EncoderMemory, ...] = ()
    """By stage of the encoder's pipeline or, without one, of the backbone; empty if all ranks hold the same."""
    interpolated_from: tuple[str, ...] = ()
    generator: bool = False
    """Whether it runs inside the backbone's pipeline, between forward and backward of the last stage."""

    def memory_at(self, place: float) -> EncoderMemory:
        """Return its memory on the rank at ``place``, the rank's number divided by the number of ranks."""
        if not self.stage_memory:
            return EncoderMemory(
                state_bytes=self.state_bytes, kept_bytes=self.kept_bytes, transient_bytes=self.transient_bytes
            )
        return self.stage_memory[int(place * len(self.stage_memory))]

    @property
    def held_bytes(self) -> int:
        """Return the bytes held on every rank while the pipeline runs."""
        return self.state_bytes + self.kept_bytes

    @property
    def total_us(self) -> float:
        """Return the time that the phase adds to the step."""
        return self.forward_us + self.backward_us + self.exchange_us + self.reduction_us + self.optimizer_us


@dataclass(frozen=True, kw_only=True)
class HomogeneousBest:
    """The best plan with one layout for all modules, on the same cluster and batch."""

    layout: Layout
    step_us: float
    """Mean of drawn steps if samples differ, as in ``HeteroBest``."""
    lower_bound_us: float | None
    """``None`` for a mean of drawn steps, which no search bounds."""
    status: str
    throughput_tokens_per_s_per_device: float
    layers: dict[str, tuple[int, ...]]
    recompute: dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class HeteroBest:
    """The best plan found with separate layouts for encoders, on the same cluster and batch, for comparison with a plan
    with one layout."""

    layout: Layout
    step_us: float
    lower_bound_us: float | None
    status: str
    memory: str
    """The ``--hetero-memory`` that it requires."""
    scale_one_us: float | None = None
    kept_us: float | None = None
    scale_one_again_us: float | None = None


@dataclass(frozen=True, kw_only=True)
class HeteroRecord:
    """The part of ``plan.json`` for modules with separate layouts."""

    memory: str
    """The ``--hetero-memory`` that the plan requires."""
    balance: str
    encoders: tuple[EncoderPhase, ...]
    homogeneous: HomogeneousBest | None = None
    homogeneous_note: str = ""
    """Reason for a missing homogeneous plan."""
    scale_one_us: float | None = None
    """Step in the same layouts with batch scale 1 and the encoders' activations kept; ``None`` where that does not fit
    or was not found, or samples differ."""
    kept_us: float | None = None
    """Step in the same layouts and batch scales with the encoders' activations kept; ``None`` as above."""
    scale_one_again_us: float | None = None
    """The same with recomputation, if the plan recomputes encoders and ``scale_one_us`` does not fit; ``None`` as
    above."""
    interleaving_us: float = 0.0
    """Memory mode window: waiting time inside the pipeline that adds to the phases; negative if encoders fill
    bubbles."""

    @property
    def total_us(self) -> float:
        """Return the time that all encoders add to the step."""
        return sum(phase.total_us for phase in self.encoders) + self.interleaving_us

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes held on every rank while the pipeline runs."""
        return sum(phase.held_bytes for phase in self.encoders)

    @property
    def transient_bytes(self) -> int:
        """Return the largest transient of an encoder; they run one at a time."""
        return max((phase.transient_bytes for phase in self.encoders), default=0)

    def memory_on(self, stage: int, num_stages: int) -> EncoderMemory:
        """Return the encoders' memory on the fullest rank of a backbone stage: ranks are numbered stage by stage, also
        those of an encoder's pipeline."""
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
