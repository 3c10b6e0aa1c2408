"""Combined 1F1B: a forward and a backward of two microbatches take turns layer by layer, so that exchanges of one hide
behind computing of the other. Formula O2: what a pair saves.
"""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_autoparallel.cost.overlap import Pass, paired_savings_us
from mindspeed_autoparallel.cost.placed import PlacedBlock


def layer_saving_us(ahead: PlacedBlock, behind: PlacedBlock) -> float:
    """Return what the forward of ``ahead`` and the backward of ``behind`` take less beside each other, where all of it
    can be counted on."""
    forward = Pass(
        computing_us=max(0.0, ahead.cost.forward_us - ahead.cost.forward_exchange_us),
        exchange_us=min(ahead.cost.forward_us, ahead.cost.forward_exchange_us),
    )
    backward = Pass(
        computing_us=max(0.0, behind.cost.backward_us - behind.cost.backward_exchange_us),
        exchange_us=min(behind.cost.backward_us, behind.cost.backward_exchange_us),
    )
    return sum(paired_savings_us(forward, backward))


def pair_saving_us(ahead: Sequence[PlacedBlock], behind: Sequence[PlacedBlock]) -> float:
    """Return what the forward of one chunk and the backward of another save.

    The first layer of ``ahead`` runs beside the last of ``behind`` and so on; layers left over, embedding and output
    layer run alone (Megatron's ``TransformerModelChunkSchedulePlan.run``).
    """
    forwards = [block for block in ahead if block.is_layer]
    backwards = [block for block in reversed(behind) if block.is_layer]
    return sum(layer_saving_us(*pair) for pair in zip(forwards, backwards, strict=False))


def pair_savings_us(stages: Sequence[Sequence[PlacedBlock]], num_stages: int) -> dict[tuple[int, int], float]:
    """Return ``pair_saving_us`` of every two chunks of a rank, by virtual stage of the forward and of the backward."""
    return {
        (v, w): pair_saving_us(stages[v], stages[w])
        for v in range(len(stages))
        for w in range(v % num_stages, len(stages), num_stages)
    }
