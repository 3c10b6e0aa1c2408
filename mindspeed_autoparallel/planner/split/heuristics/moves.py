"""Local search for chains: a layer moves from one stage to another by shifting all boundaries between them.

All moves are bounded by the known cuts at once and the best is simulated. If it is not faster, its critical path
becomes a cut that excludes it.
"""

from __future__ import annotations

import time

import numpy

from mindspeed_autoparallel.planner.split.bounds.relaxation import cut_of
from mindspeed_autoparallel.planner.split.model.cuts import Cut
from mindspeed_autoparallel.planner.split.model.problem import SplitProblem
from mindspeed_autoparallel.planner.split.model.ranges import NEVER, Array, Chain
from mindspeed_autoparallel.planner.split.settings import SETTINGS


def improve(
    problem: SplitProblem, chain: Chain, ends: list[int], cuts: dict[Cut, None], deadline: float
) -> tuple[list[int], int]:
    """Return a plan (layers placed up to each stage) that the search cannot improve, and its step time.

    Adds the critical paths of simulated plans to ``cuts``.
    """
    cut, length = cut_of(problem, chain.placement(ends))
    cuts[cut] = None
    step, failed = int(length), 0
    while failed < SETTINGS.chain_moves_most_tried and time.monotonic() < deadline:
        moved, value = _best_move(chain, ends, cuts)
        if value >= step:
            break
        cut, length = cut_of(problem, chain.placement(moved))
        if length < step:
            ends, step, failed = moved, int(length), 0
        elif cut in cuts:
            break
        else:
            failed += 1
        cuts[cut] = None
    return ends, step


def _best_move(chain: Chain, ends: list[int], cuts: dict[Cut, None]) -> tuple[list[int], int]:
    num = len(ends)
    starts = [0, *ends[:-1]]
    forwards: Array = numpy.array([cut.forwards for cut in cuts], dtype=numpy.int64).T
    backwards: Array = numpy.array([cut.backwards for cut in cuts], dtype=numpy.int64).T
    tails: Array = numpy.array([cut.tail_stage for cut in cuts]) == numpy.arange(num)[:, None]
    base: Array = numpy.array([cut.constant for cut in cuts], dtype=numpy.int64)

    def cost(shift_start: int, shift_end: int) -> Array:
        """Return each stage's part of every cut, ``[stage, cut]``, with shifted boundaries."""
        times = [chain.times(s, starts[s] + shift_start, ends[s] + shift_end) for s in range(num)]
        impossible = numpy.array([item is None for item in times])
        known = numpy.array([item or (0, 0, 0) for item in times], dtype=numpy.int64)
        value = forwards * known[:, :1] + backwards * known[:, 1:2] + tails * known[:, 2:]
        value[impossible] = NEVER // num
        return value

    here = cost(0, 0)
    total = base + here.sum(axis=0)
    best, found = NEVER, ends
    for shift in (-1, 1):
        last, first = cost(0, shift) - here, cost(shift, 0) - here
        between = numpy.cumsum(cost(shift, shift) - here, axis=0)
        # A move between stages i and j > i shifts boundaries i to j - 1.
        value = total + last[:, None, :] + (first + numpy.roll(between, 1, axis=0))[None, :, :] - between[:, None, :]
        worst = value.max(axis=2)
        worst[numpy.tril_indices(num)] = NEVER
        i, j = numpy.unravel_index(int(worst.argmin()), worst.shape)
        if worst[i, j] < best:
            best = int(worst[i, j])
            found = [end + shift * int(i <= s < j) for s, end in enumerate(ends)]
    return found, best
