"""Repeats a search with whole layers recomputed if the host cannot run its plan's recompute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.best_first import Progress, silent
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Plan

Runs = Callable[[Plan], bool]
"""Whether the host has flags for the recompute of a plan."""
_SCOPE = "layers recomputed whole or not at all"


def runnable(
    search: Callable[[Profile], Plan], profile: Profile, runs: Runs | None, progress: Progress = silent
) -> Plan:
    """Return the plan of ``search``, of whole layers alone where ``runs`` refuses the best of all; ``None``: it never
    does."""
    whole = profile.with_recompute(("none", "full"))
    try:
        plan = search(profile)
    except InfeasiblePlan:
        if runs is None or whole == profile:
            raise
        # Its limit may be that of a plan without flags.
        return _of_whole_layers(search, whole)
    if runs is None or runs(plan):
        return plan
    progress("the best plan recomputes parts of layers, for which the host has no flag: trying whole layers only")
    return _of_whole_layers(search, whole)


def _of_whole_layers(search: Callable[[Profile], Plan], profile: Profile) -> Plan:
    try:
        plan = search(profile)
    except InfeasiblePlan as error:
        raise InfeasiblePlan(f"{error} That is with {_SCOPE}.") from error
    scope = "; ".join(filter(None, (plan.search.scope, _SCOPE)))
    return replace(plan, search=replace(plan.search, scope=scope))
