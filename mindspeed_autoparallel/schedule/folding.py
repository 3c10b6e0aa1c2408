"""Replay a step of very many equal microbatches from a shorter one, because its middle part repeats.

The event graph of a short step is cut twice, ``period`` nodes apart, where all stages are past their warm-up and before
their last rounds. A longer step is the short one with the nodes between the cuts repeated. Two facts make its time
exact, and where either fails the whole step is replayed:

- every event that is waited for across the second cut ends at most ``growth`` later than its twin at the first. A
  replay that starts from later events ends at most as much later, so no repetition adds more than ``growth``;
- the critical path, and the longest path to every stage's last pass, cross both cuts at twin events that are
  ``growth`` apart. A longer step has paths that repeat the part between them, so every repetition adds at least that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import lcm

from mindspeed_autoparallel.schedule.programs import Program, check_program, make_program
from mindspeed_autoparallel.schedule.simulator import Replayed, SimulatedStep, StepTimes, replayed, simulate, traced
from mindspeed_autoparallel.spec.layout import SENDS

ProgramSizes = tuple[str, int, int, int, int, bool]
"""The arguments of ``make_program``: schedule, stages, microbatches, chunks, group size, pairs."""
_CYCLES = (12, 60, 840)
"""Rounds between the cuts, tried in turn: the period of the times is usually 1 or a divisor of these."""
_SHORTENS = 4
"""Least factor by which folding must shorten the replay."""


def simulate_folded(
    sizes: ProgramSizes, times: StepTimes, sends: str, *, with_timeline: bool = False, cycles: Sequence[int] = ()
) -> SimulatedStep:
    """Return the result of ``simulate``; if times tie, the critical path may differ. A timeline is not folded.

    ``cycles``: rounds to try instead of the usual ones. ``sends`` other than ``schedule.SENDS`` are not folded. Raises
    ``ConfigError`` as ``make_program`` does.
    """
    # Events are sorted in an order that repeats after as many rounds as there are stages, or after a divisor.
    for cycle in () if with_timeline else cycles or sorted({*_CYCLES, lcm(_CYCLES[0], sizes[1])}):
        if (found := _folded(sizes, times, sends, cycle)) is not None:
            return found
    return simulate(make_program(*sizes), times, sends=sends, with_timeline=with_timeline)


def program_of_peaks(sizes: ProgramSizes) -> Program:
    """Return a program, possibly shorter, with the same peaks of held activations per stage as that of ``sizes``."""
    return make_program(*_shortened(sizes, _margin(sizes)))


def _is_uniform(times: StepTimes) -> bool:
    """Return whether all microbatches take equal times, in whole numbers: sums of fractions are rounded."""
    alone = (times.per_operation, times.per_message)
    rows = (alone, times.forward, times.backward, times.link, times.per_pass, times.paired_saving.values())
    return all(isinstance(time, int) for row in rows for time in row)


def _round(sizes: ProgramSizes) -> int:
    """Return the number of microbatches after which the order of passes repeats; 0: never."""
    schedule, num_stages, _, _, group, _ = sizes
    return {"1f1b": 1, "interleaved": group or num_stages}.get(schedule, 0)


def _margin(sizes: ProgramSizes) -> int:
    """Return a number of rounds that covers every stage's warm-up, and also its end."""
    return sizes[1] + 4


@lru_cache(maxsize=256)
def _shortened(sizes: ProgramSizes, rounds: int, of: int = 1) -> ProgramSizes:
    """Return ``sizes`` with a multiple of ``of`` rounds of microbatches less; at least twice ``rounds`` are left."""
    check_program(*sizes)
    schedule, num_stages, num_microbatches, *rest = sizes
    if not _round(sizes):
        return sizes
    left = num_microbatches - 2 * rounds * _round(sizes)
    fewer = max(0, left // (of * _round(sizes))) * of * _round(sizes)
    return schedule, num_stages, num_microbatches - fewer, *rest  # type: ignore[return-value]  # the rest of a tuple


def _folded(sizes: ProgramSizes, times: StepTimes, sends: str, cycle: int) -> SimulatedStep | None:
    """Return the step, from one of at most ``2 * margin + 4 * cycle`` rounds; ``None`` if that is not exact."""
    rounds = _margin(sizes) + cycle
    short = _shortened(sizes, rounds + cycle // 2, cycle)
    if sizes[2] < _SHORTENS * short[2] or sends not in SENDS or not _is_uniform(times):
        return None
    program = make_program(*short)
    found = replayed(program, times, sends)
    first, period = _cuts(found, rounds * _round(sizes), cycle * _round(sizes))
    crossing = _crossing(found, first, period)
    paths = [_path_to(node, found) for node in (found.last(), *found.graph.bounds()[1])]
    growths = {_growth(path, found, first, period) for path in paths}
    growth = growths.pop()
    if crossing is None or growth is None or growths:
        return None
    if any(found.ends[node + period] - found.ends[node] > growth for node in crossing):
        return None
    repeats = (sizes[2] - short[2]) // (cycle * _round(sizes))
    step = traced(found)
    forwards, backwards = list(step.num_forwards), list(step.num_backwards)
    for node in paths[0]:
        work = found.graph.work[node]
        if first <= node < first + period and work is not None:
            stage, action = work
            (forwards if action.kind == "F" else backwards)[action.chunk * len(program) + stage] += repeats
    return replace(
        step,
        step_time=step.step_time + repeats * growth,
        num_forwards=tuple(forwards),
        num_backwards=tuple(backwards),
        finishes=tuple(end + repeats * growth for end in step.finishes),
    )


def _cuts(found: Replayed, microbatch: int, apart: int) -> tuple[int, int]:
    """Return the first node after the first cut, and the number of nodes between the cuts: the first stage's forwards
    of ``microbatch`` and of one ``apart`` from it, on the first chunk."""
    places = {
        work[1].microbatch: node
        for node, work in enumerate(found.graph.work)
        if work is not None and work[0] == 0 and work[1].kind == "F" and work[1].chunk == 0
    }
    return places[microbatch], places[microbatch + apart] - places[microbatch]


def _crossing(found: Replayed, first: int, period: int) -> list[int] | None:
    """Return the nodes before the first cut that later ones wait for; ``None`` if the nodes between the cuts differ
    from those that follow: events are sorted in an order that may repeat after more rounds than the schedule."""
    waits, rows = found.graph.waits, found.graph.rows
    for node in range(first, first + period):
        if rows[node] != rows[node + period] or _moved(waits[node], period) != waits[node + period]:
            return None
    crossing, later = (
        sorted({wait for node in range(cut, len(waits)) for wait in waits[node][::2] if 0 < wait < cut})
        for cut in (first, first + period)
    )
    return crossing if [node + period for node in crossing] == later else None


def _moved(waits: tuple[int, int, int, int, int, int], period: int) -> tuple[int, ...]:
    a, link_a, b, link_b, c, link_c = waits
    return a and a + period, link_a, b and b + period, link_b, c and c + period, link_c


def _path_to(node: int, found: Replayed) -> list[int]:
    """Return the nodes of the longest path to ``node``, the last first."""
    path = []
    while node:
        path.append(node)
        node, _ = found.waited_for(node)
    return path


def _growth(path: list[int], found: Replayed, first: int, period: int) -> float | None:
    """Return the time of a path from the last node before the first cut to its twin before the second; ``None`` if it
    crosses the second cut elsewhere."""
    before, after = (next((node for node in path if node < cut), 0) for cut in (first, first + period))
    return found.ends[after] - found.ends[before] if before and after == before + period else None
