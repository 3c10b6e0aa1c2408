"""Options of a search beside profile, cluster and batch: one record for a single pipeline and for hetero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions
from mindspeed_autoparallel.spec import Layout, Plan

VIRTUAL_S = 12.0
"""Of all processes together, unless virtual stages were requested."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """How long and how widely plans are searched."""

    time_limit_s: float = 600.0
    top_k: int = 3
    """Alternatives beside the best plan."""
    seed: int = 0
    num_workers: int = 0
    """Processes, 0 for one per core; the result does not depend on it."""
    layouts: Sequence[Layout] | None = None
    """Only these (of the backbone, where encoders have their own)."""
    space: SpaceOptions = field(default_factory=SpaceOptions)
    known: Plan | None = None
    """A plan for the same profile, cluster and batch, to be beaten; what its search proved of layouts holds."""
    with_relaxations: bool = True
    """Also solve the best layout with more memory and with more microbatches."""

    @property
    def virtual_s(self) -> float:
        """Return processor seconds for layouts with virtual stages that take long: all where they were requested."""
        return VIRTUAL_S if self.space.virtual_sizes is None and self.layouts is None else inf

    def check(self, global_batch_size: int) -> None:
        """Raise ``ConfigError`` for options that no search can have."""
        if global_batch_size < 1:
            raise ConfigError(f"the global batch size must be at least 1, got {global_batch_size}.")
        if not 0 < self.time_limit_s < inf:
            raise ConfigError(f"the time limit must be above 0 s, got {self.time_limit_s:g}.")
        if self.top_k < 1 or self.num_workers < 0:
            raise ConfigError(
                f"top_k must be at least 1 and num_workers at least 0, got {self.top_k} and {self.num_workers}."
            )
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"the seed must be 0 to {2**31 - 1}, got {self.seed}.")


@dataclass(frozen=True, kw_only=True)
class SolveOptions:
    """How one layout is solved."""

    time_limit_s: float
    seed: int = 0
    cutoff_us: float = inf
    """Step time of a plan that is known; the bound never exceeds it."""
    only_faster: bool = False
    """Only a faster plan is wanted; the proof that there is none ends the work."""
    effort: float | None = None
    """Of the integer solver, see ``split.solve``."""
