"""What the best layout would gain if a limit moved: solved again, not estimated."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.layouts.layout_search import EFFORT, FIRST_EFFORT
from mindspeed_autoparallel.planner.layouts.layout_solver import solve_layout
from mindspeed_autoparallel.planner.layouts.options import SolveOptions
from mindspeed_autoparallel.planner.layouts.virtual_layouts import improve_layout, takes_long
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Cluster
from mindspeed_autoparallel.spec.plan import Relaxation
from mindspeed_autoparallel.units import GIB


def relaxations_of(
    profile: Profile,
    cluster: Cluster,
    global_batch_size: int,
    best: Candidate,
    step_us: float,
    *,
    time_limit_s: float,
    seed: int,
) -> tuple[Relaxation, ...]:
    """Return one GiB more per device; twice the microbatches (gain per sample). In the best plan's layout."""
    limit = cluster.memory_limit_bytes or profile.device.memory_capacity_bytes
    doubled = replace(best, num_microbatches=2 * best.num_microbatches)
    found = []
    for change, where, candidate, batch, share in (
        ("one more GiB per device", replace(cluster, memory_limit_bytes=limit + GIB), best, global_batch_size, 1.0),
        ("twice the microbatches", cluster, doubled, 2 * global_batch_size, 0.5),
    ):
        options = SolveOptions(time_limit_s=time_limit_s / 2, seed=seed, effort=EFFORT / 2)
        if takes_long(profile.model, candidate):
            # A plan is all that is asked for, no proof.
            result = improve_layout(profile, where, candidate, batch, replace(options, effort=FIRST_EFFORT))
        else:
            result = solve_layout(profile, where, candidate, batch, options)
        if result.evaluation is None:
            found.append(Relaxation(change=change, step_us=None, gain_fraction=None))
            continue
        new_us = result.evaluation.step.total_us
        if share == 1.0:
            # The plan that is known fits more memory, too.
            new_us = min(new_us, step_us)
        gain = 1 - share * new_us / step_us if step_us else 0.0
        found.append(Relaxation(change=change, step_us=new_us, gain_fraction=max(0.0, gain)))
    return tuple(found)
