"""Steps whose microbatches differ, drawn so that their mean is comparable with the step of mean microbatches.

At every position of the step, each representative sample comes equally often over the drawn steps. A step time is a
longest path, convex in the times: so the mean of the drawn steps is never below the step of mean times (Jensen), and a
lower bound for mean times is one for the mean of steps, too.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from mindspeed_autoparallel.planner.stage_times import NS_PER_US
from mindspeed_autoparallel.profiles import VariableData
from mindspeed_autoparallel.schedule import ProgramSizes, StepTimes, make_program, simulate

MAX_REPRESENTATIVES = 32


def mean_factors(data: VariableData | None) -> dict[str, float]:
    """Return module name to its mean time, relative to the measured one; modules without variable data are absent."""
    if data is None:
        return {}
    rows = representatives(data)
    return {name: sum(row[index] for row in rows) / len(rows) for index, name in enumerate(data.modules)}


def representatives(data: VariableData) -> tuple[tuple[float, ...], ...]:
    """Return at most 32 of the samples, evenly spaced from light to heavy."""
    ordered = sorted(data.samples, key=lambda row: (sum(row), row))
    if len(ordered) <= MAX_REPRESENTATIVES:
        return tuple(ordered)
    step = len(ordered) / MAX_REPRESENTATIVES
    return tuple(ordered[int((index + 0.5) * step)] for index in range(MAX_REPRESENTATIVES))


def sampled_times(
    data: VariableData, stages: Sequence[Mapping[str, tuple[int, int]]], num_microbatches: int
) -> list[tuple[list[list[float]], list[list[float]]]]:
    """Return per drawn step the forward and backward times by stage and microbatch.

    ``stages``: per virtual stage, module name to its forward and backward time. The same draw for the same input.
    """
    rows = representatives(data)
    columns = {name: index for index, name in enumerate(data.modules)}
    per_sample = [
        [
            [
                sum(pair[which] * (row[columns[name]] if name in columns else 1.0) for name, pair in stage.items())
                for row in rows
            ]
            for stage in stages
        ]
        for which in (0, 1)
    ]
    return [
        ([[stage[k] for k in draw] for stage in per_sample[0]], [[stage[k] for k in draw] for stage in per_sample[1]])
        for draw in _draws(len(rows), num_microbatches)
    ]


@lru_cache(maxsize=64)
def _draws(num_samples: int, num_microbatches: int) -> tuple[tuple[int, ...], ...]:
    generator = random.Random(20260101)
    draws: list[tuple[int, ...]] = []
    while len(draws) < MAX_REPRESENTATIVES:
        start = [generator.randrange(num_samples) for _ in range(num_microbatches)]
        draws += [tuple((first + shift) % num_samples for first in start) for shift in range(num_samples)]
    return tuple(draws)


def spread_us(
    data: VariableData,
    stages: Sequence[Mapping[str, tuple[int, int]]],
    sizes: ProgramSizes,
    times: StepTimes,
    sends: str,
) -> list[float]:
    """Return the pipeline times of sampled batches; ``stages``: as for ``sampled_times``, ``times``: all the rest."""
    program = make_program(*sizes)
    varied = (replace(times, forward=f, backward=b) for f, b in sampled_times(data, stages, sizes[2]))
    return [simulate(program, each, sends=sends).step_time / NS_PER_US for each in varied]
