"""A step in memory mode window: encoders' macro-batches inside the backbone's 1F1B, replayed as training runs it.

A macro-batch is encoded where the first stage reaches its first microbatch, and taken back where the first stage is
through with its last. Both are collective over the stages, which reach them at places of their own: a tick. What waits
for what is that of ``runtime.hetero.encoder_schedule``; on the emulated device both take the same time. Formula H8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mindspeed_autoparallel.schedule.messages import Message, SendReceive, message_steps
from mindspeed_autoparallel.schedule.programs import Action, make_program
from mindspeed_autoparallel.schedule.walk import take_all


@dataclass(frozen=True, kw_only=True)
class MacroBatchTimes:
    """One macro-batch of one encoder. Times in microseconds; 0 for transfers where nothing moves."""

    first: int
    """Its first microbatch."""
    last: int
    inputs_us: float
    forward_us: Sequence[float]
    """By stage of the backbone: on the busiest encoder replica there."""
    outputs_us: float
    gradients_us: float
    backward_us: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class BackboneTimes:
    """The backbone's pipeline, by stage, in microseconds; what the host adds to every pass is part of it."""

    forward_us: Sequence[float]
    backward_us: Sequence[float]
    link_us: Sequence[float]
    """Of a message between stages s and s + 1."""
    num_microbatches: int


class _Compute(NamedTuple):
    time_us: float


class _Transfer(NamedTuple):
    """An all-to-all of all stages that is waited for at once."""

    key: tuple[int, int, str]
    """Encoder, macro-batch, kind."""
    time_us: float


_Step = Action | SendReceive | _Compute | _Transfer


def num_alive(num_stages: int, scale: int, num_microbatches: int) -> int:
    """Return how many macro-batches of ``scale`` microbatches live at once at most."""
    starts = range(0, num_microbatches, scale)
    return max(sum(first <= tick and first + scale - 1 > tick - num_stages for first in starts) for tick in starts)


def window_step_us(backbone: BackboneTimes, encoders: Sequence[Sequence[MacroBatchTimes]]) -> float:
    """Return the time from the first encoding to the last stage's end, encoders' backward included."""
    stages = len(backbone.forward_us)
    program = make_program("1f1b", stages, backbone.num_microbatches)
    plain = message_steps(program, "blocking")
    steps = [
        list(
            _with_ticks(
                [step for step in plain[stage] if isinstance(step, Action | SendReceive)],
                stage,
                stages,
                backbone,
                encoders,
            )
        )
        for stage in range(stages)
    ]
    return max(_ends(steps, backbone))


def _with_ticks(
    plain: Sequence[Action | SendReceive],
    stage: int,
    stages: int,
    backbone: BackboneTimes,
    encoders: Sequence[Sequence[MacroBatchTimes]],
) -> Iterator[_Step]:
    """Yield a stage's steps with the encoders' between them."""
    encoded, taken_back = [0] * len(encoders), [0] * len(encoders)

    def take_back(last_done: int) -> Iterator[_Step]:
        for number, batches in enumerate(encoders):
            while taken_back[number] < len(batches) and batches[taken_back[number]].last <= last_done:
                k = taken_back[number]
                yield from _moved(number, k, "gradients", batches[k].gradients_us)
                yield _Compute(batches[k].backward_us[stage])
                taken_back[number] += 1

    def tick(place: int) -> Iterator[_Step]:
        yield from take_back(place - stages)
        for number, batches in enumerate(encoders):
            k = encoded[number]
            if k < len(batches) and batches[k].first == place:
                yield from _moved(number, k, "inputs", batches[k].inputs_us)
                yield _Compute(batches[k].forward_us[stage])
                yield from _moved(number, k, "outputs", batches[k].outputs_us)
                encoded[number] += 1

    for place in range(min(stage, backbone.num_microbatches)):
        yield from tick(place)
    for step in plain:
        if isinstance(step, Action) and step.kind == "F" and step.microbatch + stage < backbone.num_microbatches:
            yield from tick(step.microbatch + stage)
        yield step
    yield from take_back(backbone.num_microbatches - 1)


def _moved(encoder: int, batch: int, kind: str, time_us: float) -> Iterator[_Step]:
    if time_us > 0:
        yield _Transfer((encoder, batch, kind), time_us)


def _ends(steps: Sequence[Sequence[_Step]], backbone: BackboneTimes) -> list[float]:
    """Return when every stage is through."""
    stages = len(steps)
    now = [0.0] * stages
    posted: dict[Message, float] = {}
    started: dict[tuple[int, int, str], dict[int, float]] = {}

    def take(stage: int, step: _Step) -> bool:
        if isinstance(step, Action):
            now[stage] += (backbone.forward_us if step.kind == "F" else backbone.backward_us)[stage]
        elif isinstance(step, _Compute):
            now[stage] += step.time_us
        elif isinstance(step, _Transfer):
            ready = started.setdefault(step.key, {})
            ready.setdefault(stage, now[stage])
            if len(ready) < stages:
                return False
            now[stage] = max(ready.values()) + step.time_us
        else:
            for message in step.messages:
                posted.setdefault(message, now[stage])
            if any(message.other_side not in posted for message in step.messages):
                return False
            now[stage] = max(
                max(posted[message], posted[message.other_side]) + backbone.link_us[message.boundary]
                for message in step.messages
            )
        return True

    take_all(steps, take)
    return now
