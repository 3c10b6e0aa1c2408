"""Best-first search over sizes and switches: bounds from sums, then from paths, then the policies of every layer.

Every open choice is an entry with a bound; the one with the lowest bound is refined. Sizes become one entry per
combination of switches, a bound from sums becomes that of the longest path, and an entry with that bound is solved.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import defaultdict
from dataclasses import replace

from mindspeed_autoparallel.planner.candidate import limit_of
from mindspeed_autoparallel.planner.sharded.bounds import step_bound_ns
from mindspeed_autoparallel.planner.sharded.buckets import lowering_of
from mindspeed_autoparallel.planner.sharded.chain import chain_ns
from mindspeed_autoparallel.planner.sharded.entries import Entry, Fits, Found, ShardedOptions
from mindspeed_autoparallel.planner.sharded.layers import LayerSearch
from mindspeed_autoparallel.planner.sharded.lowering import Lowering
from mindspeed_autoparallel.planner.sharded.passes import size_bound_ns
from mindspeed_autoparallel.planner.sharded.pricing import outcome_of, policies_by_pattern, priced
from mindspeed_autoparallel.planner.sharded.problem import Problem, Unmeasured
from mindspeed_autoparallel.planner.sharded.program import QUICK, THOROUGH, Solved
from mindspeed_autoparallel.planner.sharded.space import Switches, decided, lowest_of, sizes_of, switches_of
from mindspeed_autoparallel.spec.layout import Cluster
from mindspeed_autoparallel.spec.sharded import ShardedDecisions, ShardSizes
from mindspeed_autoparallel.spec.sharded_plan import ShardedOutcome, ShardedVerdict

_POLISH_S = 3.0
"""Processor seconds for polishing when the search has used up its time."""


class Frontier:
    """The search of one problem; ``best`` is the fastest configuration found."""

    def __init__(self, problem: Problem, cluster: Cluster, shipped: ShardedDecisions, options: ShardedOptions) -> None:
        self.problem, self.shipped, self.options = problem, shipped, options
        self.num_devices = cluster.num_devices
        self.limit = limit_of(problem.profile.device, cluster)
        self.best: Found | None = None
        self.solved: dict[ShardSizes, dict[Switches, Found]] = defaultdict(dict)
        self.verdicts: list[ShardedVerdict] = []
        self.least_peak: int | None = None
        self.end = time.process_time() + options.time_limit_s
        self._heap: list[tuple[int, int, int, int, Entry]] = []
        self._count = itertools.count()
        self._fits = Fits(problem.host, self.limit, self._lowering)
        self._dived = False
        self._lost: list[int] = []
        """Bounds of entries whose search ended without a result and without a proof that none exists."""
        self._tried: dict[ShardSizes, str] = {}
        """Reason of the verdict for sizes where nothing fits."""

    @property
    def best_ns(self) -> int | None:
        """Return the step time of the best configuration."""
        return None if self.best is None else round(self.best.outcome.step.total_us * 1000)

    @property
    def target_ns(self) -> int | None:
        """Return the step time that an entry's bound must undercut to be searched."""
        return None if self.best_ns is None else round(self.best_ns * (1 - self.options.gap))

    @property
    def bound_ns(self) -> int:
        solved = (found.bound_ns for row in self.solved.values() for found in row.values())
        bounds = (*solved, *self._lost, *(entry[0] for entry in self._heap[:1]))
        return min((*bounds, *(() if self.best_ns is None else (self.best_ns,))), default=0)

    def run(self, *, offload_optimizer: bool = False) -> None:
        """Refine entries until none can be faster than the best by the requested gap, or time ends."""
        self._add_sizes()
        while self._heap:
            target = self.target_ns
            if target is not None and self._heap[0][0] >= target:
                break
            left = self.end - time.process_time()
            if target is not None and left < 0:
                self._solve_one()
                break
            if left < self.options.time_limit_s / 2 and not self._dived:
                self._dived = True  # a first plan exists, even if time ends now
                self._solve_one()
                continue
            bound, *_, entry = heapq.heappop(self._heap)
            if entry.rough:
                self._open_sizes(entry.sizes, offload_optimizer=offload_optimizer)
            elif entry.switches is None:
                self._open_switches(entry.sizes, bound, offload_optimizer=offload_optimizer)
            elif not entry.chained and entry.search is None:
                self._open_chain(entry.sizes, entry.switches, bound)
            elif entry.search is None:
                self._open_path(entry.sizes, entry.switches, bound)
            else:
                self._solve(entry, bound)
        self._conclude()

    def _push(self, bound: int, entry: Entry) -> None:
        order = entry.sizes.accumulation, -entry.sizes.fully_shard_size
        heapq.heappush(self._heap, (bound, *order, next(self._count), entry))

    def _lowering(self, sizes: ShardSizes, switches: Switches) -> Lowering:
        return lowering_of(self.problem, decided(self.shipped, self.problem, sizes, switches))

    def _add_sizes(self) -> None:
        """Add all sizes with bounds that need no units."""
        for sizes in sizes_of(self.problem, self.num_devices, self.shipped.sizes.global_batch_size):
            try:
                self._tried[sizes] = ""
                self._push(size_bound_ns(self.problem, sizes), Entry(sizes, rough=True))
            except Unmeasured as reason:
                self._leave_unmeasured(sizes, reason)

    def _leave_unmeasured(self, sizes: ShardSizes, reason: Unmeasured) -> None:
        del self._tried[sizes]
        self.verdicts.append(ShardedVerdict(sizes=sizes, outcome="unmeasured", reason=str(reason)))

    def _open_sizes(self, sizes: ShardSizes, *, offload_optimizer: bool) -> None:
        """Add sizes again with the lowest bound of their switches, if their states fit."""
        bounds = []
        try:
            rows = switches_of(self.problem, sizes, offload_optimizer=offload_optimizer)
            for switches in lowest_of(rows):
                lowering = self._lowering(sizes, switches)
                bounds.append(step_bound_ns(lowering, self.limit))
        except Unmeasured as reason:
            self._leave_unmeasured(sizes, reason)
            return
        possible = [bound for bound in bounds if bound is not None]
        self._tried[sizes] = "nothing fits in memory" if possible else "states and least activations exceed the memory"
        if possible:
            self._push(min(possible), Entry(sizes))
        else:
            self._note_peak(lowering.static_bytes)

    def _open_switches(self, sizes: ShardSizes, bound: int, *, offload_optimizer: bool) -> None:
        """Add the switches of ``sizes`` with bounds from sums."""
        rows = switches_of(self.problem, sizes, offload_optimizer=offload_optimizer)
        for switches in rows:
            lowering = self._lowering(sizes, switches)
            divided = not switches.micro_batch_chunk or lowering.parts > 1
            lower = step_bound_ns(lowering, self.limit) if divided else None
            if lower is None:
                self._note_peak(lowering.static_bytes)
            else:
                self._push(max(bound, lower), Entry(sizes, switches))

    def _open_chain(self, sizes: ShardSizes, switches: Switches, bound: int) -> None:
        """Raise an entry's bound to that of its queues with every layer kept."""
        lower = chain_ns(self._lowering(sizes, switches), self.target_ns)
        self._push(max(bound, lower), Entry(sizes, switches, chained=True))

    def _open_path(self, sizes: ShardSizes, switches: Switches, bound: int) -> None:
        """Replace an entry's bound by that of its longest path with every layer kept; drop it if nothing fits."""
        if peak := self._fits.excess_peak(sizes, switches):
            self._note_peak(peak)
            return
        search = LayerSearch(self._lowering(sizes, switches), self.limit, QUICK)
        kept = search.run({})
        lower = search.path_bound_ns(kept)
        if lower is None:
            self._note_peak(kept.peak_bytes)
        else:
            self._push(max(bound, lower), Entry(sizes, switches, search, kept))

    def _solve_one(self) -> None:
        """Solve entries that have a bound from a path, the lowest of each choice of sizes, until one fits."""
        seen = set()
        for item in sorted(item for item in self._heap if item[-1].search is not None):
            if item[-1].sizes not in seen:
                seen.add(item[-1].sizes)
                self._heap.remove(item)
                self._solve(item[-1], item[0])
                if item[-1].sizes in self.solved:
                    break
        heapq.heapify(self._heap)

    def _solve(self, entry: Entry, bound: int) -> None:
        assert entry.search is not None and entry.switches is not None
        solved = entry.search.solve(self.target_ns, entry.kept)
        if solved is None:
            self._note_peak(entry.search.least_peak)
            if not entry.search.nothing_fits:
                self._lost.append(bound)
            return
        self._offer(entry.search.lowering, entry.switches, replace(solved, bound_ns=max(bound, solved.bound_ns)))

    def _note_peak(self, peak: int) -> None:
        self.least_peak = peak if self.least_peak is None else min(self.least_peak, peak)

    def outcome(self, lowering: Lowering, solved: Solved) -> ShardedOutcome:
        rows = policies_by_pattern(self.problem, solved.policies | lowering.forced)
        chosen = replace(lowering.decisions, policies=rows)
        return outcome_of(lowering, chosen, solved.replayed, self.limit, chosen.sizes.label())

    def take(self, found: Found) -> None:
        """Make ``found`` the best if it is faster."""
        if self.best is None or found.outcome.step.total_us < self.best.outcome.step.total_us:
            self.best = found

    def _offer(self, lowering: Lowering, switches: Switches, solved: Solved) -> None:
        outcome = self.outcome(lowering, solved)
        self.solved[lowering.sizes][switches] = Found(outcome.decisions, outcome, solved.bound_ns)
        self.take(self.solved[lowering.sizes][switches])

    def offer_shipped(self) -> None:
        """Make the shipped configuration the best so far if it fits."""
        try:
            outcome = priced(self.problem, self.shipped, self.limit, "shipped")
        except Unmeasured:
            return
        if outcome.feasible and self.shipped.sizes.num_devices == self.num_devices:
            self.take(Found(self.shipped, outcome, 0))

    def polish(self) -> int:
        """Solve the quickly solved entries again, thoroughly, and return a lower bound of all plans.

        The best comes first, then those with the lowest bounds, until the gap is closed or the polishing time ends.
        """
        assert self.best is not None
        end, done = max(self.end, time.process_time() + _POLISH_S), set[tuple[ShardSizes, Switches]]()
        while time.process_time() < end:
            rows = [(sizes, *item) for sizes, row in self.solved.items() for item in row.items()]
            waiting = [
                (found is not self.best, found.bound_ns, sizes, switches)
                for sizes, switches, found in rows
                if (sizes, switches) not in done and found.decisions.policies and found.bound_ns < (self.target_ns or 0)
            ]
            if not waiting:
                break
            _, bound, sizes, switches = min(waiting, key=lambda item: item[:2])
            done.add((sizes, switches))
            lowering, before = self._lowering(sizes, switches), self.solved[sizes][switches]
            solved = LayerSearch(lowering, self.limit, replace(THOROUGH, total_s=3.0, alike=True)).solve()
            if solved is not None:
                self._offer(lowering, switches, replace(solved, bound_ns=max(bound, solved.bound_ns)))
                after = self.solved[sizes][switches]
                if before.outcome.step.total_us < after.outcome.step.total_us:
                    self.solved[sizes][switches] = replace(before, bound_ns=after.bound_ns)
        return self.bound_ns

    def enlarge_chunks(self) -> None:
        """Use an unchunked loss, or the largest chunks that fit, where that is no slower than the smallest chunks."""
        assert self.best is not None
        chosen, step = self.best.decisions, self.best.outcome.step.total_us
        larger = (size for size in sorted(self.problem.host.loss_chunks, reverse=True) if size > chosen.loss_chunk)
        for size in (0, *larger) if chosen.loss_chunk else ():
            outcome = priced(self.problem, replace(chosen, loss_chunk=size), self.limit, self.best.outcome.name)
            if outcome.feasible and outcome.step.total_us <= step:
                self.best = replace(self.best, decisions=outcome.decisions, outcome=outcome)
                return

    def _conclude(self) -> None:
        """Record the outcome of all sizes."""
        left: dict[ShardSizes, int] = {}
        for bound, *_, entry in self._heap:
            left[entry.sizes] = min(bound, left.get(entry.sizes, bound))
        for sizes, reason in self._tried.items():
            found, bounds = self.solved.get(sizes, {}), [left[sizes]] if sizes in left else []
            bounds += [one.bound_ns for one in found.values()]
            outcome, step = "memory", None
            if found:
                outcome, reason, step = "solved", "", min(one.outcome.step.total_us for one in found.values())
            elif sizes in left and self.target_ns is not None and left[sizes] >= self.target_ns:
                outcome, reason = "bounded", "no faster than the best, or by less than the requested gap"
            elif sizes in left:
                outcome, reason = "unsolved", "the time limit came first"
            lower = min(bounds, default=0) / 1000
            self.verdicts.append(
                ShardedVerdict(sizes=sizes, outcome=outcome, reason=reason, lower_bound_us=lower, step_us=step)
            )
