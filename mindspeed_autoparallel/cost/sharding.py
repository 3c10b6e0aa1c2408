"""ZeRO-2 and ZeRO-3 through Megatron's FSDP: bytes kept, gathered and waiting, and the exposed traffic.

Formulas F1-F5 in docs/cost-model.md, derived from megatron.core.distributed.fsdp (0.16 to 0.19). One pipeline stage; a
unit is a layer; embedding, head and final norm belong to no unit and stay gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mindspeed_autoparallel.cost.collectives import all_gather_us, reduce_scatter_us
from mindspeed_autoparallel.cost.placed import PlacedBlock, states_of
from mindspeed_autoparallel.profiles import LinkTier
from mindspeed_autoparallel.spec import Layout, Sharding


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Times of one block per microbatch, in microseconds; computing and the link overlap."""

    forward_us: float
    backward_us: float
    gather_us: float = 0.0
    """Of its parameters, before each forward and each backward; 0 if they stay gathered."""
    reduce_us: float = 0.0
    """Of its gradients, after each backward."""


def sharded_state(blocks: Sequence[PlacedBlock], layout: Layout) -> dict[str, int]:
    """Return F1: bytes alive during the whole step. A block outside all units has its shard and the whole."""
    assert layout.sharding is not None
    terms = {"parameters": 0, "gradients": 0, "optimizer": 0}
    for block in blocks:
        for state, group in states_of((block,), layout):
            if layout.sharding.parameters:
                terms["parameters"] += _share(state.parameter_bytes, group)
                terms["parameters"] += 0 if block.is_layer else state.parameter_bytes
            else:
                terms["parameters"] += state.parameter_bytes
            terms["gradients"] += _share(state.gradient_bytes, group)
            terms["optimizer"] += state.optimizer_unshardable_bytes + _share(state.optimizer_bytes, group)
    return terms


@dataclass(frozen=True, kw_only=True)
class Reach:
    """The range of blocks that are gathered while each block runs, itself included."""

    last: tuple[int, ...]
    """By block: the last one gathered in its forward."""
    first: tuple[int, ...]
    """By block: the first one gathered in its backward."""


def reach_of(blocks: Sequence[PlacedBlock], sharding: Sharding) -> Reach:
    """Return F2: gathers reach ahead, in backward to blocks before, until they cover half a communication unit.

    Embedding and head lie before all units in Megatron's order: their gathers reach ahead in forward only.
    """
    sizes = [_elements(block) if block.is_layer else 0 for block in blocks]
    last, first = list[int](), list[int]()
    for place, block in enumerate(blocks):
        end, ahead = place, 0
        while end + 1 < len(sizes) and ahead < sharding.communication_unit // 2:
            end += 1
            ahead += sizes[end]
        last.append(end)
        begin, ahead = place, 0
        while begin > 0 and ahead < sharding.communication_unit // 2 and block.is_layer:
            begin -= 1
            ahead += sizes[begin]
        first.append(begin)
    return Reach(last=tuple(last), first=tuple(first))


def gathered_bytes(blocks: Sequence[PlacedBlock], sharding: Sharding) -> dict[str, list[int]]:
    """Return F2: parameters of units gathered while each block runs, forward (``F``) and backward (``B``)."""
    if not sharding.parameters:
        return {kind: [0] * len(blocks) for kind in "FB"}
    sizes = [_parameter_bytes(block) if block.is_layer else 0 for block in blocks]
    reach = reach_of(blocks, sharding)
    return {
        "F": [sum(sizes[place : last + 1]) for place, last in enumerate(reach.last)],
        "B": [sum(sizes[first : place + 1]) for place, first in enumerate(reach.first)],
    }


def waiting_bytes(blocks: Sequence[PlacedBlock], sharding: Sharding) -> list[int]:
    """Return F3: bytes of whole gradients while each block's backward runs: its own, and those queued by later blocks.

    A block joins the queue of reductions at its end; older ones are freed only while more than a communication unit of
    elements is queued.
    """
    found: list[int] = []
    queue: list[tuple[int, int]] = []
    for block in reversed(blocks):
        own = (_elements(block), block.cost.dense.gradient_bytes + block.cost.expert.gradient_bytes)
        found.append(own[1] + sum(size_bytes for _, size_bytes in queue))
        while sum(elements for elements, _ in queue) > sharding.communication_unit:
            queue.pop(0)
        queue.append(own)
    return found[::-1]


def units_of(
    blocks: Sequence[PlacedBlock], times_us: Sequence[tuple[float, float]], layout: Layout, link: LinkTier
) -> list[Unit]:
    """Return F4: computing and collectives of each block per microbatch; ``times_us``: forward and backward."""
    assert layout.sharding is not None
    units: list[Unit] = []
    for block, (forward_us, backward_us) in zip(blocks, times_us, strict=True):
        states = tuple(states_of((block,), layout))
        gathers = layout.sharding.parameters and block.is_layer
        units.append(
            Unit(
                forward_us=forward_us,
                backward_us=backward_us,
                gather_us=sum(all_gather_us(state.parameter_bytes, group, link) for state, group in states if gathers),
                reduce_us=sum(reduce_scatter_us(state.gradient_bytes, group, link) for state, group in states),
            )
        )
    return units


def once_us(blocks: Sequence[PlacedBlock], layout: Layout, link: LinkTier) -> float:
    """Return F4: gathers of a step that no unit repeats in every microbatch: after the optimizer, before the first
    forward."""
    assert layout.sharding is not None
    return sum(
        all_gather_us(state.parameter_bytes, group, link)
        for block in blocks
        if not (layout.sharding.parameters and block.is_layer)
        for state, group in states_of((block,), layout)
        if state.gradient_bytes or layout.sharding.parameters
    )


def passes_us(
    blocks: Sequence[PlacedBlock], units: Sequence[Unit], sharding: Sharding, hidden_share: float
) -> tuple[float, float]:
    """Return forward and backward of a microbatch, between F5 (``hidden_share`` 1) and nothing hidden (0)."""
    forward_us, backward_us = microbatch_us(units, reach_of(blocks, sharding))
    gathers = sum(unit.gather_us for unit in units)
    shown = 1 - hidden_share
    return (
        hidden_share * forward_us + shown * (sum(unit.forward_us for unit in units) + gathers),
        hidden_share * backward_us + shown * (sum(unit.backward_us + unit.reduce_us for unit in units) + gathers),
    )


def microbatch_us(units: Sequence[Unit], reach: Reach) -> tuple[float, float]:
    """Return F5: forward and backward of one microbatch with two concurrent queues, computing and the link.

    A gather is requested when a block begins, and starts once the blocks before it are computed; a reduction starts
    when the block has ended. The link takes one at a time, in that order. The backward ends with its last reduction.
    """
    lanes = _Lanes()
    for place, unit in enumerate(units):
        lanes.run(place, range(place, reach.last[place] + 1), units, unit.forward_us)
    forward_us = lanes.computed
    for place in reversed(range(len(units))):
        unit = units[place]
        lanes.run(place, range(place, reach.first[place] - 1, -1), units, unit.backward_us)
        if unit.reduce_us:
            lanes.link = max(lanes.link, lanes.computed) + unit.reduce_us
    return forward_us, max(lanes.computed, lanes.link) - forward_us


@dataclass
class _Lanes:
    """Times at which computing and the link become free, in microseconds."""

    computed: float = 0.0
    link: float = 0.0
    ready: dict[int, float] = field(default_factory=dict[int, float])
    """Time at which a gathered unit's parameters are complete."""

    def run(self, place: int, wanted: Iterable[int], units: Sequence[Unit], time_us: float) -> None:
        """Run the block at ``place`` after the gathers of ``wanted`` are requested; then release its parameters."""
        for other in wanted:
            if units[other].gather_us and other not in self.ready:
                self.link = max(self.link, self.computed) + units[other].gather_us
                self.ready[other] = self.link
        self.computed = max(self.computed, self.ready.pop(place, 0.0)) + time_us


def _elements(block: PlacedBlock) -> int:
    return block.cost.dense.num_parameters + block.cost.expert.num_parameters


def _parameter_bytes(block: PlacedBlock) -> int:
    return block.cost.dense.parameter_bytes + block.cost.expert.parameter_bytes


def _share(size_bytes: int, group: int) -> int:
    return -(-size_bytes // group)
