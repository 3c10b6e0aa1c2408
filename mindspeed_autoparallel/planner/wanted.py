"""The best plan of all that a training wants at once: a host's splits, encoders' own layouts, drawn samples.

The one composition of the searches: `plan`, ``--auto-parallel-mm`` and `replan` call it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mindspeed_autoparallel.data.distribution import Distribution
from mindspeed_autoparallel.planner.best_first import Progress, silent
from mindspeed_autoparallel.planner.hetero.compare import Comparison, compare, encoder_space, one_stage_layouts
from mindspeed_autoparallel.planner.hetero.encoders import MEMORY_MODES
from mindspeed_autoparallel.planner.hetero.search import search_hetero
from mindspeed_autoparallel.planner.host_splits import Splits
from mindspeed_autoparallel.planner.layouts.given_splits import search_given
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.spread.choose import SpreadOptions, choose_plan
from mindspeed_autoparallel.planner.spread.hetero_choice import compare_by_data
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Cluster, Layout, Plan


@dataclass(frozen=True, kw_only=True)
class HeteroOptions:
    """How encoders with layouts of their own run."""

    balance: str = "local"
    """``--hetero-balance``."""
    encoder_pipelines: bool = True
    """Whether the host's encoders can run in stages."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The training to plan."""

    cluster: Cluster
    global_batch_size: int
    options: SearchOptions
    splits: Splits | None = None
    """What the host can run of the model's splits; ``None``: all."""
    runs: Callable[[Plan], bool] | None = None
    """Whether the host has flags for the recompute of a plan without hetero layouts; ``None``: for any."""
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

    def of_all_kinds(one: Profile, layouts: list[Layout] | None) -> Plan:
        own = replace(options, layouts=layouts, with_relaxations=options.with_relaxations and layouts is None)
        if wanted.splits is not None:
            return search_given(one, cluster, batch, wanted.splits, own, progress=progress)
        return search(one, cluster, batch, own, progress=progress)

    def searched(one: Profile, layouts: list[Layout] | None) -> Plan:
        plan = of_all_kinds(one, layouts)
        if wanted.runs is None or wanted.runs(plan):
            return plan
        progress("the best plan recomputes parts of some layers, which no flag can give: whole layers alone are tried")
        plan = of_all_kinds(one.with_recompute(("none", "full")), layouts)
        scope = "; ".join(filter(None, (plan.search.scope, "layers recomputed whole or not at all")))
        return replace(plan, search=replace(plan.search, scope=scope))

    if hetero is None:
        return searched(profile, None) if wanted.data is None else choose_plan(profile, *wanted.data, searched)
    balance, stages = hetero.balance, hetero.encoder_pipelines
    if wanted.data is None:
        return compare(
            profile,
            cluster,
            batch,
            options,
            progress=progress,
            balance=balance,
            splits=wanted.splits,
            encoder_pipelines=stages,
        )

    def with_encoders(one: Profile, layouts: list[Layout] | None) -> Plan:
        if wanted.splits is not None and layouts is None:
            layouts = one_stage_layouts(one, cluster, batch)
        return search_hetero(
            one,
            cluster,
            batch,
            replace(options, layouts=layouts),
            progress=progress,
            memory_modes=MEMORY_MODES,
            balance=balance,
            encoder_space=encoder_space(stages),
        )

    return compare_by_data(profile, *wanted.data, searched, with_encoders)
