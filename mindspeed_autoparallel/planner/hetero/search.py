"""The best layouts of encoders and backbone together, with a bound that holds for all of them.

A step is the encoders' phases plus the backbone's pipeline next to the memory they hold; ``choice_search`` searches
both.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.planner.best_first import Progress, Proof, best_first, silent
from mindspeed_autoparallel.planner.candidate import limit_of
from mindspeed_autoparallel.planner.hetero.assembly import Solved, assemble, reserved_by
from mindspeed_autoparallel.planner.hetero.backbone import BackboneSolver, backbone_profile, outside_pipeline_fits
from mindspeed_autoparallel.planner.hetero.choice_search import NOT_FOUND, ChoiceSearch
from mindspeed_autoparallel.planner.hetero.encoder_costs import EncoderCosts
from mindspeed_autoparallel.planner.hetero.generator import can_exchange, meeting
from mindspeed_autoparallel.planner.hetero.space import costs_of, generator_of, phase_of, split_modules
from mindspeed_autoparallel.planner.hetero.windowed import explore_window, window_choices
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.space import enumerate_layouts
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Cluster, Layout, ModuleLayout, Plan
from mindspeed_autoparallel.spec.hetero import MEMORY_MODES, WINDOW, EncoderPhase, HeteroRecord
from mindspeed_autoparallel.spec.plan_records import Verdict
from mindspeed_autoparallel.units import format_bytes

SOLVE_S = 5.0
"""Time limit for each of the two additional plans, in seconds."""


def with_parts_of_the_gain(
    best: Solved, costs: Sequence[Sequence[EncoderCosts]], balance: str, limit_bytes: int
) -> HeteroRecord:
    """Return ``best``'s record with the steps of the same layouts at batch scale 1, and with activations kept; if that
    does not fit, at batch scale 1 in the plan's memory mode."""
    kept = _step_us(best, costs, balance, limit_bytes, scale_one=False)
    scale_one = _step_us(best, costs, balance, limit_bytes, scale_one=True)
    again = None
    if scale_one is None and best.record.memory == "recompute":
        again = _step_us(best, costs, balance, limit_bytes, scale_one=True, memory="recompute")
    return replace(
        best.record,
        kept_us=best.step_us if best.record.memory == "upfront" else kept,
        scale_one_us=scale_one,
        scale_one_again_us=again,
    )


def _step_us(
    best: Solved,
    costs: Sequence[Sequence[EncoderCosts]],
    balance: str,
    limit_bytes: int,
    *,
    scale_one: bool,
    memory: str = "upfront",
) -> float | None:
    solver = best.solver
    phases: list[EncoderPhase] = []
    for phase, own in zip(best.record.encoders, solver.all_costs(costs), strict=True):
        sizes: ModuleLayout = replace(phase.layout, micro_batch_scale=1) if scale_one else phase.layout
        cost = next(
            one
            for one in own
            if (one.point.tensor_size, one.point.context_size) == (sizes.tensor_size, sizes.context_size)
        )
        phases.append(phase_of(cost, sizes, solver.candidate, memory=memory, balance=balance))
    record = HeteroRecord(memory=memory, balance=balance, encoders=tuple(phases))
    reserved = reserved_by(record)
    found = solver.solve(reserved, SOLVE_S).evaluation
    if found is None or not outside_pipeline_fits(found, limit_bytes, reserved, record.transient_bytes):
        return None
    return found.step_us + record.total_us


@dataclass(frozen=True, kw_only=True)
class EncoderSpace:
    """The encoder sizes to try."""

    tensor_sizes: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    """Tensor sizes to try, by the encoder's name; all if it is missing."""
    pipeline_sizes: Sequence[int] = tuple(range(1, 9))
    """Stages of an encoder's pipeline, if they divide the devices and each holds a layer."""
    generator: bool = True
    """Whether to search separate layouts of a generator, in addition to the end of the backbone's pipeline."""
    inside: Sequence[Layout] | None = None
    """Layouts of backbones that hold a generator; ``None``: all searched layouts; empty: none."""


def search_hetero(
    profile: Profile,
    cluster: Cluster,
    global_batch_size: int,
    options: SearchOptions | None = None,
    *,
    progress: Progress = silent,
    memory_modes: Sequence[str] = MEMORY_MODES,
    balance: str = "local",
    encoder_space: EncoderSpace | None = None,
) -> Plan:
    """Return the fastest plan in which every encoder has a separate layout, with its proof.

    ``memory_modes``: window is tried with the splits found for the others; if it wins, the bound covers it, too. Raises
    ``InfeasiblePlan`` or ``ConfigError``.
    """
    options = options or SearchOptions()
    options.check(global_batch_size)
    started = time.monotonic()
    encoders, _ = split_modules(profile)
    sizes = encoder_space or EncoderSpace()
    costs = [
        costs_of(profile, module, cluster, sizes.tensor_sizes.get(module.name), sizes.pipeline_sizes)[0]
        for module in encoders
    ]
    solvers, ruled_out = _all_solvers(profile, cluster, global_batch_size, options, sizes)
    progress(f"hetero: {len(solvers)} backbone layouts, {sum(map(len, costs))} encoder sizes to search")
    deadline = started + options.time_limit_s
    proved_modes = [mode for mode in memory_modes if mode != WINDOW]
    choices = ChoiceSearch(costs, proved_modes, balance, options, deadline=deadline, progress=progress)
    best_first(choices, choices.start(solvers), deadline=deadline, progress=progress)
    if not choices.solved:
        raise _infeasible(profile, cluster, choices)
    ranking = sorted(choices.solved, key=lambda found: (found.step_us, found.layout.label()))
    best = ranking[0]
    bound_us = min([best.step_us, *choices.open_us, *(found.lower_bound_us for found in ranking)])
    if WINDOW in memory_modes:
        windowed = window_choices(best, ranking, costs, max(deadline, time.monotonic() + 1.0))
        if windowed:
            window_us, faster = explore_window(solvers, costs, windowed[0], max(deadline, time.monotonic() + 1.0))
            bound_us = min(bound_us, window_us)
            windowed = [*faster, *windowed]
        ranking = [*windowed[:1], *ranking]
        best = ranking[0]
    verdicts = (*ruled_out, *choices.verdicts.values())
    proof = Proof(step_us=best.step_us, lower_bound_us=bound_us, seconds=time.monotonic() - started)
    record = proof.record(
        num_configurations=len(verdicts), num_solved=len({found.solver.label for found in ranking}), verdicts=verdicts
    )
    progress(
        f"best hetero: {best.layout.label()}, {best.step_us / 1000:.2f} ms, gap {proof.gap_fraction:.3%}, "
        f"{proof.seconds:.1f} s"
    )
    best = replace(best, record=with_parts_of_the_gain(best, costs, balance, limit_of(profile.device, cluster)))
    return assemble(profile, best, _others(ranking, options.top_k), record)


def _all_solvers(
    profile: Profile, cluster: Cluster, global_batch_size: int, options: SearchOptions, sizes: EncoderSpace
) -> tuple[list[BackboneSolver], list[Verdict]]:
    """Return the solvers of backbones with and without a generator; see ``_solvers``."""
    inside = options if sizes.inside is None else replace(options, layouts=sizes.inside)
    solvers, ruled_out = _solvers(profile, cluster, global_batch_size, inside) if inside.layouts != [] else ([], [])
    generator = generator_of(profile) if sizes.generator and profile.memory_semantics != "mindspeed" else None
    if generator is None:
        return solvers, ruled_out
    try:
        own, _ = costs_of(profile, generator, cluster, sizes.tensor_sizes.get(generator.name), sizes.pipeline_sizes)
        beside, _ = _solvers(profile, cluster, global_batch_size, options, own)
    except ConfigError:
        # Without separate sizes, or layouts for the rest alone, it is part of the pipeline.
        if not solvers:
            raise
        return solvers, ruled_out
    return [*solvers, *beside], ruled_out


def _solvers(
    profile: Profile,
    cluster: Cluster,
    global_batch_size: int,
    options: SearchOptions,
    generator: Sequence[EncoderCosts] = (),
) -> tuple[list[BackboneSolver], list[Verdict]]:
    """Return a solver for every layout of the backbone, and verdicts on the ruled-out ones. ``generator``: its sizes,
    if it is not part of the backbone. Raises ``ConfigError``."""
    backbone = backbone_profile(profile, with_generator=not generator)
    candidates, ruled_out = enumerate_layouts(backbone, cluster, global_batch_size, options.space, options.layouts)
    if not candidates:
        reasons = "; ".join(sorted({verdict.reason for verdict in ruled_out})[:3]) or "no size divides the cluster."
        raise ConfigError(f"no backbone layout is possible for a global batch of {global_batch_size}: {reasons}")
    return [
        BackboneSolver(candidate, options.seed, generator)
        for candidate in (map(meeting, filter(can_exchange, candidates)) if generator else candidates)
    ], ruled_out


def _others(ranking: list[Solved], top_k: int) -> list[Solved]:
    """Return the next best choices, one per layout of the backbone."""
    seen = {ranking[0].solver.label}
    found: list[Solved] = []
    for other in ranking[1:]:
        label = other.solver.label
        if label not in seen:
            seen.add(label)
            found.append(other)
    return found[:top_k]


def _infeasible(profile: Profile, cluster: Cluster, choices: ChoiceSearch) -> InfeasiblePlan:
    limit = limit_of(profile.device, cluster)
    late = any(verdict.reason != NOT_FOUND for verdict in choices.verdicts.values() if verdict.outcome == "unsolved")
    if late:
        return InfeasiblePlan("no hetero plan was found in time, and none was proved impossible. Raise the time limit.")
    unsure = " (not proved)" if choices.open_us else ""
    held = (
        ""
        if choices.least_reserved_bytes is None
        else (f" The encoders alone hold {format_bytes(choices.least_reserved_bytes)} or more on every device.")
    )
    return InfeasiblePlan(
        f"no hetero plan fits in {format_bytes(limit)} per device: in no layout does the backbone fit next to the "
        f"encoders, with any recomputation{unsure}.{held} Use more devices, a smaller global batch, or plan without "
        "--hetero-parallel."
    )
