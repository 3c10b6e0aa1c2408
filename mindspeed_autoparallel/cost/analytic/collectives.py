"""Time of collectives on a node's links and across nodes, in microseconds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mindspeed_autoparallel.cost.catalogue import Device, Efficiency
from mindspeed_autoparallel.cost.hiding import sent_once_share

_EXCHANGE_FRACTION = 0.9
"""Share of the network that exchanges of tokens reach. DeepEP's README (version 2) has 61 and 90 GB/s for four and two
nodes on links of 50 GB/s; a quarter and a half of that stay on the node."""


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """Links of a run."""

    devices_per_node: int
    link_bytes_per_us: float
    link_latency_us: float
    inter_bytes_per_us: float
    """One node's network, all its devices together."""
    inter_latency_us: float
    exchange_bytes_per_us: float
    """One device's network when all exchange tokens with their experts."""

    @staticmethod
    def of(device: Device, efficiency: Efficiency, devices_per_node: int, inter_gbit_per_s: float | None) -> Fabric:
        """The fabric of ``device`` as ``efficiency`` says it is used."""
        network = inter_gbit_per_s or device.network_gbit_per_s
        return Fabric(
            devices_per_node=devices_per_node,
            link_bytes_per_us=device.link_gb_per_s * 1e3 * efficiency.link_fraction,
            link_latency_us=efficiency.link_latency_us,
            inter_bytes_per_us=network / 8 * 1e3 * efficiency.inter_fraction,
            inter_latency_us=efficiency.inter_latency_us,
            exchange_bytes_per_us=network / 8 * 1e3 * _EXCHANGE_FRACTION / devices_per_node,
        )

    def one_shot_us(self, size_bytes: float, ranks: int, stride: int) -> float:
        """Reduce-scatter or all-gather of a tensor of ``size_bytes`` in full over ``ranks`` that lie ``stride`` apart.

        Ranks of several nodes share each node's network: ``devices_per_node / ranks on the node`` groups run at once.
        """
        if ranks <= 1:
            return 0.0
        volume = size_bytes * (ranks - 1) / ranks
        if ranks * stride <= self.devices_per_node:
            return self.link_latency_us * math.log2(ranks) + volume / self.link_bytes_per_us
        local = max(1, self.devices_per_node // stride)
        share = self.inter_bytes_per_us * min(local, ranks) / self.devices_per_node
        return self.inter_latency_us * math.log2(ranks) + volume / min(share, self.link_bytes_per_us)

    def all_reduce_us(self, size_bytes: float, ranks: int, stride: int) -> float:
        """Ring all-reduce: a reduce-scatter and an all-gather."""
        return 2 * self.one_shot_us(size_bytes, ranks, stride)

    def dispatch_us(self, size_bytes: float, ranks: int, stride: int, copies: int) -> float:
        """Sending tokens to the experts they chose, or back: ``size_bytes`` held by each rank, ``copies`` per token.

        Across nodes a token travels once to each node that has an expert of its choice and is copied there over the
        node's links, as DeepEP does it; each device sends over its own share of the network. Routing is balanced.
        """
        if ranks <= 1:
            return 0.0
        nodes = min(ranks, max(1, ranks * stride // self.devices_per_node))
        local = ranks // nodes
        time = self.link_latency_us * math.log2(ranks) + size_bytes * (local - 1) / local / self.link_bytes_per_us
        if nodes == 1:
            return time
        leaving = size_bytes * sent_once_share(copies, nodes) * (nodes - 1) / nodes
        network = leaving / self.exchange_bytes_per_us
        return max(time, self.inter_latency_us * math.log2(nodes) + network)

    def send_us(self, size_bytes: float, stride: int) -> float:
        """One neighbour send between pipeline ranks ``stride`` apart, without the fixed cost."""
        if stride < self.devices_per_node:
            return size_bytes / self.link_bytes_per_us
        return size_bytes / (self.inter_bytes_per_us / self.devices_per_node)
