"""Time of collectives in microseconds: on a measured link tier, and on the links that a catalogue describes.

Every formula counts what crosses the slowest link: a ring moves ``(n - 1) / n`` of a tensor over each of its links per
pass (Patarasuk and Yuan 2009), a tree over ``N`` nodes ``2 (N - 1) / N`` of it over each node's network, an exchange
the rows that leave. Formulas C1-C3 of docs/cost-model.md are the functions, C4-C7 the methods of ``Fabric``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from mindspeed_autoparallel.cost.device import Device, Efficiency
from mindspeed_autoparallel.cost.overlap import sent_once_share
from mindspeed_autoparallel.profiles import DeviceCost, LinkTier, NodeNetwork
from mindspeed_autoparallel.spec import Cluster, Layout

_EXCHANGE_FRACTION = 0.9
"""Share of the network that exchanges of tokens reach. DeepEP's README (version 2) has 61 and 90 GB/s for four and two
nodes on links of 50 GB/s; a quarter and a half of that stay on the node."""


def p2p_us(size_bytes: float, link: LinkTier) -> float:
    """Return C1: one message between neighbours, ``latency + size / bandwidth``."""
    cost = link.of("p2p")
    return cost.latency_us + size_bytes / cost.bytes_per_s * 1e6


def all_reduce_us(size_bytes: float, group_size: int, link: LinkTier) -> float:
    """Return C2: ring all-reduce of ``size_bytes`` on each rank; ``2 (n - 1) / n`` of it crosses each link."""
    return 2 * _ring_us(size_bytes, group_size, link, "all_reduce")


def all_gather_us(size_bytes: float, group_size: int, link: LinkTier) -> float:
    """Return C3: ring all-gather; ``size_bytes`` is the gathered tensor."""
    return _ring_us(size_bytes, group_size, link, "all_gather")


def reduce_scatter_us(size_bytes: float, group_size: int, link: LinkTier) -> float:
    """Return C3: ring reduce-scatter; ``size_bytes`` is the tensor before it."""
    return _ring_us(size_bytes, group_size, link, "reduce_scatter")


def _ring_us(size_bytes: float, group_size: int, link: LinkTier, operation: str) -> float:
    if group_size <= 1 or size_bytes <= 0:
        return 0.0
    cost = link.of(operation)
    steps = group_size - 1
    return steps * cost.latency_us + size_bytes * steps / group_size / cost.bytes_per_s * 1e6


@dataclass(frozen=True, kw_only=True)
class Fabric(NodeNetwork):
    """Links of a run, as a device's datasheet and its efficiencies give them. Rates are bytes per microsecond."""

    exchange_bytes_per_us: float = 0.0
    """One device's share of the network when all devices exchange tokens with experts."""
    dispatch_bytes_per_us: float = 0.0
    """Rate over the node's links of kernels that send a token once to a rank; 0: there are none."""

    @staticmethod
    def of(device: Device, efficiency: Efficiency, devices_per_node: int, inter_gbit_per_s: float | None) -> Fabric:
        """Return the fabric of ``device`` with the measured shares of ``efficiency``."""
        network = inter_gbit_per_s or device.network_gbit_per_s
        if device.link_domain > devices_per_node:
            # All nodes of the domain count as one, with all their networks.
            network *= device.link_domain / devices_per_node
            devices_per_node = device.link_domain
        return Fabric(
            devices_per_node=devices_per_node,
            link_bytes_per_us=device.link_gb_per_s * 1e3 * efficiency.link_fraction,
            link_latency_us=efficiency.link_latency_us,
            inter_bytes_per_us=network / 8 * 1e3 * efficiency.inter_fraction,
            inter_latency_us=efficiency.inter_latency_us,
            exchange_bytes_per_us=network / 8 * 1e3 * _EXCHANGE_FRACTION / devices_per_node,
            dispatch_bytes_per_us=device.link_gb_per_s * 1e3 * efficiency.dispatch_fraction,
            mesh=device.mesh_peers > 0,
            replica_fraction=efficiency.replica_fraction,
        )

    @property
    def network(self) -> NodeNetwork:
        """Return the part of the fabric that the reduction of gradients uses."""
        return NodeNetwork(**{item.name: getattr(self, item.name) for item in fields(NodeNetwork)})

    def ranks_on_node(self, ranks: int, stride: int) -> int:
        """Return how many of a group's ranks, ``stride`` apart, share a node."""
        return min(ranks, max(1, self.devices_per_node // stride))

    def _inside_rate(self, ranks: int) -> float:
        """Return the rate at which one device sends to ``ranks - 1`` peers of its node at once."""
        if not self.mesh or self.devices_per_node <= 1:
            return self.link_bytes_per_us
        return self.link_bytes_per_us * (ranks - 1) / max(1, self.devices_per_node - 1)

    def _across_rate(self, local: int) -> float:
        """Return a group's share of a node's network; all groups of the node run at once, ``local`` ranks each."""
        return self.inter_bytes_per_us * local / self.devices_per_node

    def one_shot_us(self, size_bytes: float, ranks: int, stride: int, *, replicas: bool = False) -> float:
        """Return C4: reduce-scatter or all-gather of a tensor of ``size_bytes`` in full over ``ranks`` in a ring.

        The ring enters and leaves every node once and shares the node's network with the other groups of its kind.
        ``replicas``: ranks are replicas that reduce gradients.
        """
        if ranks <= 1 or size_bytes <= 0:
            return 0.0
        volume = size_bytes * (ranks - 1) / ranks
        local = self.ranks_on_node(ranks, stride)
        inside = self._inside_rate(local) if local > 1 else math.inf
        if local == ranks:
            return self.link_latency_us * math.log2(ranks) + volume / inside
        across = self._across_rate(local) * (self.replica_fraction if replicas and local > 1 else 1.0)
        return self.inter_latency_us * math.log2(ranks) + volume / min(across, inside)

    def all_reduce_us(self, size_bytes: float, ranks: int, stride: int, *, replicas: bool = False) -> float:
        """Return C5: all-reduce, the faster of a ring and of a tree over nodes.

        A ring is a reduce-scatter and an all-gather. A tree reduces inside each node first, so that the node's network
        carries the tensor up and down once, ``2 (N - 1) / N`` of it over ``N`` nodes (NCCL 2.4's double binary trees;
        Sanders et al. 2009); with two nodes that is half of what a ring over their ranks sends.
        """
        ring = 2 * self.one_shot_us(size_bytes, ranks, stride, replicas=replicas)
        local = self.ranks_on_node(ranks, stride)
        if local in (1, ranks) or replicas or size_bytes <= 0:
            return ring
        nodes = ranks / local
        across = 2 * size_bytes * (nodes - 1) / nodes / self._across_rate(local)
        inside = 2 * size_bytes / self._inside_rate(local)
        latency = 2 * (self.inter_latency_us * math.log2(nodes) + self.link_latency_us * math.log2(local))
        return min(ring, latency + max(across, inside))

    def dispatch_us(
        self, size_bytes: float, ranks: int, stride: int, copies: int, *, once: bool = False, in_order_of: int = 0
    ) -> float:
        """Return C6: sending tokens to the experts they chose, or back; each rank holds ``size_bytes``.

        Across nodes a token travels once to each node that has an expert of its choice (``copies`` choices) and is
        copied there over the node's links, as DeepEP does it; each device sends over its own share of the network.
        On the node, too, a rank receives it once, however many of its experts were chosen. Published rates of such
        kernels include the rows that stay on their rank. Without such a rate a rank receives all copies, or each
        token ``once``. ``in_order_of``: see ``sent_once_share``.
        """
        if ranks <= 1:
            return 0.0
        nodes = min(ranks, max(1, ranks * stride // self.devices_per_node))
        local = ranks // nodes
        if self.dispatch_bytes_per_us and local > 1:
            inside = size_bytes * sent_once_share(copies, ranks, in_order_of) / self.dispatch_bytes_per_us
        else:
            copied = size_bytes * (sent_once_share(copies, ranks, in_order_of) if once else 1.0)
            inside = copied * (local - 1) / local / self._inside_rate(max(2, local))
        time = self.link_latency_us * math.log2(ranks) + inside
        if nodes == 1:
            return time
        leaving = size_bytes * sent_once_share(copies, nodes, in_order_of) * (nodes - 1) / nodes
        network = leaving / self.exchange_bytes_per_us
        return max(time, self.inter_latency_us * math.log2(nodes) + network)

    def exchange_us(self, size_bytes: float, ranks: int, stride: int) -> float:
        """Return C6 without copies: all-to-all in which each rank keeps ``1 / ranks`` of its ``size_bytes``."""
        if ranks <= 1 or size_bytes <= 0:
            return 0.0
        local = self.ranks_on_node(ranks, stride)
        inside = 0.0
        if local > 1:
            inside = size_bytes * (local - 1) / ranks / self._inside_rate(local)
        if local == ranks:
            return self.link_latency_us * math.log2(ranks) + inside
        leaving = size_bytes * (ranks - local) / ranks
        return self.inter_latency_us * math.log2(ranks) + max(inside, leaving / self.exchange_bytes_per_us)

    def send_us(self, size_bytes: float, stride: int) -> float:
        """Return C7: one neighbour send between ranks ``stride`` apart, without the fixed cost."""
        if stride < self.devices_per_node:
            return size_bytes / self._inside_rate(2)
        return size_bytes / (self.inter_bytes_per_us / self.devices_per_node)


def data_parallel_link(layout: Layout, cluster: Cluster, device: DeviceCost) -> LinkTier:
    """Return the slowest link inside a data x context group: its ranks are ``tensor_size`` apart within one pipeline
    stage."""
    span = layout.tensor_size * layout.context_size * layout.data_size
    # Consecutive blocks of ``span`` ranks never straddle nodes if ``span`` divides a node.
    return device.inter if cluster.devices_per_node % span else device.intra


def boundary_link(layout: Layout, cluster: Cluster, device: DeviceCost, boundary: int) -> LinkTier:
    """Return the link between pipeline ranks ``boundary`` and ``boundary + 1`` (wrapping, for interleaved)."""
    stride = layout.num_devices // layout.pipeline_size
    node = device.exchange.network.devices_per_node if device.exchange is not None else cluster.devices_per_node
    sender = boundary % layout.pipeline_size
    receiver = (sender + 1) % layout.pipeline_size
    crossing = any(
        (sender * stride + rank) // node != (receiver * stride + rank) // node for rank in range(min(stride, node))
    )
    return device.inter if crossing else device.intra


def embedding_link(layout: Layout, cluster: Cluster, device: DeviceCost) -> LinkTier:
    """Return the link between the first and the last rank of a pipeline."""
    return device.intra if cluster.num_nodes == 1 or layout.pipeline_size == 1 else device.inter
