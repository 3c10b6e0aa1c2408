"""Results and open choices of a search over sizes, switches and units."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_autoparallel.planner.sharded.layers import LayerSearch
from mindspeed_autoparallel.planner.sharded.space import Switches
from mindspeed_autoparallel.schedule.sharded import Replayed
from mindspeed_autoparallel.spec.sharded import ShardedDecisions, ShardSizes
from mindspeed_autoparallel.spec.sharded_plan import ShardedOutcome


@dataclass(frozen=True, kw_only=True)
class ShardedOptions:
    """Limits of a search."""

    time_limit_s: float = 10.0
    """Limit in processor seconds; the search always looks for a first plan."""
    gap: float = 0.002
    """Sizes whose bound is within this share of the best step time are skipped."""
    top_k: int = 3


@dataclass(frozen=True)
class Found:
    """A configuration that fits, with a lower bound for its sizes and switches under any policies."""

    decisions: ShardedDecisions
    outcome: ShardedOutcome
    bound_ns: int


@dataclass(frozen=True)
class Entry:
    """An open choice, refined in steps: sizes, then switches, units, and the replay with every layer kept."""

    sizes: ShardSizes
    switches: Switches | None = None
    search: LayerSearch | None = None
    kept: Replayed | None = None
    rough: bool = False
    """Whether its bound is one that needs no units."""
