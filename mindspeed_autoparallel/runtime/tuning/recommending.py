"""Stage three: search, and the host's own word on what was found."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.assembly import limits_of_plan, plan_of
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.runtime.tuning.argv import illegal, values_of, with_configuration, words_of
from mindspeed_autoparallel.runtime.tuning.dimensions import SearchPlan
from mindspeed_autoparallel.runtime.tuning.request import TuningRequest
from mindspeed_autoparallel.runtime.tuning.result import Recommendation
from mindspeed_autoparallel.runtime.tuning.switching import environment_words, sharding_values, with_environment
from mindspeed_autoparallel.spec import Cluster
from mindspeed_autoparallel.spec.plan import SearchRecord
from mindspeed_autoparallel.tuning.traced.candidates import Family, Space, enumerate_space
from mindspeed_autoparallel.tuning.traced.pricing import Prices
from mindspeed_autoparallel.tuning.traced.ranking import ranked
from mindspeed_autoparallel.tuning.traced.search import Found, Outcome

NUM_RECOMMENDED = 3
_SPARE = 9
"""More than are recommended, because the host's own validation has the last word."""


def recommend(
    request: TuningRequest, plan: SearchPlan, families: list[Family], prices: Prices, arguments: argparse.Namespace
) -> tuple[list[Recommendation], Outcome, Space]:
    """The three fastest configurations that fit and that the host's ``validate_args`` takes."""
    cluster = Cluster(
        num_nodes=max(1, request.num_ranks // request.devices_per_node), devices_per_node=request.devices_per_node
    )
    space = enumerate_space(families, cluster, request.global_batch_size, plan.dimensions)
    outcome = ranked(space, cluster, request.global_batch_size, plan.dimensions, NUM_RECOMMENDED + _SPARE)

    def legal(candidates: Iterable[Found]) -> Iterator[Recommendation]:
        for found in candidates:
            pick = _recommendation(request, cluster, found, prices, outcome)
            with with_environment(found.configuration.family.environment):
                reason = illegal(arguments, pick.values, request.num_ranks)
            if reason:
                plan.left_out[f"{pick.plan.layout.label()} {pick.title}".strip()] = f"Megatron refuses it: {reason}"
            else:
                yield pick

    picks = list(itertools.islice(legal(outcome.top), NUM_RECOMMENDED))
    if all(pick.modelled for pick in picks):
        # The last place is for the fastest that needs no modelled switch.
        plain = legal(found for found in outcome.top if not found.configuration.family.modelled)
        picks = [*picks, *itertools.islice(plain, 1)]
        picks = [*picks[: NUM_RECOMMENDED - 1], *picks[NUM_RECOMMENDED - 1 :][-1:]]
    if not picks:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in plan.left_out.items() if "refuses" in reason)
        raise ConfigError(f"Megatron's own validation refuses every configuration found: {reasons}")
    return picks, outcome, space


def _recommendation(
    request: TuningRequest, cluster: Cluster, found: Found, prices: Prices, outcome: Outcome
) -> Recommendation:
    configuration = found.configuration
    family = configuration.family
    profile, batch = family.profile, request.global_batch_size
    evaluation = evaluate(profile, cluster, configuration.layout, found.placement, batch)
    ends = [
        evaluate(end, cluster, configuration.layout, found.placement, batch).step.total_us / found.step_us
        for end in family.bracket or ()
    ]
    record = SearchRecord(
        status="feasible", lower_bound_us=configuration.bound_us,
        gap_fraction=max(0.0, 1 - configuration.bound_us / found.step_us), num_configurations=outcome.num_legal,
        num_solved=outcome.num_solved, seconds=outcome.seconds, limits=limits_of_plan(evaluation),
    )  # fmt: skip
    plan = plan_of(
        profile, cluster, configuration.layout, configuration.candidate.measurement, evaluation, batch, record
    )
    values = values_of(plan, family.settings, found.recompute, found.num_recomputed)
    values |= sharding_values(configuration.layout)
    words = words_of(values)
    return Recommendation(
        found=replace(found, evaluation=evaluation),
        plan=plan,
        values=values,
        words=words,
        command=[
            *environment_words(family.environment), "python", *with_configuration(sys.argv, words, keep_tuning=False)
        ],
        relative_error=2 * prices.host.relative_error,
        ends=(ends[0], ends[1]) if ends else (1.0, 1.0),
    )
