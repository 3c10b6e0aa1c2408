"""Short interleaved pipelines of one module, exactly: every split and every way to recompute, by the exact peak.

The rows of the split problem know a peak from one side only. Where few splits are possible they are all timed with
nothing recomputed, which no recomputation makes faster; those that may still win are tried in every way that fits.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import comb, inf

from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.evaluate import Evaluation, evaluate
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.planner.problem_building import module_placement
from mindspeed_autoparallel.planner.rank_memory import fits_rank
from mindspeed_autoparallel.planner.split import SplitProblem
from mindspeed_autoparallel.planner.split.model.layer_row import LayerRow, all_cuts, fits_a_row, is_one_row
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Cluster
from mindspeed_autoparallel.spec.recompute import in_order

MOST_EVENTS_OF_CUTS = 100_000
"""Forwards and backwards of all cuts of a row that are examined one by one."""
MOST_WAYS = 2_000
"""Ways to recompute the layers of one rank that are looked at."""
Counts = tuple[int, ...]
"""Recomputed layers of one virtual stage, kind by kind."""


@dataclass(frozen=True, kw_only=True)
class ShortRow:
    """What all cuts of a short row say."""

    plain_us: float
    """Step of the fastest cut with nothing recomputed and whatever it needs: a bound."""
    best: tuple[ModulePlacement, Evaluation] | None = None
    """The fastest plan that fits and takes less than the one known."""
    complete: bool = False
    """Proved: no other plan that fits takes less."""


def search_short_row(
    profile: Profile,
    cluster: Cluster,
    candidate: Candidate,
    global_batch_size: int,
    problem: SplitProblem,
    deadline: float,
    known_us: float = inf,
) -> ShortRow | None:
    """Look at every cut of a short row; ``None``: there are too many, they are no cuts of a row, time is up, or
    reductions hide behind backwards, so that recomputation may save time.

    ``known_us``: step of a plan that fits.
    """
    layout, row = candidate.layout, LayerRow(problem)
    hides = layout.overlap_gradient_reduce or layout.bucket_elements or layout.paired
    operations = 2 * layout.num_virtual_stages * candidate.num_microbatches
    ways = comb(row.num_layers - 1, layout.num_virtual_stages - 1)
    if hides or not (fits_a_row(problem) and is_one_row(problem)) or ways * operations > MOST_EVENTS_OF_CUTS:
        return None
    plain: list[tuple[float, ModulePlacement]] = []
    for held in row.held(all_cuts(row.num_layers, layout.num_virtual_stages, 1)).tolist():
        if time.monotonic() > deadline:
            return None
        rows = tuple(
            tuple(count if q == 0 else (0,) * len(count) for q in range(len(segment.kinds)))
            for segment, count in zip(problem.segments, zip(*held, strict=True), strict=True)
        )
        placement = module_placement(profile, candidate.measurement, rows)
        found = evaluate(profile, cluster, layout, placement, global_batch_size, with_timeline=False)
        plain.append((found.step.total_us, placement))
    plain.sort(key=lambda item: item[0])
    search = _Ways(profile, cluster, candidate)
    best: tuple[ModulePlacement, Evaluation] | None = None
    complete = search.complete
    for step_us, placement in plain if complete else ():
        if step_us >= known_us or not complete:
            break
        for changed in search.ways(placement):
            if time.monotonic() > deadline:
                complete = False
                break
            found = evaluate(profile, cluster, layout, changed, global_batch_size, with_timeline=False)
            if found.fits and found.step.total_us < known_us:
                best, known_us = (changed, found), found.step.total_us
        complete &= search.complete
    return ShortRow(plain_us=plain[0][0], best=best, complete=complete)


class _Ways:
    """Ways to recompute that fit, of all ranks of a placement; remembers those of a rank by what its chunks hold."""

    def __init__(self, profile: Profile, cluster: Cluster, candidate: Candidate) -> None:
        self.profile, self.cluster, self.candidate = profile, cluster, candidate
        module = profile.model.modules[0]
        cost = candidate.measurement.modules[module.name]
        self.name, self.kinds = module.name, in_order(kind for kind in cost.layer.recompute if kind != "none")
        self.costs = [layer for layer, count in cost.runs(0, module.num_layers) for _ in range(count)]
        self.alike = len(cost.runs(0, module.num_layers)) == 1
        self.complete = len(profile.model.modules) == 1
        self._known: dict[tuple[int, Counts, Counts], list[tuple[Counts, ...]]] = {}

    def ways(self, placement: ModulePlacement) -> Iterator[ModulePlacement]:
        """Yield the placement with every combination of its ranks' ways."""
        size, layers = self.candidate.layout.pipeline_size, placement.layers[self.name]
        by_rank = []
        for rank in range(size):
            # Layers of one kind are known by their numbers, others by their places.
            starts = tuple(sum(layers[:v]) for v in range(rank, len(layers), size))
            key = rank, layers[rank::size], () if self.alike else starts
            if key not in self._known:
                self._known[key] = self._of_rank(rank, placement)
            by_rank.append(self._known[key])
        for chosen in itertools.product(*by_rank):
            rows = [chosen[v % size][v // size] for v in range(len(layers))]
            yield self._with(placement, rows)

    def _of_rank(self, rank: int, placement: ModulePlacement) -> list[tuple[Counts, ...]]:
        """Return ways of one rank that fit, by chunk, as far as none is slower in no chunk."""
        layout = self.candidate.layout
        layers = placement.layers[self.name]
        held = layers[rank :: layout.pipeline_size]
        starts = [sum(layers[:v]) for v in range(rank, len(layers), layout.pipeline_size)]
        of_chunks = [
            [way for way in itertools.product(range(n + 1), repeat=len(self.kinds)) if sum(way) <= n] for n in held
        ]
        every = list(itertools.product(*of_chunks))
        if len(every) > MOST_WAYS:
            self.complete = False
            return []
        every.sort(key=lambda way: (sum(self._extra(starts, way)), way))
        found: list[tuple[Counts, ...]] = []
        extras: list[tuple[float, ...]] = []
        for way in every:
            extra = self._extra(starts, way)
            if any(all(a <= b for a, b in zip(other, extra, strict=True)) for other in extras):
                continue
            rows: list[Counts] = [(0,) * len(self.kinds)] * len(layers)
            rows[rank :: layout.pipeline_size] = way
            changed = self._with(placement, rows)
            if fits_rank(self.profile, self.cluster, layout, changed, self.candidate.num_microbatches, rank):
                found.append(way)
                extras.append(extra)
        return found

    def _extra(self, starts: list[int], way: tuple[Counts, ...]) -> tuple[float, ...]:
        """Return what recomputation adds to the backward of every chunk: that of its first layers, kind by kind."""
        added = []
        for start, counts in zip(starts, way, strict=True):
            kinds = [kind for kind, count in zip(self.kinds, counts, strict=True) for _ in range(count)]
            layers = self.costs[start : start + len(kinds)]
            again = (layer.recompute[kind].extra_backward_us for layer, kind in zip(layers, kinds, strict=True))
            added.append(sum(again))
        return tuple(added)

    def _with(self, placement: ModulePlacement, rows: list[Counts]) -> ModulePlacement:
        kinds = {kind: tuple(counts[q] for counts in rows) for q, kind in enumerate(self.kinds)}
        return replace(placement, recompute={self.name: kinds})
