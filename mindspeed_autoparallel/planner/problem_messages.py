"""The messages between stages of a layout in a split problem: their times, and the memory they hold.

Rows count layers only; what was received and not sent is added to the limits, from below or from above.
"""

from __future__ import annotations

from mindspeed_autoparallel.cost.collectives import boundary_link, p2p_us
from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.placement import prediction_may_be_apart
from mindspeed_autoparallel.planner.split.model.problem import fullest_moments
from mindspeed_autoparallel.planner.stage_times import NS_PER_US, block_ns
from mindspeed_autoparallel.planner.variable_data import mean_factors
from mindspeed_autoparallel.schedule import Program, in_flight

Moments = tuple[tuple[int, ...], ...]
"""Microbatches in flight of each chunk of a stage, at every moment that may be fullest."""


def moments_of(program: Program, num_chunks: int, *, safe: bool) -> tuple[Moments, ...]:
    """Return by stage the microbatches in flight of each chunk at every moment that may be fullest; where ``safe``,
    one that has the most of each chunk."""
    if num_chunks == 1:
        return tuple(((held,),) for held in in_flight(program))
    found = fullest_moments(program)
    if safe:
        return tuple((tuple(map(max, zip(*moments, strict=True))),) for moments in found)
    return found


def latest_start(candidate: Candidate, cutoff_us: float) -> int:
    """Return last virtual stage at which the last module can begin in a pipeline faster than the cutoff.

    Begun at stage d, its layers share the remaining stages: one rank does at least an even share, rounded up, if only
    of the shortest layers.
    """
    profile, layout = candidate.profile, candidate.layout
    module = profile.model.modules[-1]
    factor = mean_factors(profile.variable_data).get(module.name, 1.0)
    runs = candidate.measurement.modules[module.name].runs(0, module.num_layers)
    times = [(block_ns(layer, factor), number) for layer, number in runs]
    layer_us = min(time_ns for time_ns, _ in times) / NS_PER_US
    work_us = sum(number * time_ns for time_ns, number in times) / NS_PER_US
    num = layout.num_virtual_stages
    for start in range(num):
        ranks = min(layout.pipeline_size, num - start)
        share_us = max(work_us / ranks, layer_us * -(-module.num_layers // ranks))
        if candidate.num_microbatches * share_us >= cutoff_us:
            return max(0, start - 1)
    return num - 1


def message_allowance(candidate: Candidate, moments: tuple[Moments, ...], latest: int, *, safe: bool) -> list[int]:
    """Return by rank what the limit grows by; may be negative.

    Rows count layers only, while a microbatch in flight keeps what was received and not what was sent (M6). At most
    this where ``safe`` is off, at least this where it is on.
    """
    layout, measurement = candidate.layout, candidate.measurement
    smallest, largest = _message_sizes(candidate, latest)
    received = [0, *(largest if safe else smallest)]
    sent = [*(smallest if safe else largest), 0]
    sides = sum(cost.side.total_bytes for cost in measurement.modules.values())
    allowance = []
    for rank in range(layout.pipeline_size):
        chunks = range(rank, layout.num_virtual_stages, layout.pipeline_size)
        grown = max(
            sum(held * (sent[v] - received[v]) for held, v in zip(moment, chunks, strict=True))
            for moment in moments[rank]
        )
        if safe:
            # Whatever the schedule still refers to from the microbatch before.
            grown -= sum(2 * received[v] + ([*largest, 0])[v] + measurement.batch.total_bytes for v in chunks)
            grown -= sum((held + 1) * sides for held in moments[rank][0])
        allowance.append(grown)
    return allowance


def _message_sizes(candidate: Candidate, latest: int) -> tuple[list[int], list[int]]:
    """Return bytes over each boundary, at least and at most: from stage ``latest`` on it is the last module's
    output."""
    model, layout = candidate.profile.model, candidate.layout
    costs = [candidate.measurement.modules[module.name] for module in model.modules]
    sizes = [cost.layer.output_bytes for cost in costs]
    most = sum(max(cost.layer.output_bytes, cost.post.output_bytes if cost.post else 0) for cost in costs)
    # Only where the last module reads all others does nothing else travel beside its own output.
    joined = set(model.modules[-1].predecessors) == {module.name for module in model.modules[:-1]}
    alone = [joined and v >= latest for v in range(layout.num_virtual_stages - 1)]
    largest = [sizes[-1] if only else most for only in alone]
    ahead = costs[-1].prediction
    if ahead is not None and prediction_may_be_apart(model, layout):
        largest[-1] = max(largest[-1], ahead.output_bytes)
    return [sizes[-1] if only else min(sizes) for only in alone], largest


def link_times(candidate: Candidate, latest: int) -> tuple[int, ...]:
    """Return the cheapest message over each boundary, in nanoseconds: from stage ``latest`` on it is the last
    module's."""
    layout, device = candidate.layout, candidate.profile.device
    smallest, _ = _message_sizes(candidate, latest)
    links = []
    for v in range(layout.num_virtual_stages - 1):
        message_us = p2p_us(smallest[v], boundary_link(layout, candidate.cluster, device, v))
        links.append(round(message_us * NS_PER_US) + round(device.message_us(layout.schedule) * NS_PER_US))
    return tuple(links)
