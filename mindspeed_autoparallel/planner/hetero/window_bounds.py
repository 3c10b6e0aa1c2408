"""Memory mode window: what encoders add to a step at least, whatever the pipeline's split."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_autoparallel.cost.collectives import p2p_us
from mindspeed_autoparallel.cost.topology import boundary_link
from mindspeed_autoparallel.planner.hetero.backbone import BackboneSolver
from mindspeed_autoparallel.planner.hetero.encoder_costs import EncoderCosts
from mindspeed_autoparallel.schedule.window import MacroBatchTimes, Tick
from mindspeed_autoparallel.spec import ModuleLayout

Chosen = Sequence[tuple[EncoderCosts, ModuleLayout]]
"""Of every encoder."""


def encoders_at_least_us(
    ticks: Sequence[Tick], num_stages: int, link_us: float, encoders: Sequence[Sequence[MacroBatchTimes]]
) -> float:
    """Return what encoders add to a bound of the pipeline alone, whatever its split. ``ticks``: of its schedule;
    ``link_us``: of its longest message.

    Nothing a stage does before a tick waits for what another does after it, so every chain of operations through the
    pipeline crosses each tick once. Where something travels all stages meet there: whoever is behind the tick has
    waited for the transfers and for one stage's computation. The message that may have crossed beside it is taken off.
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
    """Return a time that no message between the backbone's stages exceeds."""
    layout, device = solver.candidate.layout, solver.backbone.device
    blocks = [
        block
        for cost in solver.candidate.measurement.modules.values()
        for block in (cost.pre, *cost.distinct_layers, cost.post)
        if block is not None
    ]
    # Beside the stream, other modules' rows may travel.
    size = sum(block.output_bytes for block in blocks)
    links = [boundary_link(layout, solver.cluster, device, stage) for stage in range(layout.num_virtual_stages - 1)]
    return max((p2p_us(size, link) for link in links), default=0.0) + device.message_us(layout.schedule)
