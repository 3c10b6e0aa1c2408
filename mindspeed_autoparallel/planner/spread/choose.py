"""Choice of a plan by the distribution of samples: the fastest one whose probability of running out of memory is low.

Steps are drawn for the layouts with the smallest expected steps. Another plan may be better: no proof covers it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from mindspeed_autoparallel.data.distribution import Distribution
from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.planner.best_first import Progress, silent
from mindspeed_autoparallel.planner.spread.drawn_steps import PlanUnderData
from mindspeed_autoparallel.planner.spread.others import in_whole_search
from mindspeed_autoparallel.planner.spread.samples import MAX_LAYOUTS, Judged, Samples, SpreadOptions
from mindspeed_autoparallel.planner.spread.scaled import planned_at
from mindspeed_autoparallel.planner.spread.waiting import expected_steps
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Layout, Plan

Search = Callable[[Profile, "list[Layout] | None"], Plan]
"""Searches a profile, over all layouts or only the given ones."""
_HOPELESS = 1.25
"""Ratio to the best safe step above which layouts are not drawn."""
_NUM_HALVINGS = 5
_LATE = "the time limit ended before all layouts were drawn that may be faster"


def choose_plan(
    profile: Profile,
    data: Distribution,
    options: SpreadOptions,
    search: Search,
    until: float = math.inf,
    judged: list[Judged] | None = None,
    progress: Progress = silent,
) -> Plan:
    """Return the plan with the smallest mean step among those with a small enough probability of running out of memory.

    Steps are drawn for the best plans for the mean sample, then for the layouts with the smallest expected steps; those
    without a safe plan get splits that hold larger microbatches. Raises ``InfeasiblePlan`` if no plan is safe.
    ``until``: when, by ``time.monotonic``, no more layouts are drawn once a safe plan is known; ``judged``: gets them.
    ``progress``: gets a line of each.
    """
    samples = Samples.of(profile, data, options)
    at_mean = samples.mean_profile()
    best = search(at_mean, None)
    layouts = [best.layout, *(other.layout for other in best.alternatives)]
    half = (time.monotonic() + until) / 2
    expected, is_whole = expected_steps(profile, best, data, samples.factors, options.is_balanced, half)
    ordered = [(0.0, layout) for layout in layouts] + [item for item in expected if item[1] not in layouts]
    judged, unsafe = [] if judged is None else judged, list[Judged]()
    fastest: Judged | None = None
    not_drawn: ConfigError | None = None
    for number, (expected_us, layout) in enumerate(ordered):
        is_late = fastest is not None and time.monotonic() >= until
        if is_late or (fastest and (number >= MAX_LAYOUTS or expected_us > _HOPELESS * fastest.mean_us)):
            break
        try:
            judged.append(samples.judge(best if layout == best.layout else search(at_mean, [layout])))
        except InfeasiblePlan:
            continue
        except ConfigError as error:
            not_drawn = error  # such as batches that packs of this micro batch size cannot hold
            continue
        progress(_line(judged[-1]))
        if not judged[-1].is_safe:
            unsafe.append(judged[-1])
            if fastest is not None and judged[-1].mean_us > fastest.mean_us:
                continue  # so are its safe plans
            judged += safe_splits(samples, at_mean, layout, search, progress, only_first=True)
        fastest = fastest_of(judged)
    if fastest is None:
        raise not_drawn if not judged and not_drawn is not None else samples.none_is_safe(judged)
    num_safe = len({one.plan.layout.label() for one in judged} - {one.plan.layout.label() for one in unsafe})
    for one in sorted(unsafe, key=lambda one: one.mean_us):
        is_needed = one.mean_us <= fastest.mean_us or num_safe <= options.top_k
        if not is_needed or (is_late := is_late or time.monotonic() >= until):
            break
        found = safe_splits(samples, at_mean, one.plan.layout, search, progress)
        judged += found
        fastest, num_safe = fastest_of(judged) or fastest, num_safe + bool(found)
    notes = (*samples.factors.notes, *[_LATE] * (is_late or not is_whole))
    noted = replace(samples, factors=replace(samples.factors, notes=notes))
    return in_whole_search(noted.with_record(fastest, judged), best)


def _line(one: Judged) -> str:
    """Return the drawn steps of a plan in words."""
    split = " with memory for larger microbatches" * one.holds_larger
    unsafe = "" if one.is_safe else ", may run out of memory"
    return f"{one.plan.layout.label()}{split}: {one.mean_us / 1000:.2f} ms in drawn steps on average{unsafe}"


def fastest_of(judged: Sequence[Judged]) -> Judged | None:
    """Return the safe plan with the smallest mean drawn step; ``None`` without a safe one."""
    safe = [one for one in judged if one.is_safe]
    return min(safe, key=lambda one: (one.mean_us, one.plan.layout.label()), default=None)


def safe_splits(
    samples: Samples,
    at_mean: Profile,
    layout: Layout,
    search: Search,
    progress: Progress = silent,
    *,
    only_first: bool = False,
) -> list[Judged]:
    """Return the safe splits of a layout, the fastest last; with ``only_first`` the first one found.

    Bisects the microbatch size that must fit, from the mean one to slightly more than the largest.
    """
    progress(f"{layout.label()}: searching splits with memory for larger microbatches")
    found, low, high = list[Judged](), 0.0, 1.0
    # A split that fits the largest everywhere is tried last, if no smaller one is safe; as the only one, first.
    for left in reversed(range(_NUM_HALVINGS)):
        share = 1.0 if high == 1.0 and left == (_NUM_HALVINGS - 1) * only_first else (low + high) / 2
        try:
            plan = planned_at(at_mean, search(samples.mean_profile(share), [layout]))
        except InfeasiblePlan:
            high = share
            continue
        memory = samples.chance(plan, PlanUnderData(samples.profile, plan, samples.factors))
        if memory.probability <= samples.options.max_oom_probability:
            found.append(replace(samples.judge(plan, memory), holds_larger=True))
            progress(_line(found[-1]))
            high = share
            if only_first:
                break
        else:
            low = share
    return found
