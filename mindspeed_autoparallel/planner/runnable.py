"""Repeats a search with whole layers recomputed if the host cannot run its plan's recompute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mindspeed_autoparallel.planner.best_first import Progress, silent
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Plan

Runs = Callable[[Plan], bool]
"""Whether the host has flags for the recompute of a plan."""


def runnable(
    search: Callable[[Profile], Plan], profile: Profile, runs: Runs | None, progress: Progress = silent
) -> Plan:
    """Return the plan of ``search``, of whole layers alone where ``runs`` refuses the best of all; ``None``: it never
    does."""
    plan = search(profile)
    if runs is None or runs(plan):
        return plan
    progress("the best plan recomputes parts of layers, for which the host has no flag: trying whole layers only")
    plan = search(profile.with_recompute(("none", "full")))
    scope = "; ".join(filter(None, (plan.search.scope, "layers recomputed whole or not at all")))
    return replace(plan, search=replace(plan.search, scope=scope))
