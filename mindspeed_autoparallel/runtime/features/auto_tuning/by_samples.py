"""Recommendations for samples that differ: ordered by drawn steps, and only those that are safe from running out of
memory."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.rank_memory import point_of
from mindspeed_autoparallel.planner.spread.samples import Judged, Samples
from mindspeed_autoparallel.planner.tuner.candidates import ProfileVariant, Space, enumerate_space
from mindspeed_autoparallel.planner.tuner.placements import SolvedConfiguration
from mindspeed_autoparallel.planner.tuner.search import Outcome, ranked
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.runtime.features.auto_tuning.recommendation import Recommendation, recommend
from mindspeed_autoparallel.runtime.features.auto_tuning.request import TuningRequest
from mindspeed_autoparallel.runtime.features.auto_tuning.source import TunedProfiles
from mindspeed_autoparallel.runtime.features.sample_data import SampleData
from mindspeed_autoparallel.spec import Plan

_Key = tuple[str, tuple[str, ...]]
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Sizes of the microbatch that must fit, from the mean (0) to the largest with some slack (1); tried in order until
enough plans are safe."""


class SampledSearch:
    """Searches the profiles of a tuning at the mean sample of ``sample_data``, and ranks the results by drawn steps."""

    def __init__(
        self, request: TuningRequest, profiles: TunedProfiles, sample_data: SampleData, arguments: argparse.Namespace
    ) -> None:
        self._request, self._profiles, self._arguments = request, profiles, arguments
        self._variants = {_key(variant): variant for variant in profiles.variants}
        self._samples = {
            key: Samples.of(variant.profile, sample_data.distribution, sample_data.options)
            for key, variant in self._variants.items()
        }
        self._judged: dict[tuple[_Key, str], tuple[Recommendation, Judged]] = {}
        self.not_drawn: dict[str, str] = {}
        """Configurations whose steps are not modelled for samples that differ, with the reason."""

    def take(self, count: int) -> tuple[Space, Outcome, list[Recommendation]]:
        """Return the space and the outcome at the mean sample, and the safe configurations by their mean drawn step.

        ``count``: number of configurations to search for. If fewer are safe than are recommended, the search also
        covers configurations that hold larger samples. Raises ``InfeasiblePlan`` if none is safe.
        """
        first: tuple[Space, Outcome] | None = None
        for share in SHARES:
            try:
                space, outcome = self._searched(share, count)
            except InfeasiblePlan:
                if not share:
                    raise
                continue
            first = first or (space, outcome)
            for found in outcome.top:
                self._judge(found, first[1])  # a bound where larger samples must fit is none where they need not
            if sum(judged.is_safe for _, judged in self._judged.values()) >= min(count, 3):
                break
        assert first is not None  # the mean microbatch was searched, or the loop raised
        return (*first, list(self._safe()))

    def _searched(self, share: float, count: int) -> tuple[Space, Outcome]:
        request, dimensions = self._request, self._profiles.plan.dimensions
        variants = tuple(self._scaled(variant, share) for variant in self._variants.values())
        space = enumerate_space(variants, request.cluster, request.global_batch_size, dimensions)
        return space, ranked(space, dimensions, count)

    def _judge(self, found: SolvedConfiguration, outcome: Outcome) -> None:
        configuration = found.configuration
        variant = self._variants[_key(configuration.variant)]
        at_mean = self._scaled(variant, 0.0)
        measurement = point_of(at_mean.profile, configuration.layout)
        assert measurement is not None  # the search used the same point
        candidate = replace(configuration.candidate, profile=at_mean.profile, measurement=measurement)
        batch, cluster = self._request.global_batch_size, self._request.cluster
        evaluation = evaluate(at_mean.profile, cluster, configuration.layout, found.placement, batch)
        again = replace(configuration, variant=at_mean, candidate=candidate)
        mean = replace(found, configuration=again, evaluation=evaluation)
        pick = recommend(self._request, mean, self._profiles.costs.prices, outcome, self._arguments)
        key = (_key(variant), _plan_key(pick.plan))
        if key in self._judged:
            return
        try:
            self._judged[key] = (pick, self._samples[_key(variant)].judge(pick.plan))
        except ConfigError as error:
            self.not_drawn[f"{pick.plan.layout.label()} {pick.title}".strip()] = str(error)

    def _safe(self) -> Iterator[Recommendation]:
        if not self._judged:
            raise InfeasiblePlan(
                f"steps of unequal samples are not modelled for any configuration found: {'; '.join(self.not_drawn)}."
            )
        everything = [judged for _, judged in self._judged.values()]
        safe = [(pick, judged, key) for (key, _), (pick, judged) in self._judged.items() if judged.is_safe]
        if not safe:
            raise next(iter(self._samples.values())).none_is_safe(everything)
        for pick, judged, key in sorted(safe, key=lambda item: (item[1].mean_us, item[0].plan.layout.label())):
            samples = self._samples[key]
            yield replace(pick, plan=samples.with_record(judged, everything), samples=samples)

    def _scaled(self, variant: ProfileVariant, share: float) -> ProfileVariant:
        samples = self._samples[_key(variant)]

        def scaled(profile: Profile) -> Profile:
            return replace(samples, profile=profile).mean_profile(share)

        interval = (scaled(variant.interval[0]), scaled(variant.interval[1])) if variant.interval else None
        return replace(variant, profile=scaled(variant.profile), interval=interval)


def _key(variant: ProfileVariant) -> _Key:
    return variant.name, variant.modelled


def _plan_key(plan: Plan) -> str:
    """Return a plan's identity: layout, split and recompute."""
    return plan.layout.label() + repr([(stage.layers, stage.recompute) for stage in plan.stages])
