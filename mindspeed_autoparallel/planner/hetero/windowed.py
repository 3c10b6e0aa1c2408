"""Memory mode window with a solved pipeline: the step replayed with the encoders' batches inside the schedule.

It is tried with splits that were found for the other modes, which need not be the best for it. If such a choice wins,
every other choice in this mode is bounded too, for any split (``encoders_at_least_us``), and tried if it may be faster.
If none wins, the proof covers the other modes only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import inf

from mindspeed_autoparallel.cost.collectives import boundary_link, p2p_us
from mindspeed_autoparallel.planner.evaluate import Evaluation
from mindspeed_autoparallel.planner.hetero.assembly import Solved, reserved_by
from mindspeed_autoparallel.planner.hetero.backbone import BackboneSolver
from mindspeed_autoparallel.planner.hetero.device_work import own_work_at_least_us, share_us
from mindspeed_autoparallel.planner.hetero.encoder_costs import EncoderCosts
from mindspeed_autoparallel.planner.hetero.encoders import encoder_phase, macro_batches, tick_sizes
from mindspeed_autoparallel.planner.hetero.space import distinct_scales, layouts_at
from mindspeed_autoparallel.planner.hetero.tight import search_tight
from mindspeed_autoparallel.planner.stage_times import NS_PER_US, beside_blocks_ns
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.schedule.window import BackboneTimes, MacroBatchTimes, Tick, ticks_of, window_step_us
from mindspeed_autoparallel.spec import Layout, ModuleLayout
from mindspeed_autoparallel.spec.hetero import WINDOW, HeteroRecord


def encoders_at_least_us(
    ticks: Sequence[Tick], num_stages: int, link_us: float, encoders: Sequence[Sequence[MacroBatchTimes]]
) -> float:
    """Return the time that encoders add to a bound of the pipeline alone, for any split. ``ticks``: those of its
    schedule; ``link_us``: time of its longest message.

    No operation of a stage before a tick waits for an operation after it, so every chain of operations through the
    pipeline crosses each tick once. At a tick with transfers all stages synchronize: any later operation has waited for
    the transfers and for one stage's computation. The message that may overlap with it is subtracted.
    """
    total = 0.0
    for own in encoders:
        for k, batch in enumerate(own):
            encoding_us = batch.inputs_us + min(batch.forward_us) + batch.outputs_us
            if not k or num_stages == 1:
                total += encoding_us
            elif batch.inputs_us + batch.outputs_us > 0:
                total += max(0.0, encoding_us - link_us)
            returning_us = batch.gradients_us + min(batch.backward_us)
            if batch.last > ticks[-1].last_done or num_stages == 1:
                total += returning_us
            elif batch.gradients_us > 0:
                total += max(0.0, returning_us - link_us)
    return total


def longest_message_us(solver: BackboneSolver) -> float:
    """Return an upper bound of the time of messages between the backbone's stages."""
    layout, device = solver.candidate.layout, solver.candidate.profile.device
    blocks = [
        block
        for cost in solver.candidate.measurement.modules.values()
        for block in (cost.pre, *cost.distinct_layers, cost.post)
        if block is not None
    ]
    # Rows of other modules may travel together with the stream.
    size = sum(block.output_bytes for block in blocks)
    links = [
        boundary_link(layout, solver.candidate.cluster, device, stage) for stage in range(layout.num_virtual_stages - 1)
    ]
    return max((p2p_us(size, link) for link in links), default=0.0) + device.message_us(layout.schedule)


MOST_REPLAYS = 2000
"""Most replays of windows in one search."""
SOLVE_S = 5.0
"""Time limit for one pipeline, in seconds."""
WORTH = 0.01
"""Least gain, as a share of the step, for which a proved plan is replaced."""


def backbone_times(profile: Profile, layout: Layout, found: Evaluation, num_microbatches: int) -> BackboneTimes:
    """Return the pipeline of ``found`` as input of the replay."""
    beside_us = [time_ns / NS_PER_US for time_ns in beside_blocks_ns(profile.device, layout)]
    message_us = profile.device.message_us(layout.schedule)
    return BackboneTimes(
        forward_us=[stage.forward_us + more for stage, more in zip(found.stages, beside_us, strict=True)],
        backward_us=[stage.backward_us + more for stage, more in zip(found.stages, beside_us, strict=True)],
        link_us=[link + message_us for link in found.link_us],
        num_microbatches=num_microbatches,
        num_chunks=layout.virtual_size,
        microbatch_group_size=layout.microbatch_group_size,
        sends=profile.interleaved_sends if layout.virtual_size > 1 else "blocking",
    )


def window_choices(
    best: Solved, others: Sequence[Solved], costs: Sequence[Sequence[EncoderCosts]], deadline: float
) -> list[Solved]:
    """Return choices in mode window that are worth replacing ``best``, fastest first, with the splits of ``others``."""
    found: list[Solved] = []
    left, worth_us = MOST_REPLAYS, best.step_us * (1 - WORTH)
    for other in others:
        solver = other.solver
        layout = solver.candidate.layout
        if layout.paired or solver.generator or other.result.evaluation is None:
            continue
        for chosen in product(*sizes_beside(solver, costs)):
            left -= 1
            if left < 0 or time.monotonic() > deadline:
                break
            made = _made(other, chosen, worth_us)
            if made is not None and made.step_us < worth_us:
                found.append(made)
    return sorted(found, key=lambda made: made.step_us)


def sizes_beside(
    solver: BackboneSolver, costs: Sequence[Sequence[EncoderCosts]]
) -> list[list[tuple[EncoderCosts, ModuleLayout]]]:
    """Return every encoder's possible sizes in this mode with one layout of the backbone."""
    candidate = solver.candidate
    scales = distinct_scales(candidate.num_microbatches)
    return [[(cost, sizes) for cost in own for sizes in layouts_at(cost, candidate, 1, scales)] for own in costs]


def explore_window(
    solvers: Sequence[BackboneSolver], costs: Sequence[Sequence[EncoderCosts]], best: Solved, deadline: float
) -> tuple[float, list[Solved]]:
    """Try every choice in this mode that may be faster than ``best``: return a bound of all of them, and the faster
    ones, fastest first. When time runs out, the pipeline alone bounds the rest."""
    least_us, found = best.step_us, list[Solved]()
    for solver in solvers:
        if solver.candidate.layout.paired or solver.generator:
            continue
        for chosen in product(*sizes_beside(solver, costs)):
            if time.monotonic() > deadline:
                return min(least_us, *(left.cheap_bound_us for left in solvers)), found
            known_us = min([best.step_us, *(made.step_us for made in found)])
            bound_us, made = _explored(solver, chosen, best.record.balance, known_us, deadline)
            least_us = min(least_us, bound_us)
            found += [made] if made is not None and made.step_us < known_us else []
    return least_us, sorted(found, key=lambda made: made.step_us)


def _explored(
    solver: BackboneSolver,
    chosen: Sequence[tuple[EncoderCosts, ModuleLayout]],
    balance: str,
    known_us: float,
    deadline: float,
) -> tuple[float, Solved | None]:
    """Return a bound of one choice, tightened only while it is below ``known_us``; and its plan."""
    candidate = solver.candidate
    batches = [macro_batches(costs, sizes, candidate, balance=balance) for costs, sizes in chosen]
    phases = tuple(encoder_phase(costs, sizes, candidate, memory=WINDOW, balance=balance) for costs, sizes in chosen)
    ticks, after_us = ticks_of(*tick_sizes(candidate)), sum(p.reduction_us + p.optimizer_us for p in phases)
    added_us = after_us
    added_us += encoders_at_least_us(ticks, candidate.layout.pipeline_size, longest_message_us(solver), batches)
    own_us = own_work_at_least_us(solver.work, ticks, batches) + solver.tail_us + after_us
    bound_us = max(solver.cheap_bound_us + added_us, own_us)
    record = HeteroRecord(memory=WINDOW, balance=balance, encoders=phases)
    reserved = reserved_by(record)
    if bound_us < known_us:
        bound_us = max(bound_us, solver.bound_us(reserved, deadline) + added_us)
    if bound_us >= known_us:
        return bound_us, None
    result = solver.solve(reserved, max(0.1, min(SOLVE_S, deadline - time.monotonic())))
    tight = None if result.proved_infeasible else search_tight(solver, reserved, 0, deadline)
    if result.proved_infeasible or (tight is not None and tight.proved_infeasible):
        return inf, None
    if tight is not None:
        result = tight
        solver.solved.append((reserved, result))
    bound_us = max(bound_us, result.lower_bound_us + added_us)
    if result.evaluation is None:
        return bound_us, None
    solved = Solved(solver=solver, record=record, result=result, step_us=inf, lower_bound_us=bound_us)
    return bound_us, _made(solved, chosen, known_us)


def _made(other: Solved, chosen: Sequence[tuple[EncoderCosts, ModuleLayout]], below_us: float) -> Solved | None:
    """Return the choice, or ``None`` if it does not fit, or provably takes ``below_us`` or more: then nothing is
    replayed."""
    solver, evaluation = other.solver, other.result.evaluation
    assert evaluation is not None
    candidate, balance = solver.candidate, other.record.balance
    phases = tuple(encoder_phase(costs, sizes, candidate, memory=WINDOW, balance=balance) for costs, sizes in chosen)
    record = HeteroRecord(memory=WINDOW, balance=balance, encoders=phases)
    # Peaks and limits are those of the solve, next to the memory it reserved.
    own = reserved_by(other.record)  # of a split that the tight search found
    before = next((reserved for reserved, result in solver.solved if result is other.result), own)
    if not solver.still_fits(other.result, before, reserved_by(record)):
        return None
    batches = [macro_batches(costs, sizes, candidate, balance=balance) for costs, sizes in chosen]
    backbone = backbone_times(candidate.profile, candidate.layout, evaluation, candidate.num_microbatches)
    added_us = encoders_at_least_us(
        ticks_of(*backbone.sizes), backbone.num_stages, max(backbone.link_us, default=0.0), batches
    )
    added_us += sum(phase.reduction_us + phase.optimizer_us for phase in phases)
    if evaluation.step_us + added_us >= below_us:
        return None
    # The replayed step, without the pipeline and the encoders' forwards, backwards and transfers.
    interleaving_us = window_step_us(backbone, batches) - evaluation.step.pipeline_us - share_us(0, batches)
    record = replace(record, interleaving_us=interleaving_us)
    step_us = evaluation.step_us + record.total_us
    lower_us = min(step_us, other.result.lower_bound_us + added_us)
    return replace(other, record=record, step_us=step_us, lower_bound_us=lower_us)
