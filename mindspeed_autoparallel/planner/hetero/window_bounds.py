"""Memory mode window: a lower bound of the time that encoders add to a step, for any split of the pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_autoparallel.cost.collectives import p2p_us
from mindspeed_autoparallel.cost.topology import boundary_link
from mindspeed_autoparallel.planner.hetero.backbone import BackboneSolver
from mindspeed_autoparallel.planner.hetero.encoder_costs import EncoderCosts
from mindspeed_autoparallel.schedule.window import MacroBatchTimes, Tick
from mindspeed_autoparallel.spec import ModuleLayout

Chosen = Sequence[tuple[EncoderCosts, ModuleLayout]]
"""Costs and sizes of every encoder."""


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
    layout, device = solver.candidate.layout, solver.backbone.device
    blocks = [
        block
        for cost in solver.candidate.measurement.modules.values()
        for block in (cost.pre, *cost.distinct_layers, cost.post)
        if block is not None
    ]
    # Rows of other modules may travel together with the stream.
    size = sum(block.output_bytes for block in blocks)
    links = [boundary_link(layout, solver.cluster, device, stage) for stage in range(layout.num_virtual_stages - 1)]
    return max((p2p_us(size, link) for link in links), default=0.0) + device.message_us(layout.schedule)
