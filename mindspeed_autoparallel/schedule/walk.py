"""Visits the steps of all stages, each stage's in order, so that every step comes after its dependencies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from mindspeed_autoparallel.errors import ConfigError

Step = TypeVar("Step")


def take_all(steps: Sequence[Sequence[Step]], take: Callable[[int, Step], bool]) -> None:
    """Call ``take(stage, step)`` until it took every step; False: the step still waits, and the other stages continue.

    A step that waits is offered again later. Raises ``ConfigError`` if every stage waits for another.
    """
    position, left = [0] * len(steps), sum(map(len, steps))
    while left:
        before = left
        for stage, own in enumerate(steps):
            while position[stage] < len(own) and take(stage, own[position[stage]]):
                position[stage] += 1
                left -= 1
        if left == before:
            raise ConfigError("this program deadlocks: every stage waits for another.")
