"""Search of the units outside the longest stack of layers, together with sizes, switches and policies."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Collection, Iterator
from dataclasses import replace

from mindspeed_autoparallel.planner.sharded.bounds import shards_are_small, step_bound_ns, units_bound_ns
from mindspeed_autoparallel.planner.sharded.chain import chain_ns
from mindspeed_autoparallel.planner.sharded.entries import Entry, Fits, Found
from mindspeed_autoparallel.planner.sharded.frontier import Frontier
from mindspeed_autoparallel.planner.sharded.layers import LayerSearch
from mindspeed_autoparallel.planner.sharded.lowering import Lowering
from mindspeed_autoparallel.planner.sharded.passes import size_bound_ns
from mindspeed_autoparallel.planner.sharded.pricing import priced
from mindspeed_autoparallel.planner.sharded.problem import Problem, Unmeasured
from mindspeed_autoparallel.planner.sharded.program import QUICK
from mindspeed_autoparallel.planner.sharded.space import Switches, decided, lowest_of, sizes_of, switches_of
from mindspeed_autoparallel.schedule.sharded import Replayed
from mindspeed_autoparallel.spec.sharded import GroupChoice, ShardedDecisions, ShardSizes
from mindspeed_autoparallel.spec.sharded_plan import ShardedOutcome

MOST_PATTERNS = 8
"""Number of patterns to vary at most (256 choices of units); further patterns stay as shipped."""


class UnitSearch:
    """Best-first search over sizes and switches with other units than shipped, starting from the results of
    ``frontier``.

    Sizes and switches have a bound that holds for every choice of units. The entry with the lowest bound is refined to
    a bound from sums for each choice of units, then to one from its longest path, and then solved.
    """

    def __init__(self, frontier: Frontier, least_s: float) -> None:
        """``least_s``: processor seconds to spend when the search has used up its own."""
        self.frontier, self.problem = frontier, frontier.problem
        self.end = max(frontier.end, time.process_time() + least_s)
        self._heap: list[tuple[int, int, Entry]] = []
        self._count = itertools.count()
        self._fits = Fits(self.problem.host, frontier.limit, self._finest)
        self._closed: list[int] = []
        """Bounds of entries that are solved, or whose search ended without a result."""

    def run(self) -> int:
        """Refine entries until none can be faster than the best by the requested gap, or time ends.

        Return a lower bound of the step time under any other choice of units, in nanoseconds. A faster configuration
        becomes the frontier's best.
        """
        frontier = self.frontier
        assert frontier.best is not None
        offloads = frontier.best.decisions.offload_optimizer
        for sizes in sizes_of(self.problem, frontier.num_devices, frontier.shipped.sizes.global_batch_size):
            try:
                self._push(0, size_bound_ns(self.problem, sizes), Entry(sizes, rough=True))
            except Unmeasured:
                continue
        while self._heap and self._heap[0][0] < (frontier.target_ns or 0) and time.process_time() < self.end:
            bound, _, entry = heapq.heappop(self._heap)
            if entry.rough:
                self._open_sizes(bound, entry.sizes, offload_optimizer=offloads)
            elif entry.switches is None:
                self._open_switches(bound, entry.sizes, offload_optimizer=offloads)
            elif entry.search is None:
                self._open_units(bound, entry.sizes, entry.switches)
            elif entry.kept is None:
                kept = entry.search.run({})
                self._push(bound, entry.search.path_bound_ns(kept), replace(entry, kept=kept))
            else:
                self._solve(bound, entry.search, entry.kept)
        open_bounds = [entry[0] for entry in self._heap[:1]]
        return min([*self._closed, *open_bounds, frontier.best_ns or 0])

    def _push(self, bound: int, lower: int | None, entry: Entry) -> None:
        if lower is not None:
            heapq.heappush(self._heap, (max(bound, lower), next(self._count), entry))

    def _open_switches(self, bound: int, sizes: ShardSizes, *, offload_optimizer: bool) -> None:
        for switches in switches_of(self.problem, sizes, offload_optimizer=offload_optimizer):
            self._push(bound, self._bound_ns(sizes, switches), Entry(sizes, switches))

    def _finest(self, sizes: ShardSizes, switches: Switches) -> Lowering | None:
        """Return the most units, which hold the least at a time, unless shards take more than full gradients."""
        _, finest = self._ends(sizes, switches)
        whole = not switches.micro_batch_chunk or finest.parts > 1
        return finest if whole and shards_are_small(finest) else None

    def _open_sizes(self, bound: int, sizes: ShardSizes, *, offload_optimizer: bool) -> None:
        rows = switches_of(self.problem, sizes, offload_optimizer=offload_optimizer)
        try:
            bounds = [self._bound_ns(sizes, one) for one in lowest_of(rows)]
        except Unmeasured:
            return
        self._push(bound, min((one for one in bounds if one is not None), default=None), Entry(sizes))

    def _bound_ns(self, sizes: ShardSizes, switches: Switches) -> int | None:
        """Return a lower bound of all choices of units, or ``None`` if nothing fits."""
        coarsest, finest = self._ends(sizes, switches)
        if switches.micro_batch_chunk and coarsest.parts == 1:
            return None  # no choice runs in parts
        return units_bound_ns(finest, coarsest, self.frontier.limit)

    def _ends(self, sizes: ShardSizes, switches: Switches) -> list[Lowering]:
        """Return the choices with the fewest and with the most units."""
        plain = decided(self.frontier.shipped, self.problem, sizes, switches)
        free = _free_patterns(self.problem, plain)
        return [Lowering(self.problem, _with_units(self.problem, plain, free, wanted)) for wanted in ((), free)]

    def _open_units(self, bound: int, sizes: ShardSizes, switches: Switches) -> None:
        if self._fits.excess_peak(sizes, switches):
            return
        for decisions in wrappings(self.problem, decided(self.frontier.shipped, self.problem, sizes, switches)):
            lowering = Lowering(self.problem, decisions)
            if not switches.micro_batch_chunk or lowering.parts > 1:
                lower, search, target = step_bound_ns(lowering, self.frontier.limit), None, self.frontier.target_ns or 0
                if lower is not None and lower < target:
                    lower = max(lower, chain_ns(lowering, target))
                    if lower < target:  # others are never refined
                        search = LayerSearch(lowering, self.frontier.limit, QUICK)
                self._push(bound, lower, Entry(sizes, switches, search))

    def _solve(self, bound: int, search: LayerSearch, kept: Replayed) -> None:
        solved = search.solve(self.frontier.target_ns, kept)
        if solved is not None:
            outcome = self.frontier.outcome(search.lowering, solved)
            self.frontier.take(Found(outcome.decisions, outcome, solved.bound_ns))
            self._closed.append(max(bound, solved.bound_ns))
        elif not search.nothing_fits:
            self._closed.append(bound)


def rewrap(frontier: Frontier) -> None:
    """Give the best configuration its fastest choice of units."""
    assert frontier.best is not None
    if (better := rewrapped(frontier.problem, frontier.best.outcome, frontier.limit)) is not None:
        frontier.take(Found(better.decisions, better, 0))


def rewrapped(problem: Problem, best: ShardedOutcome, limit_bytes: int) -> ShardedOutcome | None:
    """Return the fastest other choice of units at the sizes and policies of ``best``, or ``None`` if none is faster and
    fits."""
    found = None
    for decisions in wrappings(problem, best.decisions):
        outcome = priced(problem, decisions, limit_bytes, best.name)
        if outcome.feasible and outcome.step.total_us < (found or best).step.total_us:
            found = outcome
    return found


def wrappings(problem: Problem, decisions: ShardedDecisions) -> Iterator[ShardedDecisions]:
    """Yield ``decisions`` with every other choice of units, except for the longest stack of layers.

    Patterns with parameters that have no gradients, split experts (which are always units), and the head of a chunked
    loss stay unchanged. A part of a stack, such as its embedding, may be called from outside of the stack: it is a
    unit, or belongs to the root's, or to the one that it belongs to in ``decisions``.
    """
    free = _free_patterns(problem, decisions)
    given = _holders(problem, decisions)
    for chosen in itertools.product((True, False), repeat=len(free)):
        wanted = [pattern for pattern, wrapped in zip(free, chosen, strict=True) if wrapped]
        other = _with_units(problem, decisions, free, wanted)
        if any(not holders <= {part, "", *given[part]} for part, holders in _holders(problem, other).items()):
            continue
        if other.groups != decisions.groups and any(group.pattern for group in other.groups):
            yield other


def _holders(problem: Problem, decisions: ShardedDecisions) -> dict[str, set[str]]:
    """Return the patterns of the units that hold the parameters, by pattern of modules outside layers and experts.

    They are the one around by parents and the one around by name: they differ for a module that code outside of a stack
    calls, whose parent is the caller.
    """
    units, found = problem.units(decisions), dict[str, set[str]]()
    for module, place in zip(problem.profile.modules, units.holders, strict=True):
        if module.pattern not in found and not (module.is_layer or module.holds_experts):
            name = module.name
            while name not in units.place:
                name = name.rpartition(".")[0]
            found[module.pattern] = {units.modules[one].pattern for one in (place, units.place[name])}
    return found


def _with_units(
    problem: Problem, decisions: ShardedDecisions, free: Collection[str], wanted: Collection[str]
) -> ShardedDecisions:
    """Return ``decisions`` in which the patterns of ``wanted`` are units and the other ``free`` ones are not."""
    order = list(dict.fromkeys(module.pattern for module in problem.profile.modules))
    example = decisions.groups[-1]
    groups = [group for group in decisions.groups if group.pattern not in free or group.pattern in wanted]
    for pattern in sorted(set(wanted) - {group.pattern for group in groups}, key=order.index):
        before = [place for place, one in enumerate(groups) if one.pattern and _stands_before(order, one, pattern)]
        choice = replace(example, pattern=pattern, reshard_after_forward=decisions.groups[0].reshard_after_forward)
        groups.insert(before[-1] + 1 if before else 0, choice)
    return replace(decisions, groups=tuple(groups))


def _stands_before(order: list[str], group: GroupChoice, pattern: str) -> bool:
    return group.pattern in order and order.index(group.pattern) < order.index(pattern)


def _free_patterns(problem: Problem, decisions: ShardedDecisions) -> list[str]:
    split, chunked = decisions.sizes.expert_size > 1, bool(decisions.loss_chunk)
    return problem.free_patterns(split_experts=split, chunked_loss=chunked)[:MOST_PATTERNS]
