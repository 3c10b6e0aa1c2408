"""Order of a search: layouts that are settled quickly come first and provide the cutoff for later ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from mindspeed_autoparallel.cost.memory import state_bytes
from mindspeed_autoparallel.planner.best_first import Open
from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.layouts.bounds import expected_us, tail_bound_us
from mindspeed_autoparallel.planner.layouts.tasks import BOUND, IMPROVE, PROVE, SOLVE
from mindspeed_autoparallel.planner.layouts.virtual_layouts import takes_long
from mindspeed_autoparallel.profiles import BlockCost, RecomputeCost

QUICK = 0.25
"""Turns of chains are below this."""
LAST = 1.0
"""Turn of layouts that take long."""
FEW_OPERATIONS = 20_000
"""Forwards and backwards of a step; longer steps are simulated to prove the best plan, not to rank alternatives."""
WIDE_GAP = 0.1
"""Layouts whose bound is this share below the best plan have no time limit for virtual stages."""
PROVE_S = 10.0
"""Seconds per layout."""
LOOKS = (BOUND, IMPROVE, PROVE, SOLVE)
"""Tasks on a layout with virtual stages, in order, while it may hold the best plan; ``PROVE`` only if it takes long."""


def turn_of(candidate: Candidate, expected_us: float) -> float:
    """Return when a layout is processed, 0 to 1.

    Chains: 0. Layouts with virtual stages are bounded below 1/2, and below 1 a plan is searched, the most promising
    layout first. Layouts that take long: 1.
    """
    if candidate.layout.virtual_size > 1:
        return LAST / 2 * expected_us / (1 + expected_us)
    return 0.0 if candidate.profile.model.is_chain else LAST


def is_quick(candidate: Candidate, late: float) -> bool:
    """Return whether a layout whose turn is ``late`` is worth solving although it cannot be the best."""
    if late >= QUICK or candidate.layout.virtual_size > 1:
        return False
    return 2 * candidate.layout.pipeline_size * candidate.num_microbatches <= FEW_OPERATIONS


def likeliest_first(
    items: Sequence[Open[Candidate]], promises_us: Sequence[float], first: int
) -> list[Open[Candidate]]:
    """Return layouts in the order of their estimated step times, before those that take long.

    The ``first`` chains are solved at once, all others after everything is bounded.
    """
    early = [index for index, item in enumerate(items) if item.late < LAST]
    order = sorted(early, key=lambda index: promises_us[index])
    chains = [index for index in order if items[index].late < QUICK][:first]
    turns = {index: QUICK / 2 * place / len(items) for place, index in enumerate(order, start=1)}
    turns.update(dict.fromkeys(chains, 0.0))
    return [replace(item, late=turns.get(index, item.late)) for index, item in enumerate(items)]


class Looks:
    """The next task of each layout, and its time."""

    def __init__(self) -> None:
        self.many = False
        """Whether to bound all layouts before most are solved: of many layouts most do not fit, which takes
        milliseconds."""
        self.virtual_s = inf
        """Processor seconds after which slow layouts with virtual stages are left open."""
        self._virtual_spent = 0.0
        self._places: dict[str, int] = {}

    def kind(self, item: Open[Candidate]) -> str:
        """Return the kind of the next task, one of ``LOOKS``."""
        first = SOLVE if item.item.layout.virtual_size == 1 and not self.many else BOUND
        return LOOKS[self._places.get(item.item.layout.label(), LOOKS.index(first))]

    def advance(self, item: Open[Candidate]) -> None:
        """Advance to the next task: a layout that does not take long is solved instead of bounded again."""
        following = LOOKS.index(self.kind(item)) + 1
        if item.item.layout.virtual_size == 1:
            following = LOOKS.index(SOLVE)
        elif LOOKS[following] == PROVE and not takes_long(item.item):
            following += 1
        self._places[item.item.layout.label()] = following

    def spent(self, item: Open[Candidate], processor_s: float) -> None:
        """Count the seconds of one task."""
        self._virtual_spent += processor_s if takes_long(item.item) else 0.0

    def seconds_left(self, item: Open[Candidate], best_us: float) -> float:
        """Return the seconds left for a layout, whose bound is near ``best_us`` or far below it."""
        wide = item.bound_us < best_us * (1 - WIDE_GAP)
        return inf if wide or not takes_long(item.item) else self.virtual_s - self._virtual_spent

    def seconds(self, item: Open[Candidate], best_us: float) -> float:
        """Return the seconds of the next task."""
        left = self.seconds_left(item, best_us)
        return {PROVE: min(PROVE_S, left), SOLVE: left}.get(self.kind(item), inf)

    def later(self, item: Open[Candidate], bound_us: float) -> Open[Candidate]:
        """Return a layout after a task, with the turn of the next one."""
        look, late = self.kind(item), item.late
        if item.item.layout.virtual_size == 1 or (self.many and look == IMPROVE):
            # A plan is searched next; many layouts are ordered by their estimated step times.
            return replace(item, bound_us=bound_us, late=late + QUICK / 2 if late else 0.0)
        improving = LAST / 2 + max(late, turn_of(item.item, bound_us))
        return replace(item, late={PROVE: LAST, SOLVE: 2 * LAST}.get(look, improving), bound_us=bound_us)


_LATER_RANKS = 0.6
"""Share of the first rank's recompute in a balanced split: later ranks hold fewer microbatches."""


def promise_us(candidate: Candidate) -> float:
    """Return an estimated step time in microseconds, infinite if the first rank of an even split never fits.

    It is the sum of the pipeline, the recompute that this rank needs, gradient reduction and optimizer.
    """
    profile, layout = candidate.profile, candidate.layout
    size, count = layout.pipeline_size, candidate.num_microbatches
    in_flight: float = min(size, count)
    if layout.virtual_size > 1:
        in_flight = min(count, size + (size - 1) / layout.virtual_size)
    static = kept = least = again_us = 0.0
    highest = 0
    for module in profile.model.modules:
        cost = candidate.measurement.modules[module.name]
        for layer, number in cost.runs(0, module.num_layers):
            plain, whole = layer.recompute["none"], _least_kept(layer)
            static += number * state_bytes(layer, layout) / size
            kept += number * plain.saved_bytes * in_flight / size
            least += number * whole.saved_bytes * in_flight / size
            again_us += number * whole.extra_backward_us * count / size
            highest = max(highest, plain.backward_peak_bytes)
        ends = [state_bytes(block, layout) for block in (cost.pre, cost.post)]
        static += sum(ends) if size == 1 else max(ends)
    left = candidate.limit_bytes - profile.overhead_bytes(candidate.measurement) - static - highest
    if least > left:
        return inf
    share = min(1.0, max(0.0, (kept - left) / (kept - least))) if kept > least else 0.0
    recompute_us = again_us * share * (1.0 if size == 1 else _LATER_RANKS)
    return expected_us(candidate) + recompute_us + tail_bound_us(candidate)


def _least_kept(layer: BlockCost) -> RecomputeCost:
    return min(layer.recompute.values(), key=lambda cost: cost.saved_bytes)
