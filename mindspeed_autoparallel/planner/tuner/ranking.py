"""Ranking of measured configurations and of configurations with modelled switches in one list."""

from __future__ import annotations

import math
from dataclasses import replace

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.best_first import Proof
from mindspeed_autoparallel.planner.tuner.candidates import Dimensions, Space
from mindspeed_autoparallel.planner.tuner.placements import SolvedConfiguration
from mindspeed_autoparallel.planner.tuner.search import Outcome, search
from mindspeed_autoparallel.spec import Cluster


def ranked(space: Space, cluster: Cluster, batch: int, dimensions: Dimensions, count: int) -> Outcome:
    """Return the ``count`` fastest, followed by the fastest without modelled switches if they include none.

    Raises ``InfeasiblePlan`` if nothing fits and ``ConfigError`` if nothing is legal.
    """
    plain = replace(space, configurations=[item for item in space.configurations if not item.variant.modelled])
    modelled = replace(space, configurations=[item for item in space.configurations if item.variant.modelled])
    if not modelled.configurations:
        return search(plain, cluster, batch, dimensions, count)
    try:
        first = search(plain, cluster, batch, dimensions, count)
    except InfeasiblePlan as shortage:
        try:
            return search(modelled, cluster, batch, dimensions, count)
        except InfeasiblePlan:
            raise shortage from None
    slowest = first.top[count - 1].step_us if len(first.top) >= count else math.inf
    try:
        second = search(modelled, cluster, batch, dimensions, count, slowest)
    except InfeasiblePlan:
        return first
    top = tuple(sorted((*first.top, *second.top), key=_order))
    return Outcome(
        top=top,
        num_legal=first.num_legal + second.num_legal,
        num_solved=first.num_solved + second.num_solved,
        num_bounded=first.num_bounded + second.num_bounded,
        num_out_of_memory=first.num_out_of_memory + second.num_out_of_memory,
        proof=Proof(
            step_us=top[0].step_us,
            lower_bound_us=min(first.proof.lower_bound_us, second.proof.lower_bound_us),
            seconds=first.proof.seconds + second.proof.seconds,
        ),
    )


def _order(found: SolvedConfiguration) -> tuple[float, bool, int]:
    return found.step_us, bool(found.configuration.variant.modelled), found.peak_bytes
