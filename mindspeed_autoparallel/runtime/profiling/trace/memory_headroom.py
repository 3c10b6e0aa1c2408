"""Tells whether a layout has so much memory headroom that nothing has to be computed again, whatever is chosen."""

from __future__ import annotations

from collections import Counter

from mindspeed_autoparallel.profiles import layer_block
from mindspeed_autoparallel.profiles.records import BlockTrace

_MOST_HELD = 3
"""Microbatches in flight times layers of a rank, over the layers of the model, at most. 1F1B: ``P`` microbatches of
``ceil(L / P)`` layers are less than ``2 L``. Interleaved: fewer than ``(v + 1) P`` chunks of ``ceil(L / (P v))`` layers
are less than ``2 (v + 1) / v L``."""


def fits_without_recompute(trace: BlockTrace, headroom_bytes: int) -> bool:
    """Say whether every split of the model into even stages fits ``headroom_bytes`` without recompute.

    The whole model's state on one rank, nothing of it sharded, and as many activations as the deepest pipeline holds:
    no recompute kind is faster than none, so none has to be known there.
    """
    ratio = trace.bytes_per_trained_parameter
    total = float(trace.host_bytes + trace.workspace_bytes + trace.batch_bytes[0])
    for module in trace.modules:
        numbers = Counter(map(layer_block, module.kinds))
        blocks = module.blocks
        for name, block in blocks.items():
            state = sum(
                kind.parameter_bytes + kind.num_trained * (ratio.gradient + ratio.optimizer)
                for kind in (block.parameters.dense, block.parameters.expert)
            )
            total += state * numbers.get(name, 1)
        for name, number in numbers.items():
            held = blocks[name].saved_bytes + blocks[name].output_bytes + blocks["pre"].saved_bytes
            total += _MOST_HELD * number * (held + module.side_bytes[0])
        total += blocks["post"].saved_bytes
        total += max(max(block.forward_peak_bytes, block.backward_peak_bytes) for block in blocks.values())
    return total <= headroom_bytes
