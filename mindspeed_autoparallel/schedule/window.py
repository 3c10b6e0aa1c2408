"""A step in memory mode window: a replay of encoders' macro-batches inside the backbone's 1F1B, as in training.

A macro-batch's forward runs when the first stage reaches its first microbatch, its backward when the first stage has
finished its last. Both are collective over the stages, each at its own position: a tick. The dependencies are those of
``runtime.hetero.schedules``; on the emulated device both take the same time. Formula H8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from mindspeed_autoparallel.schedule.event_graph import take_all
from mindspeed_autoparallel.schedule.messages import Message, Post, Step, both_posted, message_steps
from mindspeed_autoparallel.schedule.programs import Action, Program, make_program


@dataclass(frozen=True, kw_only=True)
class MacroBatchTimes:
    """One macro-batch of one encoder. Times in microseconds; 0 for transfers that move nothing."""

    first: int
    """Its first microbatch."""
    last: int
    inputs_us: float
    forward_us: Sequence[float]
    """By stage of the backbone: time on its busiest encoder replica."""
    outputs_us: float
    gradients_us: float
    backward_us: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class BackboneTimes:
    """The backbone's pipeline, by virtual stage, in microseconds, including host time per pass."""

    forward_us: Sequence[float]
    backward_us: Sequence[float]
    link_us: Sequence[float]
    """Time of a message between virtual stages s and s + 1."""
    num_microbatches: int
    num_chunks: int = 1
    """Virtual stages of one rank."""
    microbatch_group_size: int = 0
    """Group size of the interleaved schedule; 0: the number of stages."""
    sends: str = "blocking"
    """How messages are treated (``schedule.SENDS``)."""

    @property
    def num_stages(self) -> int:
        return len(self.forward_us) // self.num_chunks

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Return the arguments of ``ticks_of``."""
        return self.num_stages, self.num_microbatches, self.num_chunks, self.microbatch_group_size


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A position in the schedule where all stages meet: before the first model chunk's forward of one microbatch on
    stage 0, the forward number ``forward`` of its chunks; on stage p so many forwards earlier."""

    microbatch: int
    forward: int
    last_done: int
    """The last microbatch whose backward stage 0's first chunk has finished by then; -1: none."""


@lru_cache(maxsize=256)
def ticks_of(
    num_stages: int, num_microbatches: int, num_chunks: int = 1, microbatch_group_size: int = 0
) -> tuple[Tick, ...]:
    """Return the ticks of a step under 1F1B, interleaved with ``num_chunks`` model chunks on each rank.

    Raises ``ConfigError`` for an impossible schedule.
    """
    (first, *_) = _program(num_stages, num_microbatches, num_chunks, microbatch_group_size)
    ticks: list[Tick] = []
    forwards, last_done = 0, -1
    for action in first:
        if action.kind == "B":
            last_done = action.microbatch if not action.chunk else last_done
            continue
        if not action.chunk:
            ticks.append(Tick(microbatch=action.microbatch, forward=forwards, last_done=last_done))
        forwards += 1
    return tuple(ticks)


def _program(num_stages: int, num_microbatches: int, num_chunks: int, microbatch_group_size: int) -> Program:
    kind = "interleaved" if num_chunks > 1 else "1f1b"
    return make_program(kind, num_stages, num_microbatches, num_chunks, microbatch_group_size)


@lru_cache(maxsize=256)
def _plain_steps(sizes: tuple[int, int, int, int], sends: str) -> list[list[Step]]:
    return message_steps(_program(*sizes), sends)


class _Compute(NamedTuple):
    time_us: float


class _Transfer(NamedTuple):
    """An all-to-all of all stages that is waited for at once."""

    key: tuple[int, int, str]
    """Encoder, macro-batch, kind."""
    time_us: float


_Step = Step | _Compute | _Transfer


def num_alive(ticks: Sequence[Tick], scale: int) -> int:
    """Return the largest number of macro-batches of ``scale`` microbatches that are alive at once."""
    last = len(ticks) - 1
    starts = range(0, len(ticks), scale)
    alive = (
        sum(first <= tick.microbatch and min(first + scale - 1, last) > tick.last_done for first in starts)
        for tick in ticks
    )
    return max(alive)


def window_step_us(backbone: BackboneTimes, encoders: Sequence[Sequence[MacroBatchTimes]]) -> float:
    """Return the time from the first encoding to the last stage's end, encoders' backward included."""
    plain, ticks = _plain_steps(backbone.sizes, backbone.sends), ticks_of(*backbone.sizes)
    steps = [list(_with_ticks(plain[stage], stage, ticks, encoders)) for stage in range(backbone.num_stages)]
    return max(_ends(steps, backbone))


def _with_ticks(
    plain: Sequence[Step], stage: int, ticks: Sequence[Tick], encoders: Sequence[Sequence[MacroBatchTimes]]
) -> Iterator[_Step]:
    """Yield a stage's steps, interleaved with the encoders' steps."""
    encoded, taken_back = [0] * len(encoders), [0] * len(encoders)

    def take_back(last_done: int) -> Iterator[_Step]:
        for number, batches in enumerate(encoders):
            while taken_back[number] < len(batches) and batches[taken_back[number]].last <= last_done:
                k = taken_back[number]
                yield from _moved(number, k, "gradients", batches[k].gradients_us)
                yield _Compute(batches[k].backward_us[stage])
                taken_back[number] += 1

    def meet(tick: Tick) -> Iterator[_Step]:
        yield from take_back(tick.last_done)
        for number, batches in enumerate(encoders):
            k = encoded[number]
            if k < len(batches) and batches[k].first == tick.microbatch:
                yield from _moved(number, k, "inputs", batches[k].inputs_us)
                yield _Compute(batches[k].forward_us[stage])
                yield from _moved(number, k, "outputs", batches[k].outputs_us)
                encoded[number] += 1

    for tick in ticks:
        if tick.forward < stage:
            yield from meet(tick)
    before = {tick.forward - stage: tick for tick in ticks}
    forwards = 0
    for step in plain:
        if isinstance(step, Action) and step.kind == "F":
            if forwards in before:
                yield from meet(before[forwards])
            forwards += 1
        yield step
    yield from take_back(len(ticks) - 1)


def _moved(encoder: int, batch: int, kind: str, time_us: float) -> Iterator[_Step]:
    if time_us > 0:
        yield _Transfer((encoder, batch, kind), time_us)


def _ends(steps: Sequence[Sequence[_Step]], backbone: BackboneTimes) -> list[float]:
    stages = len(steps)
    now = [0.0] * stages
    posted: dict[Message, float] = {}
    started: dict[tuple[int, int, str], dict[int, float]] = {}

    def take(stage: int, step: _Step) -> bool:
        if isinstance(step, Action):
            virtual = step.chunk * stages + stage
            now[stage] += (backbone.forward_us if step.kind == "F" else backbone.backward_us)[virtual]
        elif isinstance(step, _Compute):
            now[stage] += step.time_us
        elif isinstance(step, _Transfer):
            ready = started.setdefault(step.key, {})
            ready.setdefault(stage, now[stage])
            if len(ready) < stages:
                return False
            now[stage] = max(ready.values()) + step.time_us
        elif not both_posted(step, now[stage], posted):
            return False
        elif not isinstance(step, Post):
            through = (
                max(posted[message], posted[message.other_side]) + backbone.link_us[message.boundary]
                for message in step.messages
            )
            now[stage] = max(now[stage], *through)
        return True

    take_all(steps, take)
    return now
