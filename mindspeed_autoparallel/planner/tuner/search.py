"""Best-first search by a proved bound, with simulated schedule and exact peak of every rank."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.planner.best_first import Open, Proof, Search, best_first
from mindspeed_autoparallel.planner.tuner.candidates import Configuration, Dimensions, Space
from mindspeed_autoparallel.planner.tuner.placements import SolvedConfiguration, improved, order_of, solve

_REACH = 1.25
"""Ratio to the last recommendation above which a configuration is not improved: moving layers gains less."""
_NUM_IMPROVED = 4
"""Configurations whose split is improved, per recommendation."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The best configurations, fastest first, and the record of the search."""

    top: tuple[SolvedConfiguration, ...]
    num_legal: int
    num_solved: int
    num_bounded: int
    """Discarded because no placement of them can beat the last of ``top``."""
    num_out_of_memory: int
    proof: Proof
    """Of the first of ``top``: exact without pipelines, else by the proved bound."""


class _ConfigurationSearch(Search[Configuration]):
    """Solve configurations as far as they may be among the ``count`` fastest below ``limit_us``."""

    def __init__(self, dimensions: Dimensions, count: int, limit_us: float) -> None:
        self.best: dict[tuple[object, ...], SolvedConfiguration] = {}
        """The best switches of each configuration."""
        self.lower_bound_us = math.inf
        self.num_solved = self.num_bounded = self.num_out_of_memory = 0
        self.tightest: tuple[int, str] | None = None
        self._dimensions, self._count, self._limit_us = dimensions, count, limit_us

    @property
    def best_us(self) -> float:
        """Return the step time of the fastest configuration known."""
        return min((found.step_us for found in self.best.values()), default=math.inf)

    def cutoff_us(self) -> float:
        """Return the step time of the last requested configuration, or the limit."""
        leaders = sorted(found.step_us for found in self.best.values())
        return min(self._limit_us, leaders[self._count - 1] if len(leaders) >= self._count else math.inf)

    def discard(self, item: Open[Configuration]) -> None:
        """Count a configuration that cannot be among the fastest."""
        self.num_bounded += 1
        self.lower_bound_us = min(self.lower_bound_us, item.bound_us)

    def expand(self, group: Sequence[Open[Configuration]], cutoff_us: float) -> list[Open[Configuration]]:
        """Find the best placement of every configuration of the group."""
        for item in group:
            found, missing = solve(item.item, self._dimensions, cutoff_us)
            if self._dimensions.uneven_stages and item.item.layout.pipeline_size > 1:
                # Not all of its splits were tried.
                self.lower_bound_us = min(self.lower_bound_us, item.bound_us)
            elif found is not None:
                self.lower_bound_us = min(self.lower_bound_us, found.step_us)
            self._take(item.item, found, missing)
        return []

    def _take(
        self, configuration: Configuration, found: SolvedConfiguration | None, missing: tuple[int, str] | None
    ) -> None:
        if found is None and missing is None:
            self.num_bounded += 1
            return
        self.num_solved += 1
        if found is None:
            self.num_out_of_memory += 1
            if missing is not None and (self.tightest is None or missing[0] < self.tightest[0]):
                self.tightest = missing
            return
        held = self.best.get(configuration.key)
        if held is None or order_of(found) < order_of(held):
            self.best[configuration.key] = found


def search(space: Space, dimensions: Dimensions, count: int = 3, limit_us: float = math.inf) -> Outcome:
    """Return the ``count`` fastest configurations that fit and differ in more than switches, below ``limit_us``.

    Raises ``InfeasiblePlan`` with the layout that needs least memory if none fits, ``ConfigError`` if none is legal.
    """
    started = time.monotonic()
    if not space.configurations:
        rules = "; ".join(f"{number}: {rule}" for rule, number in space.left_out.most_common(3))
        raise ConfigError(f"no layout of {space.num_devices} devices is legal ({rules or 'none was traced'}).")
    running = _ConfigurationSearch(dimensions, count, limit_us)
    items = [Open(False, item.bound_us, order, item) for order, item in enumerate(space.configurations)]
    best_first(running, items)
    if not running.best and limit_us == math.inf:
        tightest = running.tightest[1] if running.tightest else "none could be evaluated."
        raise InfeasiblePlan(
            f"none of {len(space.configurations)} layouts fits. The one that needs least memory: {tightest} "
            "Use more ranks, a smaller --micro-batch-size, or devices with more memory."
        )
    top = _fastest(list(running.best.values()), dimensions, count)
    step_us = top[0].step_us if top else math.inf
    return Outcome(
        top=top,
        num_legal=len(space.configurations),
        num_solved=running.num_solved,
        num_bounded=running.num_bounded,
        num_out_of_memory=running.num_out_of_memory,
        proof=Proof(
            step_us=step_us, lower_bound_us=min(running.lower_bound_us, step_us), seconds=time.monotonic() - started
        ),
    )


def _fastest(found: list[SolvedConfiguration], dimensions: Dimensions, count: int) -> tuple[SolvedConfiguration, ...]:
    """Return the ``count`` fastest after improving the splits of those that may be among them."""
    if not found:
        return ()
    leading = sorted(found, key=order_of)
    reach = _REACH * leading[min(count, len(leading)) - 1].step_us
    near = [item for item in leading if item.step_us < reach][: count * _NUM_IMPROVED]
    if dimensions.uneven_stages:
        near = [improved(item, dimensions) for item in near]
    return tuple(sorted(near, key=order_of)[:count])


def ranked(space: Space, dimensions: Dimensions, count: int) -> Outcome:
    """Return the ``count`` fastest, followed by the fastest without modelled switches if they include none.

    Raises ``InfeasiblePlan`` if nothing fits and ``ConfigError`` if nothing is legal.
    """
    plain = replace(space, configurations=[item for item in space.configurations if not item.variant.modelled])
    modelled = replace(space, configurations=[item for item in space.configurations if item.variant.modelled])
    if not modelled.configurations:
        return search(plain, dimensions, count)
    try:
        first = search(plain, dimensions, count)
    except InfeasiblePlan as shortage:
        try:
            return search(modelled, dimensions, count)
        except InfeasiblePlan:
            raise shortage from None
    slowest = first.top[count - 1].step_us if len(first.top) >= count else math.inf
    try:
        second = search(modelled, dimensions, count, slowest)
    except InfeasiblePlan:
        return first
    top = tuple(sorted((*first.top, *second.top), key=_order))
    return Outcome(
        top=top,
        num_legal=first.num_legal + second.num_legal,
        num_solved=first.num_solved + second.num_solved,
        num_bounded=first.num_bounded + second.num_bounded,
        num_out_of_memory=first.num_out_of_memory + second.num_out_of_memory,
        proof=Proof(
            step_us=top[0].step_us,
            lower_bound_us=min(first.proof.lower_bound_us, second.proof.lower_bound_us),
            seconds=first.proof.seconds + second.proof.seconds,
        ),
    )


def _order(found: SolvedConfiguration) -> tuple[float, bool, int]:
    return found.step_us, bool(found.configuration.variant.modelled), found.peak_bytes
