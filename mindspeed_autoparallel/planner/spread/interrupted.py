"""The best plan so far of an interrupted choice, with its drawn steps and its probability of running out of memory."""

from __future__ import annotations

import math

from mindspeed_autoparallel.data.distribution import Distribution
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.interrupts import Stopped
from mindspeed_autoparallel.planner.best_first import Progress, silent
from mindspeed_autoparallel.planner.spread.choose import Search, choose_plan, fastest_of
from mindspeed_autoparallel.planner.spread.others import in_whole_search
from mindspeed_autoparallel.planner.spread.samples import Judged, Samples, SpreadOptions
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Layout, Plan


def choose_until_interrupted(
    profile: Profile,
    data: Distribution,
    options: SpreadOptions,
    search: Search,
    until: float = math.inf,
    progress: Progress = silent,
) -> Plan:
    """Return and raise as ``choose_plan``; an interrupt raises ``Stopped`` with the fastest safe plan drawn so far.

    Without one it has the plan for the mean sample, whose record gives its probability of running out of memory.
    """
    whole, judged = list[Plan](), list[Judged]()

    def remembered(one: Profile, layouts: list[Layout] | None) -> Plan:
        try:
            plan = search(one, layouts)
        except Stopped as stopped:
            if layouts is None:
                whole.append(stopped.plan)
            raise
        if layouts is None:
            whole.append(plan)
        return plan

    try:
        return choose_plan(profile, data, options, remembered, until, judged, progress)
    except KeyboardInterrupt as interrupt:
        if not whole:
            raise
        samples = Samples.of(profile, data, options)
        try:
            best = fastest_of(judged) or samples.judge(whole[0])
        except ConfigError:
            raise interrupt from None  # steps of its layout are not modelled
        plan = in_whole_search(samples.with_record(best, judged or [best]), whole[0])
        raise Stopped(plan, interrupt) from interrupt
