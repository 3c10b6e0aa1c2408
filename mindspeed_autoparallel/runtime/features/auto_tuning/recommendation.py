"""Result of a tuning's search: configurations with all that a user needs to train with them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.layouts.assembly import limits_of_plan, plan_of
from mindspeed_autoparallel.planner.spread.samples import Samples
from mindspeed_autoparallel.planner.tuner.candidates import Space
from mindspeed_autoparallel.planner.tuner.placements import SolvedConfiguration
from mindspeed_autoparallel.planner.tuner.pricing import Prices
from mindspeed_autoparallel.planner.tuner.search import Outcome
from mindspeed_autoparallel.runtime.features.auto_tuning.argv import (
    environment_words,
    flags_to_remove,
    launcher_words,
    values_of,
    with_configuration,
    words_of,
)
from mindspeed_autoparallel.runtime.features.auto_tuning.request import TuningRequest
from mindspeed_autoparallel.spec.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """A configuration with everything a user needs to train with it."""

    found: SolvedConfiguration
    plan: Plan
    values: Mapping[str, object]
    """Megatron's argument destinations."""
    words: Sequence[str]
    """The configuration as flags."""
    command: Sequence[str]
    """The user's command line with them, under torchrun."""
    flags_to_remove: Sequence[str]
    """Words of the user's command line that would stay in force next to ``words``."""
    relative_error: float
    ends: tuple[float, float] = (1.0, 1.0)
    """Bounds of the step time, relative to the prediction: modelled switches hide all of the modelled time, or none."""
    samples: Samples | None = None
    """Samples for which its steps are drawn; ``None``: equal samples."""

    @property
    def modelled(self) -> tuple[str, ...]:
        """Return its switches that were never measured."""
        return self.found.configuration.variant.modelled

    @property
    def title(self) -> str:
        """Return the variant of its layers and its modelled switches, except a sharding, which the label shows."""
        layout = self.plan.layout
        told = layout.sharding.label if layout.sharding is not None else ""
        names = [self.found.configuration.variant.name, *self.modelled]
        return " ".join(name for name in names if name and not (told and name.startswith(told)))


@dataclass(frozen=True, kw_only=True)
class Recommended:
    """Result of the search."""

    picks: list[Recommendation]
    """Fastest first."""
    outcome: Outcome
    space: Space
    refused: dict[str, str]
    """Configurations that Megatron refuses, with its message."""
    baseline: SolvedConfiguration | str
    """The script's own configuration, or the reason why it is unknown."""


def recommend(
    request: TuningRequest, found: SolvedConfiguration, prices: Prices, outcome: Outcome, arguments: argparse.Namespace
) -> Recommendation:
    """Return ``found`` with its plan, its flags and the command line; ``arguments``: the host's."""
    configuration = found.configuration
    variant = configuration.variant
    profile, batch, cluster = variant.profile, request.global_batch_size, request.cluster
    evaluation = evaluate(profile, cluster, configuration.layout, found.placement, batch)
    ends = [
        evaluate(end, cluster, configuration.layout, found.placement, batch).step.total_us / found.step_us
        for end in variant.interval or ()
    ]
    record = outcome.proof.of(found.step_us).record(
        num_configurations=outcome.num_legal,
        num_solved=outcome.num_solved,
        limits=limits_of_plan(evaluation),
        unproved="improved",
    )
    plan = plan_of(profile, cluster, configuration.layout, evaluation, batch, record)
    values = values_of(plan, variant.settings, found.recompute, found.num_recomputed, arguments)
    words = words_of(values)
    return Recommendation(
        found=replace(found, evaluation=evaluation),
        plan=plan,
        values=values,
        words=words,
        command=[
            *environment_words(variant.environment),
            *launcher_words(cluster, request.master_addr, request.master_port),
            *with_configuration(sys.argv, words),
        ],
        flags_to_remove=flags_to_remove(sys.argv, words),
        relative_error=2 * prices.host.relative_error,
        ends=(ends[0], ends[1]) if ends else (1.0, 1.0),
    )
