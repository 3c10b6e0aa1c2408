"""Options of a search beside profile, cluster and batch, shared by the searches of one pipeline and of hetero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions
from mindspeed_autoparallel.spec import Layout, Plan

VIRTUAL_S = 12.0
"""Processor seconds of all processes together, unless virtual stages were requested."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Time and breadth of a search."""

    time_limit_s: float = 600.0
    top_k: int = 3
    """Number of alternatives to report beside the best plan."""
    seed: int = 0
    num_workers: int = 0
    """Number of processes; 0 is one per core. The result does not depend on it."""
    layouts: Sequence[Layout] | None = None
    """Search only these layouts (of the backbone, if encoders have their own)."""
    space: SpaceOptions = field(default_factory=SpaceOptions)
    known: Plan | None = None
    """A plan to beat, for the same profile, cluster and batch; bounds that its search proved remain valid."""
    with_relaxations: bool = True
    """Also solve the best layout with more memory and with more microbatches."""

    @property
    def virtual_s(self) -> float:
        """Return the processor seconds for slow layouts with virtual stages: the whole limit if they were requested."""
        return VIRTUAL_S if self.space.virtual_sizes is None and self.layouts is None else inf

    def check(self, global_batch_size: int) -> None:
        """Raise ``ConfigError`` for values out of range."""
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
    """Options for solving one layout."""

    time_limit_s: float
    seed: int = 0
    cutoff_us: float = inf
    """Step time of a known plan; the bound never exceeds it."""
    only_faster: bool = False
    """Search only for a faster plan; a proof that none exists ends the work."""
    effort: float | None = None
    """Effort of the integer solver, see ``split.solve``."""
