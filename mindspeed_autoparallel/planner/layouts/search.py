"""The whole search: every layout is solved, discarded by a proved bound, or ruled out with a reason.

When the best plan is no slower than the smallest remaining bound (see ``best_first``), it is optimal under the cost
model.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from math import inf

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.interrupts import Stopped
from mindspeed_autoparallel.planner.best_first import Progress, Proof, best_first, silent
from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.layouts.assembly import assemble_plan
from mindspeed_autoparallel.planner.layouts.bounds import step_bound_us
from mindspeed_autoparallel.planner.layouts.group_sizes import regrouped, three_chunks
from mindspeed_autoparallel.planner.layouts.layout_search import GROUP, MANY_LAYOUTS, LayoutSearch
from mindspeed_autoparallel.planner.layouts.layout_solver import LayoutResult, with_least_recompute
from mindspeed_autoparallel.planner.layouts.nothing_fits import NothingFits, too_full
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.plain_search import SHARE as PLAIN_SHARE
from mindspeed_autoparallel.planner.layouts.relaxations import relaxations_of
from mindspeed_autoparallel.planner.layouts.space import enumerate_layouts, unmet_ramp
from mindspeed_autoparallel.planner.layouts.tasks import Request, SolvedLayout
from mindspeed_autoparallel.planner.layouts.turns import likeliest_first, promise_us
from mindspeed_autoparallel.planner.layouts.workers import Workers, usable_cores
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Cluster, Plan
from mindspeed_autoparallel.spec.plan_records import Relaxation, Verdict

FIRST_SHARE, REGROUPED_SHARE = 0.8, 0.25
"""Share of the time for layouts with the smallest group size, if others may follow; share of
``SearchOptions.virtual_s`` that the others get in addition."""
RANKS_SHARE = 0.2
"""Share of the time for a first bound of every layout."""
FINISH_S, FINISH_SHARE = 1.0, 0.1
"""Alternatives are still evaluated after the time limit: for these seconds, or for this share of the limit
if longer."""
BOUNDS_SHARE = 0.1
"""Share of the time, at its end, for higher bounds of open layouts."""
MANY_OPERATIONS = 20_000
"""Forwards and backwards in one step of all layouts together; fewer do not justify another process."""


def search(
    profile: Profile,
    cluster: Cluster,
    global_batch_size: int,
    options: SearchOptions | None = None,
    *,
    progress: Progress = silent,
) -> Plan:
    """Return the fastest plan for the cluster, with its proof.

    Raises ``InfeasiblePlan`` (tightest stage, missing memory, smallest relaxation) or ``ConfigError``; an interrupt
    raises ``Stopped`` with the best plan so far.
    """
    options = options or SearchOptions()
    options.check(global_batch_size)
    started = time.monotonic()
    candidates, verdicts = enumerate_layouts(profile, cluster, global_batch_size, options.space, options.layouts)
    known = options.known
    if known is not None and known.layout not in [item.layout for item in candidates]:
        # The known plan has groups of another size than those that are tried first.
        candidates += enumerate_layouts(profile, cluster, global_batch_size, options.space, [known.layout])[0]
    if not candidates:
        raise _nothing_to_search(verdicts, global_batch_size, options)
    progress(f"{len(candidates)} layout{'s' * (len(candidates) != 1)} to search, {len(verdicts)} ruled out")
    request = Request(profile=profile, cluster=cluster, global_batch_size=global_batch_size, seed=options.seed)
    with Workers(request, _num_processes(candidates, options)) as workers:
        return _searched(workers, candidates, verdicts, options, started, progress)


def _num_processes(candidates: Sequence[Candidate], options: SearchOptions) -> int:
    operations = sum(2 * item.layout.num_virtual_stages * item.num_microbatches for item in candidates)
    return (options.num_workers or usable_cores()) if operations > MANY_OPERATIONS else 1


def _searched(
    workers: Workers,
    candidates: list[Candidate],
    verdicts: list[Verdict],
    options: SearchOptions,
    started: float,
    progress: Progress,
) -> Plan:
    """Return the plan of the best of ``candidates``; ``verdicts`` are those of all other layouts."""
    request, deadline = workers.request, started + options.time_limit_s
    candidates, full, of_full = too_full(candidates)
    verdicts = [*verdicts, *of_full]
    layout_search = _explored(workers, candidates, options, deadline, progress)
    ranked = _ranked(layout_search)
    if not ranked and layout_search.interrupt is not None:
        raise layout_search.interrupt
    if not ranked:
        raise NothingFits(
            request=request,
            space=options.space,
            without_plan=[*layout_search.without_plan, *full],
            verdicts=layout_search.verdicts,
        ).error()
    until = deadline + max(FINISH_S, FINISH_SHARE * options.time_limit_s)
    results = _evaluated_until(ranked[: 1 + options.top_k], until)
    best, best_plan = ranked[0].candidate, results[0].evaluation
    assert best_plan is not None
    step_us = best_plan.step_us
    bound_us = min(step_us, layout_search.settled_bound_us())
    relaxations: tuple[Relaxation, ...] = ()
    if options.with_relaxations and layout_search.interrupt is None and time.monotonic() < deadline:
        seconds = min(10.0, deadline - time.monotonic())
        relaxations = relaxations_of(best, best_plan.placement, step_us, time_limit_s=seconds, workers=workers)
    proof = Proof(step_us=step_us, lower_bound_us=bound_us, seconds=time.monotonic() - started)
    record = proof.record(
        num_configurations=len(layout_search.items) + len(verdicts),
        num_solved=len(ranked),
        verdicts=(*verdicts, *layout_search.verdicts),
        relaxations=relaxations,
    )
    progress(
        f"best: {best.layout.label()}, {step_us / 1000:.2f} ms, none below {bound_us / 1000:.2f} ms, "
        f"gap {proof.gap_fraction:.3%}, {proof.seconds:.1f} s"
    )
    others = [(found.candidate, result) for found, result in zip(ranked[1:], results[1:], strict=False)]
    plan = assemble_plan(best, results[0], others, record)
    plan = replace(
        plan,
        baselines=(*plan.baselines, *layout_search.plain.baseline()),
        search=replace(plan.search, seconds=time.monotonic() - started),
    )
    if layout_search.interrupt is not None:
        raise Stopped(plan, layout_search.interrupt)
    return plan


def _explore(
    workers: Workers,
    candidates: list[Candidate],
    options: SearchOptions,
    deadline: float,
    progress: Progress,
    known: Sequence[SolvedLayout] | None = None,
    known_us: float = inf,
) -> LayoutSearch:
    """Search ``candidates`` until all are settled or time is up.

    ``known``: plans of some of them, if other layouts were searched before; ``known_us``: the best step time of those.
    """
    bounds_s = BOUNDS_SHARE * max(0.0, deadline - time.monotonic())
    deadline -= bounds_s
    layout_search = LayoutSearch(
        candidates,
        [step_bound_us(item) for item in candidates],
        workers=workers,
        deadline=deadline,
        num_alternatives=options.top_k,
        progress=progress,
    )
    if len(candidates) >= MANY_LAYOUTS:
        promises = [promise_us(item) for item in candidates]
        layout_search.looks.many = True
        layout_search.items = likeliest_first(layout_search.items, promises, GROUP)
    layout_search.looks.virtual_s = options.virtual_s * (1 if known is None else REGROUPED_SHARE)
    layout_search.known_us, layout_search.bounds_s = known_us, bounds_s
    if options.known is not None and known is None:
        layout_search.begin_from(options.known)
    for item in known or ():
        layout_search.know(item.candidate, item.outcome)
    try:
        if options.layouts is None and known is None:
            layout_search.plain.run(layout_search.items, time.monotonic() + PLAIN_SHARE * options.time_limit_s)
        left = layout_search.bound_by_ranks(time.monotonic() + RANKS_SHARE * options.time_limit_s)
        layout_search.warm_up()
        best_first(layout_search, left, deadline=deadline, group_size=GROUP, progress=progress)
    except KeyboardInterrupt as error:
        layout_search.interrupt = error
        layout_search.stop(layout_search.unsettled())
    return layout_search


def _explored(
    workers: Workers, candidates: list[Candidate], options: SearchOptions, deadline: float, progress: Progress
) -> LayoutSearch:
    """Search ``candidates``, then other group sizes of the best interleaved layouts and three chunks in the best
    pipelines, within the time limit."""
    wanted = options.layouts is None and options.space.group_sizes
    if not (wanted and any(item.layout.schedule == "interleaved" for item in candidates)):
        return _explore(workers, candidates, options, deadline, progress)
    first_until = deadline - (1 - FIRST_SHARE) * options.time_limit_s
    found = _explore(workers, candidates, options, first_until, progress)
    if found.found and found.interrupt is None:
        more = _explore_neighbours(workers, _ranked(found), options, deadline, progress)
        found.items += more.items
        # Layouts that time left open have no useful bound: they are left out of the proof and listed as such.
        found.verdicts += [
            _left_out(verdict) if verdict.outcome == "unsolved" else verdict for verdict in more.verdicts
        ]
        found.found |= more.found
        found.interrupt = more.interrupt
    return found


def _left_out(verdict: Verdict) -> Verdict:
    reason = "time ended before this layout was settled: it is not part of the proof."
    return replace(verdict, outcome="excluded", reason=reason)


def _ranked(layout_search: LayoutSearch) -> list[SolvedLayout]:
    return sorted(layout_search.found.values(), key=lambda found: (found.step_us, found.candidate.layout.label()))


def _explore_neighbours(
    workers: Workers, ranked: list[SolvedLayout], options: SearchOptions, deadline: float, progress: Progress
) -> LayoutSearch:
    """Search other group sizes and three chunks of the best layouts found, for plans faster than the best one."""
    found = [(each.candidate, each.outcome.placement) for each in ranked if each.outcome.placement is not None]
    ramp = options.space.ramp
    known = [item for item in regrouped(workers, found) if not unmet_ramp(item.candidate.layout, ramp)]
    candidates = [item.candidate for item in known]
    if options.space.virtual_sizes is None and "virtual_size" not in options.space.held:
        request = workers.request
        layouts = three_chunks([(each.candidate.layout, each.step_us) for each in ranked], request.global_batch_size)
        candidates += enumerate_layouts(
            request.profile, request.cluster, request.global_batch_size, options.space, layouts
        )[0]
    return _explore(workers, candidates, options, deadline, progress, known, ranked[0].step_us)


def _evaluated_until(ranked: Sequence[SolvedLayout], until: float) -> list[LayoutResult]:
    """Return the first of ``ranked``, evaluated, and as many others as start before ``until``."""
    results: list[LayoutResult] = []
    for found in ranked:
        if not results or time.monotonic() <= until:
            assert found.outcome.placement is not None
            evaluation = with_least_recompute(found.candidate, found.outcome.placement)
            bound_us = min(found.outcome.lower_bound_us, evaluation.step_us)
            results.append(LayoutResult(lower_bound_us=bound_us, evaluation=evaluation))
    return results


def _nothing_to_search(verdicts: list[Verdict], global_batch_size: int, options: SearchOptions) -> ConfigError:
    kinds: dict[str, list[str]] = {}
    for verdict in verdicts:
        kinds.setdefault(re.sub(r"\d+", "#", verdict.reason), []).append(verdict.reason)
    common = sorted(kinds.values(), key=lambda reasons: (-len(reasons), reasons[0]))[:3]
    listed = (
        " ".join(f"({len(reasons)}x) {reasons[0]}" for reasons in common) or "the profile's sizes do not divide it."
    )
    virtual = options.space.virtual_sizes
    one_chunk = "" if virtual is None or 1 in virtual else "add 1 to --virtual-sizes, "
    return ConfigError(
        f"no layout is possible for this cluster and a global batch of {global_batch_size}: {listed} "
        f"To get one, {one_chunk}change the number of devices or the batch, or measure more sizes."
    )
