"""The best plan under all of a training's requests: a host's splits, encoders' own layouts, drawn samples.

The one composition of the searches: `plan`, ``--auto-parallel-mm`` and `replan` call it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial

from mindspeed_autoparallel.data.distribution import Distribution
from mindspeed_autoparallel.planner.best_first import Progress, labelled, silent
from mindspeed_autoparallel.planner.candidate import Splits
from mindspeed_autoparallel.planner.hetero.compare import Comparison, HeteroOptions, best_of_both, one_stage_layouts
from mindspeed_autoparallel.planner.hetero.encoders import SUMMED_MODES
from mindspeed_autoparallel.planner.hetero.search import EncoderSpace, search_hetero
from mindspeed_autoparallel.planner.hetero.space import generator_of, split_modules
from mindspeed_autoparallel.planner.layouts.given_splits import search_given
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.runnable import Runs, runnable
from mindspeed_autoparallel.planner.spread.hetero_choice import compare_by_data
from mindspeed_autoparallel.planner.spread.interrupted import choose_until_interrupted
from mindspeed_autoparallel.planner.spread.samples import SpreadOptions
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Cluster, Layout, Plan
from mindspeed_autoparallel.spec.hetero import MEMORY_MODES

_FIRST_SHARE, _LATER_SHARE = 0.5, 0.125
"""Shares of the time left: the search of all layouts for the mean sample, and each search of one layout after it."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The training to plan."""

    cluster: Cluster
    global_batch_size: int
    options: SearchOptions
    splits: Splits | None = None
    """What the host can run of the model's splits; ``None``: all."""
    runs: Runs | None = None
    """``None``: the host has flags for any recompute."""
    hetero: HeteroOptions | None = None
    """Encoders' own layouts are searched, too, and compared with the best plan without; ``None``: they are not."""
    data: tuple[Distribution, SpreadOptions] | None = None
    """How samples differ; ``None``: they are planned as equal."""


def find_plan(profile: Profile, wanted: Wanted, progress: Progress = silent) -> Plan | Comparison:
    """Return the best plan; with ``wanted.hetero`` the best of both kinds.

    Raises ``InfeasiblePlan`` (``OnlyHomogeneous`` where encoders' own layouts alone have no plan), ``ConfigError``, and
    ``Stopped`` with the best plan so far at an interrupt.
    """
    cluster, batch, options, hetero = wanted.cluster, wanted.global_batch_size, wanted.options, wanted.hetero
    options.check(batch)
    has_equal_samples = wanted.data is None
    # Beside the search with encoders' own layouts the other one gets half of the time.
    plain_s = options.time_limit_s if hetero is None else options.time_limit_s / 2
    started = time.monotonic()
    plain_until, until = started + plain_s, started + options.time_limit_s

    def of_all_kinds(one: Profile, layouts: list[Layout] | None, shown: Progress) -> Plan:
        own = replace(options, layouts=layouts, with_relaxations=options.with_relaxations and layouts is None)
        own = replace(own, time_limit_s=plain_s if has_equal_samples else _share_of_left(plain_until, layouts))
        if wanted.splits is not None:
            return search_given(one, cluster, batch, wanted.splits, own, progress=shown)
        return search(one, cluster, batch, own, progress=shown)

    def searched(one: Profile, layouts: list[Layout] | None) -> Plan:
        shown = _shown(progress, wanted, layouts, "mean sample")
        return runnable(lambda each: of_all_kinds(each, layouts, shown), one, wanted.runs, shown)

    if hetero is None:
        if wanted.data is None:
            return searched(profile, None)
        return choose_until_interrupted(profile, *wanted.data, searched, until, progress)
    split_modules(profile)  # no search if the model has no encoder

    def with_encoders(one: Profile, layouts: list[Layout] | None) -> Plan:
        left_s = max(1.0, until - time.monotonic()) if has_equal_samples else _share_of_left(until, layouts)
        shown = _shown(progress, wanted, layouts, "largest microbatches")
        # Steps of drawn samples do not replay a generator's exchanges.
        space = EncoderSpace(generator=has_equal_samples)
        if not hetero.encoder_pipelines:
            space = replace(space, pipeline_sizes=(1,))
        if wanted.splits is not None and layouts is None:
            # The backbone has one stage, unless a generator has a separate layout.
            one_stage = one_stage_layouts(one, cluster, batch)
            if has_equal_samples and generator_of(one) is not None:
                space = replace(space, inside=one_stage)
            else:
                layouts = one_stage
        search_one = partial(
            search_hetero,
            cluster=cluster,
            global_batch_size=batch,
            options=replace(options, layouts=layouts, time_limit_s=left_s),
            progress=shown,
            memory_modes=MEMORY_MODES if has_equal_samples else SUMMED_MODES,
            balance=hetero.balance,
            encoder_space=space,
        )
        return runnable(search_one, one, wanted.runs, shown)

    if wanted.data is None:
        return best_of_both(profile, partial(searched, profile, None), partial(with_encoders, profile, None))
    return compare_by_data(profile, *wanted.data, searched, with_encoders, plain_until, progress)


def _shown(progress: Progress, wanted: Wanted, layouts: list[Layout] | None, what: str) -> Progress:
    """Return the progress of one search. Of the searches for drawn samples only that of all layouts, for ``what``, has
    lines: the choice reports the others."""
    if wanted.data is None:
        return progress
    return labelled(progress, f"{what}: ") if layouts is None else silent


def _share_of_left(until: float, layouts: list[Layout] | None) -> float:
    """Return the limit in seconds of one of the searches for drawn samples, which end together."""
    share = _FIRST_SHARE if layouts is None else _LATER_SHARE
    return max(1.0, share * (until - time.monotonic()))
