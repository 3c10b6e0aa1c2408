"""Stage three: the search, and a check of its results by the host's own validation."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.layouts.assembly import alternative_of
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.planner.tuner.candidates import Space, enumerate_space
from mindspeed_autoparallel.planner.tuner.search import Outcome, ranked
from mindspeed_autoparallel.runtime.features.apply_plan.applicable import refusal
from mindspeed_autoparallel.runtime.features.auto_tuning.argv import illegal, with_environment
from mindspeed_autoparallel.runtime.features.auto_tuning.by_samples import SampledSearch
from mindspeed_autoparallel.runtime.features.auto_tuning.recommendation import Recommendation, Recommended, recommend
from mindspeed_autoparallel.runtime.features.auto_tuning.request import TuningRequest
from mindspeed_autoparallel.runtime.features.auto_tuning.source import TunedProfiles
from mindspeed_autoparallel.runtime.features.auto_tuning.user_baseline import user_baseline
from mindspeed_autoparallel.runtime.megatron.layout_arguments import sizes
from mindspeed_autoparallel.spec.plan import Plan

NUM_RECOMMENDED = 3
_NOT_DRAWN = "with --auto-parallel-data its steps are not drawn"
_SPARE = 9
"""Candidates beyond the recommended ones, because the host's own validation may refuse some."""


def search(request: TuningRequest, profiles: TunedProfiles, arguments: argparse.Namespace) -> Recommended:
    """Return the three fastest configurations that fit and that the host's ``validate_args`` accepts."""
    cluster, batch = request.cluster, request.global_batch_size
    refused: dict[str, str] = {}

    space, outcome, top = _searched(request, profiles, arguments, refused)

    def legal(candidates: Iterable[Recommendation]) -> Iterator[Recommendation]:
        for pick in candidates:
            with with_environment(pick.found.configuration.variant.environment):
                reason = illegal(arguments, pick.values, request.num_ranks)
            reason = f"Megatron refuses it: {reason}" if reason else _not_applied(request, pick, arguments)
            if reason:
                refused[f"{pick.plan.layout.label()} {pick.title}".strip()] = reason
            else:
                yield pick

    picks = list(itertools.islice(legal(top), NUM_RECOMMENDED))
    if all(pick.modelled for pick in picks):
        # The last place goes to the fastest that needs no modelled switch.
        plain = legal(pick for pick in top if not pick.modelled)
        picks = [*picks, *itertools.islice(plain, 1)]
        picks = [*picks[: NUM_RECOMMENDED - 1], *picks[NUM_RECOMMENDED - 1 :][-1:]]
    if not picks:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise ConfigError(f"every configuration found is refused: {reasons}")
    return Recommended(
        picks=[replace(pick, plan=_beside(pick, picks)) for pick in picks],
        outcome=outcome,
        space=space,
        refused=refused,
        baseline=_NOT_DRAWN if request.sample_data else user_baseline(arguments, space, cluster, batch),
    )


def _not_applied(request: TuningRequest, pick: Recommendation, arguments: argparse.Namespace) -> str:
    """Return why training with the flags of ``pick`` fails although validation passes; empty if it does not fail."""
    given = {**vars(arguments), **sizes(pick.plan), **pick.found.configuration.variant.settings}
    return refusal(pick.plan, request.description, argparse.Namespace(**given), request.work_dir)


def _searched(
    request: TuningRequest, profiles: TunedProfiles, arguments: argparse.Namespace, refused: dict[str, str]
) -> tuple[Space, Outcome, Sequence[Recommendation]]:
    """Return the searched space and its best configurations, ranked by the distribution of the samples if given.

    ``refused`` receives those whose steps are unknown for samples that differ.
    """
    count = NUM_RECOMMENDED + _SPARE
    if request.sample_data is not None:
        sampled = SampledSearch(request, profiles, request.sample_data, arguments)
        found = sampled.take(count)
        refused |= sampled.not_drawn
        return found
    cluster, batch, dimensions = request.cluster, request.global_batch_size, profiles.plan.dimensions
    space = enumerate_space(profiles.variants, cluster, batch, dimensions)
    outcome = ranked(space, dimensions, count)
    return space, outcome, [recommend(request, one, profiles.costs.prices, outcome, arguments) for one in outcome.top]


def _beside(pick: Recommendation, picks: Sequence[Recommendation]) -> Plan:
    """Return the plan of ``pick`` with the other recommendations as its alternatives."""
    others = [
        alternative_of(
            other.plan.layout,
            ModulePlacement.of_plan(other.plan),
            other.plan.memory,
            other.plan.mean_us,
            other.found.lower_bound_us if other.plan.data is None else None,
        )
        for other in picks
        if other is not pick
    ]
    return replace(pick.plan, alternatives=tuple(others))
