"""Results and open choices of a search over sizes, switches and units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mindspeed_autoparallel.planner.sharded.layers import LayerSearch
from mindspeed_autoparallel.planner.sharded.lowering import Lowering
from mindspeed_autoparallel.planner.sharded.program import QUICK
from mindspeed_autoparallel.planner.sharded.space import Switches
from mindspeed_autoparallel.schedule.sharded import Replayed
from mindspeed_autoparallel.spec.sharded import ShardedDecisions, ShardingHost, ShardSizes
from mindspeed_autoparallel.spec.sharded_plan import ShardedOutcome

LoweringOf = Callable[[ShardSizes, Switches], Lowering | None]


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
    chained: bool = False
    """Whether its bound includes that of the queues with every layer kept."""


class Fits:
    """Whether a choice of chunks may fit: the switches that hold the least decide, and are replayed once."""

    def __init__(self, host: ShardingHost, limit_bytes: int, lowering_of: LoweringOf) -> None:
        """``lowering_of``: returns the units that hold the least memory, or ``None`` if no choice is sure to."""
        self.host, self.limit, self.lowering_of = host, limit_bytes, lowering_of
        self._known: dict[tuple[ShardSizes, Switches], int] = {}

    def excess_peak(self, sizes: ShardSizes, switches: Switches) -> int:
        """Return the least peak if it exceeds the memory limit, or 0 if something may fit."""
        reshard, prefetch = max(self.host.reshard_choices), min(self.host.prefetch_depths)
        least = replace(switches, reshard=reshard, prefetch=prefetch)
        if (sizes, least) not in self._known:
            lowering, peak = self.lowering_of(sizes, least), 0
            if lowering is not None:
                search = LayerSearch(lowering, self.limit, QUICK)
                peak = 0 if search.may_fit() else search.least_peak
            self._known[sizes, least] = peak
        return self._known[sizes, least]
