"""The output of a calibrating launch besides layouts: short pipelines, replayed operators, sampled collectives."""

from __future__ import annotations

from dataclasses import dataclass, field

from mindspeed_autoparallel.profiles.blocks import MeasuredAt
from mindspeed_autoparallel.profiles.knowledge import Operator, Sample, Signature


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The division of a model into pipeline stages."""

    pipeline_size: int = 1
    virtual_size: int = 1
    num_microbatches: int = 1

    @property
    def interleaved(self) -> bool:
        """Return whether a rank has several chunks of the model."""
        return self.virtual_size > 1


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """One rank of a pipeline that was run; medians over steps."""

    stage: int
    forward_us: tuple[float, ...]
    """Times of all forward passes in their order."""
    backward_us: tuple[float, ...]
    schedule_us: float
    """Time of the schedule, without the end of the step."""
    finalize_us: float
    step_us: float
    optimizer_us: float = 0.0
    updated_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class PipelineResult:
    """A short pipeline of the host's own model."""

    at: MeasuredAt = field(default_factory=MeasuredAt)
    stages: Stages
    num_layers: int = 0
    data_size: int = 1
    ranks: tuple[RankTimes, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Times of repeated runs; all 0 if it could not run."""

    median_us: float = 0.0
    p10_us: float = 0.0
    p90_us: float = 0.0
    num_runs: int = 0

    def sample(self, source: str) -> Sample:
        """Return it as the knowledge base keeps it."""
        return Sample(
            median_us=self.median_us, p10_us=self.p10_us, p90_us=self.p90_us, num_runs=self.num_runs, source=source
        )


@dataclass(frozen=True, kw_only=True)
class OperatorRow(Spread):
    """An operator that was replayed."""

    name: str
    signature: Signature
    sizes: tuple[int, ...]
    reason: str = ""
    """Reason why it could not be replayed."""

    @property
    def operator(self) -> Operator:
        """Return the call."""
        return Operator(name=self.name, signature=self.signature, sizes=self.sizes)


@dataclass(frozen=True, kw_only=True)
class LinkRow(Spread):
    """A collective that was sampled on the ranks of a tier."""

    kind: str
    tier: str
    ranks: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class OperatorRows:
    """The file of replayed operators."""

    rows: tuple[OperatorRow, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LinkRows:
    """The file of sampled collectives."""

    rows: tuple[LinkRow, ...] = ()
