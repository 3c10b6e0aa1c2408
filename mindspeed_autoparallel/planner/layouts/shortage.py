"""The memory that is missing if no plan fits: the layout that needs least, and the smallest sufficient limit.

A layout's relaxed rows bound the limit from below; a plan that fits by the exact peak bounds it from above. Limits in
between are tried until the two meet to the MiB.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.evaluate import Evaluation
from mindspeed_autoparallel.planner.layouts.bounds import least_static_bytes
from mindspeed_autoparallel.planner.layouts.layout_solver import LayoutResult, simple_splits, solve_layout
from mindspeed_autoparallel.planner.layouts.options import SolveOptions
from mindspeed_autoparallel.planner.problem_building import build_problem
from mindspeed_autoparallel.planner.split import SplitProblem, StoppedEarly
from mindspeed_autoparallel.planner.split.analysis import least_excess
from mindspeed_autoparallel.planner.split.model.ranges import is_chain
from mindspeed_autoparallel.units import MIB, format_bytes

ENDLESS = 2**50
"""A limit in bytes above the need of any plan."""
EFFORT = 0.2
"""Effort for one limit in one layout."""
MOST_SECONDS = 30.0
MANY = 64
"""From this number of layouts on, they are ranked by an even share of their states alone, which needs no rows."""
FIRST = 6
"""Number of layouts whose simple splits are evaluated before anything is bounded."""


@dataclass(frozen=True, kw_only=True)
class Nearest:
    """The found plan that needs least memory, in bytes per device."""

    candidate: Candidate
    rank: int
    held: str
    """Layers of the fullest rank: ``text_decoder 18-27``."""
    peak_bytes: int
    """Peak of that rank."""
    least_bytes: int
    """Proved: none of the examined layouts has a plan below this; 0: nothing is proved."""

    def text(self, limit: int) -> str:
        """Return the sentence about it, for a memory limit of ``limit`` bytes."""
        enough = -(-self.peak_bytes // MIB)
        least = -(-self.least_bytes // MIB)
        known = ""
        if least >= enough:
            known = ", and no smaller one"
        elif self.least_bytes > limit:
            known = f", none below {least} MiB"
        return (
            f"Nearest is {self.candidate.layout.label()}: pipeline rank {self.rank} ({self.held}) is tightest: "
            f"{format_bytes(self.peak_bytes)}, {format_bytes(max(0, self.peak_bytes - limit))} too much, with as much "
            f"recomputation as helps. A memory limit of {enough} MiB per device is enough{known}"
        )


def nearest_plan(candidates: Sequence[Candidate], deadline: float) -> Nearest | None:
    """Return the plan of least memory among ``candidates`` that is found in time, or ``None``."""
    search = _Search(min(deadline, time.monotonic() + MOST_SECONDS))
    many = len(candidates) > MANY
    for candidate in candidates:
        search.least[candidate.layout.label()] = least_static_bytes(candidate) if many else search.even_share(candidate)

    def order(item: Candidate) -> tuple[int, int, str]:
        # Among equals, most stages and most sharding usually need least.
        layout = item.layout
        return search.least[layout.label()], -layout.pipeline_size * layout.tensor_size, layout.label()

    likely = sorted(candidates, key=order)
    for candidate in likely[:FIRST]:
        search.take_simple(candidate)
    for candidate in likely:
        search.look_into(candidate)
    return search.result()


class _Search:
    """The known plan of least memory, and the proved need of every layout."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.least: dict[str, int] = {}
        """Proved least bytes by layout."""
        self.best: tuple[Candidate, Evaluation] | None = None

    @property
    def peak_bytes(self) -> float:
        """Return the peak of the plan of least memory."""
        return inf if self.best is None else _peak(self.best[1])

    def even_share(self, candidate: Candidate) -> int:
        """Return the bytes that some device holds at least: an even share of all layers, each at its least."""
        problem, base = self._rows(candidate)
        total = sum(
            s.num_layers
            * min(
                kind.memory[v]
                + min(m[v // problem.num_stages] for m in problem.moments(v % problem.num_stages)) * kind.saved
                for kind in s.kinds
                for v in range(problem.num_virtual)
            )
            for s in problem.segments
        )
        # Room above the base that messages leave on the rank with most room.
        room = max(problem.memory_limit)
        return max(0, base - room + total // problem.num_stages)

    def look_into(self, candidate: Candidate) -> None:
        """Find a plan of the layout that needs less memory than all before, to the MiB."""
        label = candidate.layout.label()
        if self.least[label] >= self.peak_bytes:
            return
        self.least[label] = max(self.least[label], self._bound(candidate))
        if self.least[label] >= self.peak_bytes:
            return
        self.take_simple(candidate)
        low = max(0, -(-self.least[label] // MIB) - 1)
        proved, tried = low, low + 1
        while low + 1 < self.peak_bytes / MIB and time.monotonic() < self.deadline:
            found = self._solve(candidate, tried)
            if found.evaluation is not None:
                self._take(candidate, found.evaluation)
                tried = int((low + self.peak_bytes / MIB) // 2)
            else:
                proved = tried if found.proved_infeasible and proved == low else proved
                low = tried
                tried = int((low + self.peak_bytes / MIB) // 2) if self.best is not None else 2 * low
            tried = max(tried, low + 1)
            if self.best is None and low > ENDLESS // MIB:
                break
        self.least[label] = max(self.least[label], proved * MIB + 1 if proved else 0)

    def result(self) -> Nearest | None:
        """Return the plan of least memory, with the proved bound of all layouts."""
        if self.best is None:
            return None
        candidate, found = self.best
        rank = max(found.memory, key=lambda item: item.peak_bytes)
        held = [
            f"{name} {stage.first_layer[name]}-{stage.first_layer[name] + count - 1}"
            for stage in found.stages
            if stage.pipeline_rank == rank.pipeline_rank
            for name, count in stage.layers.items()
            if count
        ]
        return Nearest(
            candidate=candidate,
            rank=rank.pipeline_rank,
            held=", ".join(held),
            peak_bytes=rank.peak_bytes,
            least_bytes=min(rank.peak_bytes, *self.least.values()),
        )

    def take_simple(self, candidate: Candidate) -> None:
        """Evaluate the layout's simple splits, with all useful recomputation."""
        if time.monotonic() > self.deadline and self.best is not None:
            return
        limited = _limited(candidate, max(MIB, self.least[candidate.layout.label()]))
        for simple in simple_splits(limited).values():
            self._take(candidate, simple)

    def _rows(self, candidate: Candidate) -> tuple[SplitProblem, int]:
        """Return the relaxed rows of the layout, and the limit that they assume: the runtime's own bytes, since rows
        cannot have negative room."""
        base = candidate.profile.overhead_bytes(candidate.measurement)
        limits = (base,) * candidate.layout.pipeline_size
        return build_problem(candidate, limits, safe=False), base

    def _bound(self, candidate: Candidate) -> int:
        """Return the bytes per device below which the layout has no plan; 0 when time is up."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            return 0
        problem, base = self._rows(candidate)
        resolution = 1 if is_chain(problem) else MIB
        try:
            return max(0, base + least_excess(problem, resolution=resolution, time_limit_s=left) - resolution + 1)
        except StoppedEarly:
            return 0

    def _solve(self, candidate: Candidate, limit_mib: int) -> LayoutResult:
        options = SolveOptions(time_limit_s=max(0.1, self.deadline - time.monotonic()), effort=EFFORT)
        return solve_layout(_limited(candidate, limit_mib * MIB), options)

    def _take(self, candidate: Candidate, found: Evaluation) -> None:
        if _peak(found) < self.peak_bytes:
            self.best = candidate, found


def _limited(candidate: Candidate, limit_bytes: int) -> Candidate:
    return replace(candidate, cluster=replace(candidate.cluster, memory_limit_bytes=limit_bytes))


def _peak(found: Evaluation) -> int:
    return max(rank.peak_bytes for rank in found.memory)
