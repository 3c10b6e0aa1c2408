"""Exact search of pipelines with few layers: every split and every recompute policy, by the exact peak.

The rows of the split problem bound a peak from one side only. If few splits are possible, all are timed with nothing
recomputed, which recomputation never makes faster; those that may still win are tried with every recompute policy that
fits.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.evaluate import Evaluation, evaluated
from mindspeed_autoparallel.planner.layouts.bounds import tied_us_of
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.planner.problem_building import module_placement
from mindspeed_autoparallel.planner.rank_memory import fits_rank
from mindspeed_autoparallel.planner.split import SplitProblem
from mindspeed_autoparallel.planner.split.strategies.enumeration import every_split, plain_steps
from mindspeed_autoparallel.planner.stage_times import NS_PER_US
from mindspeed_autoparallel.spec.recompute import in_order

MOST_EVENTS_OF_CUTS = 500_000
"""Forwards and backwards of all splits that are examined one by one, at most."""
MOST_WAYS = 2_000
"""Number of recompute choices of one rank that are tried, at most."""
Counts = tuple[int, ...]
"""Recomputed layers of one module on one virtual stage, by kind."""
Way = tuple[Counts, ...]
"""Recompute choice of one virtual stage, by module."""


@dataclass(frozen=True, kw_only=True)
class ShortRow:
    """Result of trying all splits."""

    plain_us: float
    """Bound: step of the fastest split with nothing recomputed, regardless of its memory, or of the known plan."""
    best: Evaluation | None = None
    """The fastest plan that fits and is faster than the known one."""
    complete: bool = False
    """Proved: no other plan that fits is faster."""


def search_short_row(
    candidate: Candidate, problem: SplitProblem, deadline: float, known_us: float = inf
) -> ShortRow | None:
    """Try every split.

    ``None`` if there are too many, time is up, or reductions overlap backwards, so that recomputation may save time.
    ``known_us``: step of a plan that fits.
    """
    layout = candidate.layout
    hides = layout.overlap_gradient_reduce or layout.paired
    operations = 2 * layout.num_virtual_stages * candidate.num_microbatches
    splits = None if hides else every_split(problem, MOST_EVENTS_OF_CUTS // operations)
    if splits is None:
        return None
    may_win = plain_steps(problem, splits) / NS_PER_US + tied_us_of(candidate) < known_us
    plain: list[tuple[float, ModulePlacement]] = []  # whole evaluations of thousands of splits would take memory
    for held in splits[may_win].tolist():
        if time.monotonic() > deadline:
            return None
        rows = tuple(
            tuple(count if q == 0 else (0,) * len(count) for q in range(len(segment.kinds)))
            for segment, count in zip(problem.segments, zip(*held, strict=True), strict=True)
        )
        found = evaluated(candidate, module_placement(candidate, rows))
        plain.append((found.step_us, found.placement))
    plain.sort(key=lambda item: item[0])
    plain_us = plain[0][0] if plain else known_us
    search = _Ways(candidate, deadline)
    best: Evaluation | None = None
    complete = search.complete
    for step_us, placement in plain if complete else ():
        if step_us >= known_us or not complete:
            break
        for changed in search.ways(placement):
            if time.monotonic() > deadline:
                complete = False
                break
            found = evaluated(candidate, changed)
            if found.fits and found.step_us < known_us:
                best, known_us = found, found.step_us
        complete &= search.complete
    return ShortRow(plain_us=plain_us, best=best, complete=complete)


class _Ways:
    """Recompute choices that fit, for all ranks of a placement; those of a rank are cached by what its chunks hold."""

    def __init__(self, candidate: Candidate, deadline: float) -> None:
        self.candidate, self.deadline, modules = candidate, deadline, candidate.profile.model.modules
        self.names = [module.name for module in modules]
        measured = [candidate.measurement.modules[name] for name in self.names]
        self.kinds = [in_order(kind for kind in cost.layer.recompute if kind != "none") for cost in measured]
        runs = [cost.runs(0, m.num_layers) for cost, m in zip(measured, modules, strict=True)]
        self.costs = [[layer for layer, count in row for _ in range(count)] for row in runs]
        self.alike = len(runs) == 1 and len(runs[0]) == 1
        self.complete = len(self.names) == 1 or all(cost.prediction is None for cost in measured)
        self._known: dict[tuple[object, ...], list[tuple[Way, ...]]] = {}

    def ways(self, placement: ModulePlacement) -> Iterator[ModulePlacement]:
        """Yield the placement with every combination of its ranks' recompute choices."""
        size = self.candidate.layout.pipeline_size
        num = self.candidate.layout.num_virtual_stages
        by_rank = []
        for rank in range(size):
            stages = range(rank, num, size)
            held = tuple(tuple(placement.layers[name][v] for name in self.names) for v in stages)
            starts = tuple(tuple(sum(placement.layers[name][:v]) for name in self.names) for v in stages)
            # Layers of one kind are identified by their number, others by their places.
            key = rank, held, () if self.alike else starts
            if key not in self._known:
                self._known[key] = self._of_rank(rank, placement, held, starts)
            by_rank.append(self._known[key])
        for chosen in itertools.product(*by_rank):
            yield self._with(placement, [chosen[v % size][v // size] for v in range(num)])

    def _of_rank(
        self, rank: int, placement: ModulePlacement, held: Sequence[Counts], starts: Sequence[Counts]
    ) -> list[tuple[Way, ...]]:
        """Return the choices of one rank that fit, by chunk, without those that another equals or beats in every chunk.

        ``held``, ``starts``: by chunk, then by module.
        """
        layout = self.candidate.layout
        every = list(itertools.islice(itertools.product(*map(self._of_stage, held)), MOST_WAYS + 1))
        if len(every) > MOST_WAYS:
            self.complete = False
            return []
        every.sort(key=lambda way: (sum(self._extra(starts, way)), way))
        found: list[tuple[Way, ...]] = []
        extras: list[tuple[float, ...]] = []
        nothing = tuple((0,) * len(kinds) for kinds in self.kinds)
        for way in every:
            if time.monotonic() > self.deadline:
                self.complete = False
                break
            extra = self._extra(starts, way)
            if any(all(a <= b for a, b in zip(other, extra, strict=True)) for other in extras):
                continue
            rows: list[Way] = [nothing] * layout.num_virtual_stages
            rows[rank :: layout.pipeline_size] = way
            changed = self._with(placement, rows)
            if fits_rank(self.candidate, changed, rank):
                found.append(way)
                extras.append(extra)
        return found

    def _of_stage(self, held: Counts) -> list[Way]:
        """Return every choice of one virtual stage that holds ``held`` layers of each module."""
        of_modules = [
            [way for way in itertools.product(range(n + 1), repeat=len(kinds)) if sum(way) <= n]
            for n, kinds in zip(held, self.kinds, strict=True)
        ]
        return list(itertools.product(*of_modules))

    def _extra(self, starts: Sequence[Counts], ways: Sequence[Way]) -> tuple[float, ...]:
        """Return the time that recomputation adds to the backward of every chunk: that of its first layers, by kind."""
        added = []
        for chunk_starts, way in zip(starts, ways, strict=True):
            again = 0.0
            for start, counts, kinds, costs in zip(chunk_starts, way, self.kinds, self.costs, strict=True):
                chosen = [kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]
                layers = costs[start : start + len(chosen)]
                pairs = zip(layers, chosen, strict=True)
                again += sum(layer.recompute[kind].extra_backward_us for layer, kind in pairs)
            added.append(again)
        return tuple(added)

    def _with(self, placement: ModulePlacement, rows: Sequence[Way]) -> ModulePlacement:
        recompute = {
            name: {kind: tuple(way[m][q] for way in rows) for q, kind in enumerate(self.kinds[m])}
            for m, name in enumerate(self.names)
        }
        return replace(placement, recompute=recompute)
