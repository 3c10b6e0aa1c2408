"""Branching: paths of a chain, and subsets of stages' options for parallel branches, divided so that no plan is lost.

Many critical paths pass every stage once in each direction and some stages more often. So a step takes at least the
work of all stages plus the largest *extra* of any stage. No single cut implies this, nor does a mean of cuts. If some
stage's extra is at least a given value, then all stages' work plus that value is a valid cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy

from mindspeed_autoparallel.planner.split.bounds.paths import Paths
from mindspeed_autoparallel.planner.split.model.cuts import Cut
from mindspeed_autoparallel.planner.split.model.ranges import NEVER
from mindspeed_autoparallel.planner.split.model.recompute_choice import Array
from mindspeed_autoparallel.planner.split.model.stage_options import StageOptions


def bottleneck(cuts: Iterable[Cut], times: Sequence[tuple[Array, Array]], floor: int) -> tuple[int, list[Array]] | None:
    """Return the median of the extras, and the extra of every choice of each stage; ``None`` if nothing can be divided.

    ``times``: by stage, forward and backward times of its choices. ``floor``: a lower bound of the largest extra.
    """
    passing = [cut for cut in cuts if min(cut.forwards) >= 1 and min(cut.backwards) >= 1]
    if not passing:
        return None
    more: Array = numpy.array([(cut.forwards, cut.backwards) for cut in passing], dtype=numpy.int64) - 1
    constant: Array = numpy.array([cut.constant for cut in passing], dtype=numpy.int64)
    extras: list[Array] = []
    for stage, (forward, backward) in enumerate(times):
        passes = numpy.unique(numpy.stack([*more[:, :, stage].T, constant]), axis=1)
        extras.append((forward[:, None] * passes[0] + backward[:, None] * passes[1] + passes[2]).max(axis=1))
    # Under any choice, a stage has at least its smallest extra.
    floor = max(floor, *(int(extra.min()) for extra in extras))
    values = numpy.unique(numpy.concatenate(extras))
    values = values[values > floor]
    return (int(values[len(values) // 2]), extras) if len(values) else None


def halves(paths: Paths) -> tuple[Paths, Paths] | None:
    """Return the paths whose largest extra is below a threshold, and the others; ``None`` if nothing can be divided.

    The threshold is a valid cut for the second half only, so each half has its own cuts.
    """
    num = len(paths.ranges)
    found = bottleneck(paths.cuts, [(ranges.forward, ranges.backward) for ranges in paths.ranges], paths.floor)
    if found is None:
        return None
    middle, extras = found
    below, above = paths.copy(), paths.copy()
    for half in (below, above):
        half.cuts = dict(paths.cuts)
    for ranges, extra in zip(below.ranges, extras, strict=True):
        ranges.keep(extra < middle)
    above.floor = middle
    above.cuts[Cut((1,) * num, (1,) * num, middle)] = None
    return below, above


@dataclass
class Choice:
    """Remaining options of every stage, their bounds, and the start of their search."""

    options: list[Array]
    floor: int = 0
    """Lower bound of the largest extra (``bottleneck``): all stages' work plus this value is a cut."""
    cuts: list[Cut] = field(default_factory=list[Cut])
    """Cuts to start with: those with a weight in the last bound."""
    columns: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(stage, option) pairs of the fastest mixture."""

    def divided(self, stage: int, which: Array) -> Choice:
        """Return a copy in which ``stage`` has the options ``which``."""
        options = list(self.options)
        options[stage] = which
        return Choice(options, self.floor, list(self.cuts), list(self.columns))

    def size(self) -> int:
        return sum(map(len, self.options))

    def is_empty(self) -> bool:
        return not all(map(len, self.options))


def divided(table: StageOptions, choice: Choice, cuts: dict[Cut, None], mixed: Array) -> list[Choice]:
    """Return choices that together hold every plan of ``choice``.

    The first rule that applies divides it: joints, bottleneck, layer counts.
    """
    if choice.is_empty():
        return []
    return (
        _divided_by_joints(table, choice)
        or _divided_at_bottleneck(table, choice, cuts)
        or _divided_by_count(table, choice, mixed)
    )


def _divided_by_joints(table: StageOptions, choice: Choice) -> list[Choice]:
    """Return one choice for each stage that may hold a joint: the end of one segment and the start of the other."""
    num = len(choice.options)
    for joint in table.problem.joints:
        parts: list[Choice] = []
        for end in range(num):
            part = Choice(list(choice.options), choice.floor, list(choice.cuts), list(choice.columns))
            for stage in range(end, num):
                held = table.counts[part.options[stage]]
                ends = (held[:, joint.before] > 0) & (held[:, joint.segment] >= joint.num_layers)
                part.options[stage] = part.options[stage][ends if stage == end else held[:, joint.before] == 0]
            if not part.is_empty():
                parts.append(part)
        if len(parts) != 1 or parts[0].size() < choice.size():
            # Without any part no plan exists: return an empty choice.
            return parts or [choice.divided(0, choice.options[0][:0])]
    return []


def _divided_at_bottleneck(table: StageOptions, choice: Choice, cuts: dict[Cut, None]) -> list[Choice]:
    """Return two halves: the largest extra is at least a threshold, or every stage's extra is below it."""
    for stage, listed in enumerate(choice.options):
        choice.options[stage] = listed[table.backward[stage][listed] < NEVER]
    if choice.is_empty():
        return []
    times = [(table.forward[kept], table.backward[stage][kept]) for stage, kept in enumerate(choice.options)]
    found = bottleneck(cuts, times, choice.floor)
    if found is None:
        return []
    middle, extras = found
    below = [options[extra < middle] for options, extra in zip(choice.options, extras, strict=True)]
    return [
        Choice(list(choice.options), middle, list(choice.cuts), list(choice.columns)),
        Choice(below, choice.floor, list(choice.cuts), list(choice.columns)),
    ]


def _divided_by_count(table: StageOptions, choice: Choice, mixed: Array) -> list[Choice]:
    """Return two halves: a stage holds more than a number of layers of a segment, or at most that number."""
    best, found = -1.0, None
    for stage, options in enumerate(choice.options):
        least, most = table.counts[options].min(axis=0), table.counts[options].max(axis=0)
        for k, segment in enumerate(table.problem.segments):
            if least[k] < most[k]:
                value = float(mixed[stage, k])
                score = abs(value - round(value)) * (segment.forward + segment.backward)
                if score > best:
                    best, found = score, (stage, k, min(max(int(value + 1e-9), least[k]), most[k] - 1))
    if found is None:
        return []
    stage, k, most_held = found
    options = choice.options[stage]
    few = table.counts[options, k] <= most_held
    return [choice.divided(stage, options[~few]), choice.divided(stage, options[few])]
