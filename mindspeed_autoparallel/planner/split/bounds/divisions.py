"""Choices of stages' options, for parallel branches, and their divisions into two choices with the same plans."""

from __future__ import annotations

from dataclasses import dataclass, field

from mindspeed_autoparallel.planner.split.bounds.bottlenecks import bottleneck
from mindspeed_autoparallel.planner.split.model.cuts import Cut
from mindspeed_autoparallel.planner.split.model.ranges import NEVER
from mindspeed_autoparallel.planner.split.model.recompute_choice import Array
from mindspeed_autoparallel.planner.split.model.stage_options import StageOptions
from mindspeed_autoparallel.planner.split.settings import SETTINGS


@dataclass
class Choice:
    """Remaining options of every stage, their bounds, and the start of their search."""

    options: list[Array]
    floor: int = 0
    """Some stage's extra is known to be no less: every stage's work and this are a cut."""
    cuts: list[Cut] = field(default_factory=list[Cut])
    """Cuts that were relevant to the bound."""
    columns: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(stage, option) pairs of the fastest mixture."""

    def divided(self, stage: int, which: Array) -> Choice:
        """Return the same with other options on one stage."""
        options = list(self.options)
        options[stage] = which
        return Choice(options, self.floor, list(self.cuts), list(self.columns))

    def size(self) -> int:
        return sum(map(len, self.options))

    def is_empty(self) -> bool:
        return not all(map(len, self.options))


def divided(table: StageOptions, choice: Choice, cuts: dict[Cut, None], mixed: Array) -> list[Choice]:
    """Return choices that hold every plan of this one: by joints, order of segments, bottleneck or layer counts."""
    if choice.is_empty():
        return []
    return (
        _divided_by_joints(table, choice)
        or _divided_by_order(table, choice, mixed)
        or _divided_at_bottleneck(table, choice, cuts)
        or _divided_by_count(table, choice, mixed)
    )


def _divided_by_joints(table: StageOptions, choice: Choice) -> list[Choice]:
    """Return a part for each stage where the one segment of a joint may end, beside first layers of the other."""
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
            # Without any part there is no plan, which an empty choice expresses.
            return parts or [choice.divided(0, choice.options[0][:0])]
    return []


def _divided_by_order(table: StageOptions, choice: Choice, mixed: Array) -> list[Choice]:
    """Return two halves: a segment is done before a boundary, or one that waits for it is not begun there."""
    worst, found = SETTINGS.mixture_whole, None
    for k, segment in enumerate(table.problem.segments):
        for before in segment.predecessors:
            for boundary in range(1, len(mixed)):
                late = min(float(mixed[boundary:, before].sum()), float(mixed[:boundary, k].sum()))
                if late > worst:
                    worst, found = late, (before, k, boundary)
    if found is None:
        return []
    before, k, boundary = found
    halves: list[Choice] = []
    for segment_index, stages in ((before, range(boundary, len(mixed))), (k, range(boundary))):
        half = Choice(list(choice.options), choice.floor, list(choice.cuts), list(choice.columns))
        for stage in stages:
            options = half.options[stage]
            half.options[stage] = options[table.counts[options, segment_index] == 0]
        halves.append(half)
    return halves


def _divided_at_bottleneck(table: StageOptions, choice: Choice, cuts: dict[Cut, None]) -> list[Choice]:
    """Return two halves: some stage's extra reaches a middle value, and all stages' work comes on top; or none does."""
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
    """Return two halves: a stage holds more than so many layers of a segment, or at most so many."""
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
