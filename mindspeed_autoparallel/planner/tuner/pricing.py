"""Times for traced blocks: operators from the knowledge base, collectives from fitted links, calls from the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from mindspeed_autoparallel.cost.collectives import all_gather_us, all_reduce_us, p2p_us, reduce_scatter_us
from mindspeed_autoparallel.planner.tuner.host import BlockSums, HostModel
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.profiles.device import LinkTier
from mindspeed_autoparallel.profiles.knowledge import KnowledgeBase, Operator
from mindspeed_autoparallel.profiles.knowledge.estimate import Estimate, estimate
from mindspeed_autoparallel.profiles.records import DIRECTIONS, BlockTrace, CollectiveCalls, ModuleRecord


def calls_of(traces: Iterable[BlockTrace]) -> dict[Operator, int]:
    """Return every operator of ``traces`` with its number of calls."""
    total: dict[Operator, int] = {}
    for trace in traces:
        for module in trace.modules:
            for block in module.calls.values():
                for direction in DIRECTIONS:
                    for place, count in block.of(direction).operators:
                        operator = trace.operators[place]
                        total[operator] = total.get(operator, 0) + max(1, round(count))
    return total


@dataclass(kw_only=True)
class Prices:
    """Looks up prices, once per operator."""

    base: KnowledgeBase
    device: str
    software: str
    tiers: Mapping[str, LinkTier]
    """``intra`` and ``inter``."""
    devices_per_node: int
    host: HostModel = field(default_factory=HostModel)
    _known: dict[Operator, Estimate | None] = field(default_factory=dict)

    def sums(self, trace: BlockTrace, module: ModuleRecord, block: str, direction: str) -> BlockSums:
        """Return the sums of one block; unknown operators count only as calls."""
        calls = module.calls[block].of(direction)
        total = 0.0
        for place, count in calls.operators:
            found = self.operator(trace.operators[place])
            total += found.time_us * count if found is not None else 0.0
        return BlockSums(
            operators_us=total, num_calls=calls.num_calls, communication_us=self._communication_us(calls.collectives)
        )

    def _communication_us(self, collectives: Iterable[CollectiveCalls]) -> dict[str, float]:
        total: dict[str, float] = {}
        for item in collectives:
            total[item.name] = total.get(item.name, 0.0) + self.collective_us(item) * item.count
        return total

    def operator(self, operator: Operator) -> Estimate | None:
        """Return the measured or interpolated time; ``None`` if there is neither."""
        if operator not in self._known:
            self._known[operator] = estimate(self.base, self.device, self.software, operator)
        return self._known[operator]

    def collective_us(self, call: CollectiveCalls) -> float:
        """Return the time of one call: ring formulas C1 to C3 on the slowest link of its group."""
        nodes = {rank // self.devices_per_node for rank in call.ranks}
        link = self.tiers["intra" if len(nodes) == 1 else "inter"]
        return collective_us(call.name, call.size_bytes, len(call.ranks), link)

    def timed(self, trace: BlockTrace, at: MeasuredAt) -> BlockTrace:
        """Return ``trace`` with ``forward_us`` and ``backward_us`` in every block, in the form of a measurement."""

        def time_us(module: ModuleRecord, block: str, direction: str) -> float:
            return self.host.block_us(block, direction, at, self.sums(trace, module, block, direction))

        modules = (
            replace(
                module,
                blocks={
                    name: replace(
                        block,
                        forward_us=time_us(module, name, "forward"),
                        backward_us=time_us(module, name, "backward"),
                    )
                    for name, block in module.blocks.items()
                },
            )
            for module in trace.modules
        )
        return replace(trace, modules=tuple(modules))


def collective_us(kind: str, size_bytes: int, num_ranks: int, link: LinkTier) -> float:
    """Return the time of one call in microseconds.

    ``kind``: one of ``profiles.device.COLLECTIVES``; ``size_bytes``: the largest tensor of the call on one rank.
    """
    if kind == "all_reduce":
        return all_reduce_us(size_bytes, num_ranks, link)
    if kind == "all_gather":
        return all_gather_us(size_bytes, num_ranks, link)
    if kind in ("reduce_scatter", "all_to_all"):
        cost = link.of(kind)
        if kind == "all_to_all":
            steps = num_ranks - 1
            return steps * cost.latency_us + size_bytes * steps / num_ranks / cost.bytes_per_s * 1e6
        return reduce_scatter_us(size_bytes, num_ranks, link)
    return p2p_us(size_bytes, link)
