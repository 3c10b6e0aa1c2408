"""The exchanges of a generator: the stages of 1F1B meet once per microbatch, both in training and in the cost model.

Exchange m is between forward m and backward m of the last stage, and every stage takes part. On each stage it may be
before a pass, or between a forward and the message that sends its output. No message may be sent before an exchange and
received after it: the stages would deadlock. Positions with this property form a lattice: they are closed under minimum
and maximum by stage. The chosen positions are nearest to the stages' simultaneous passes, so that the stages run in
parallel from one exchange to the next. Formula H9.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from mindspeed_autoparallel.schedule.event_graph import take_all
from mindspeed_autoparallel.schedule.messages import Message, SendReceive, Step, both_posted, message_steps
from mindspeed_autoparallel.schedule.programs import Action, make_program

_EARLIER = 1
"""Exchanges are placed by the times of a pipeline whose passes take 1 each, this much before the last stage's backward.
If a backward takes two or three forwards, this is nearer to the best than positions by such times."""


MET = "met"
"""Kind of sends (like ``schedule.SENDS``) if the stages of 1F1B meet at every microbatch: they block."""


class Meet(NamedTuple):
    """All stages wait for one another."""

    microbatch: int


class Place(NamedTuple):
    """The position of an exchange in a stage's schedule."""

    kind: str
    """``before_forward``, ``after_forward``, ``before_backward``, or ``end``: after the schedule."""
    microbatch: int


@lru_cache(maxsize=64)
def places_of(num_stages: int, num_microbatches: int, stage: int) -> tuple[Place, ...]:
    """Return the position of ``stage``'s exchange by microbatch. Requires at least as many microbatches as stages."""
    steps = _steps(num_stages, num_microbatches)[stage]
    return tuple(_place(steps, cut[stage]) for cut in _cuts(num_stages, num_microbatches))


def diagonal_places_of(num_stages: int, num_microbatches: int, stage: int) -> tuple[Place, ...]:
    """Return by microbatch the position after the stage's latest forward, which encoders' exchanges in the schedule
    cannot cross. All backwards of a microbatch then come one after another between two exchanges."""
    behind = num_stages - 1 - stage
    rest = Place("before_backward", num_microbatches - 1 - behind)
    places = [Place("after_forward", microbatch + behind) for microbatch in range(num_microbatches - behind)]
    return (*places, *[rest] * behind)


def met_steps(num_stages: int, num_microbatches: int) -> list[list[Step | Meet]]:
    """Return every stage's steps under 1F1B, the exchanges among them."""
    found: list[list[Step | Meet]] = []
    for stage, own in enumerate(_steps(num_stages, num_microbatches)):
        steps: list[Step | Meet] = []
        start = 0
        for microbatch, cut in enumerate(_cuts(num_stages, num_microbatches)):
            steps += [*own[start : cut[stage]], Meet(microbatch)]
            start = cut[stage]
        found.append([*steps, *own[start:]])
    return found


def _place(steps: Sequence[Step], position: int) -> Place:
    if position == len(steps):
        return Place("end", 0)
    following = steps[position]
    if isinstance(following, Action):
        return Place("before_forward" if following.kind == "F" else "before_backward", following.microbatch)
    before = steps[position - 1]
    assert isinstance(before, Action), "an exchange is next to a pass"
    return Place("after_forward", before.microbatch)


@lru_cache(maxsize=64)
def _steps(num_stages: int, num_microbatches: int) -> list[list[Step]]:
    return message_steps(make_program("1f1b", num_stages, num_microbatches), "blocking")


@lru_cache(maxsize=64)
def _cuts(num_stages: int, num_microbatches: int) -> tuple[tuple[int, ...], ...]:
    """Return the number of each stage's steps before the exchange, by microbatch."""
    steps = _steps(num_stages, num_microbatches)
    starts, lattice = _even_starts(steps), _Lattice.of(steps)
    passed = [0] * num_stages
    found = []
    for at, step in enumerate(steps[-1]):
        if not (isinstance(step, Action) and step.kind == "B"):
            continue
        wanted = []
        for stage in range(num_stages - 1):
            while passed[stage] < len(steps[stage]) and starts[stage][passed[stage]] < starts[-1][at] - _EARLIER:
                passed[stage] += 1
            wanted.append(passed[stage])
        found.append(lattice.nearest(wanted, at))
    return tuple(found)


def _even_starts(steps: Sequence[Sequence[Step]]) -> list[list[int]]:
    """Return the start of each step if passes take 1 and messages 0; a message starts when both sides have
    posted it."""
    now, starts = [0] * len(steps), [list[int]() for _ in steps]
    posted: dict[Message, int] = {}

    def take(stage: int, step: Step) -> bool:
        if isinstance(step, SendReceive):
            if not both_posted(step, now[stage], posted):
                return False
            now[stage] = max(now[stage], *(posted[message.other_side] for message in step.messages))
        starts[stage].append(now[stage])
        now[stage] += isinstance(step, Action)
        return True

    take_all(steps, take)
    return starts


@dataclass(frozen=True)
class _Lattice:
    """Positions of an exchange on all stages that no message crosses."""

    allowed: Sequence[Sequence[bool]]
    """By stage and position."""
    before: Sequence[Sequence[int]]
    """By stage and position: the number of steps that the previous stage must have finished; nondecreasing."""
    after: Sequence[Sequence[int]]
    """The same for the next stage."""

    @classmethod
    def of(cls, steps: Sequence[Sequence[Step]]) -> _Lattice:
        where = {
            message: index
            for own in steps
            for index, step in enumerate(own)
            if isinstance(step, SendReceive)
            for message in step.messages
        }
        needed = [[[0], [0]] for _ in steps]
        for stage, own in enumerate(steps):
            for step in own:
                latest = [counts[-1] for counts in needed[stage]]
                for message in step.messages if isinstance(step, SendReceive) else ():
                    # A boundary has the number of the stage before it.
                    side = int(message.boundary == stage)
                    latest[side] = max(latest[side], where[message.other_side] + 1)
                for counts, count in zip(needed[stage], latest, strict=True):
                    counts.append(count)
        return cls(
            allowed=[[_is_place(own, position) for position in range(len(own) + 1)] for own in steps],
            before=[before for before, _ in needed],
            after=[after for _, after in needed],
        )

    def nearest(self, wanted: Sequence[int], last: int) -> tuple[int, ...]:
        """Return the latest positions up to ``wanted`` on the stages before the last, which is at ``last``; if there
        are none, the nearest."""
        least = self._raised([0] * len(wanted) + [last])
        most = self._lowered([*(len(own) - 1 for own in self.allowed[:-1]), last])
        found = self._lowered([*wanted, last])
        return tuple(min(max(own, low), high) for own, low, high in zip(found, least, most, strict=True))

    def _raised(self, cut: list[int]) -> list[int]:
        """Return the least positions from ``cut`` on."""
        known: list[int] = []
        while known != cut:
            known = [*cut]
            for stage, own in enumerate(self.allowed):
                before = self.after[stage - 1][cut[stage - 1]] if stage else 0
                after = self.before[stage + 1][cut[stage + 1]] if stage + 1 < len(cut) else 0
                cut[stage] = own.index(True, max(cut[stage], before, after))
        return cut

    def _lowered(self, cut: list[int]) -> list[int]:
        """Return the greatest positions up to ``cut``."""
        known: list[int] = []
        while known != cut:
            known = [*cut]
            for stage, own in enumerate(self.allowed):
                if stage:
                    cut[stage] = min(cut[stage], bisect_right(self.before[stage], cut[stage - 1]) - 1)
                if stage + 1 < len(cut):
                    cut[stage] = min(cut[stage], bisect_right(self.after[stage], cut[stage + 1]) - 1)
                while not own[cut[stage]]:
                    cut[stage] -= 1
        return cut


def _is_place(steps: Sequence[Step], position: int) -> bool:
    """Return whether an exchange is possible after ``position`` steps: next to a pass, or at the end. Position 0 is
    never used, because the last stage's forward needs one of every stage."""
    if position in (0, len(steps)) or isinstance(steps[position], Action):
        return True
    before = steps[position - 1]
    return isinstance(before, Action) and before.kind == "F"
