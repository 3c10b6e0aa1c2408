"""Times of the exchanges between devices in a sharded training, from a profile's links."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_autoparallel.cost.collectives import Fabric
from mindspeed_autoparallel.profiles.sharded import ModuleCosts, ShardedProfile
from mindspeed_autoparallel.spec.sharded import ShardSizes


@dataclass(frozen=True)
class Exchanges:
    """Exchange times for one choice of sizes, in microseconds per operation."""

    fabric: Fabric
    sizes: ShardSizes
    profile: ShardedProfile

    @staticmethod
    def of(profile: ShardedProfile, devices_per_node: int, sizes: ShardSizes) -> Exchanges:
        """Return the exchanges of ``sizes`` on nodes of ``devices_per_node`` devices."""
        device = profile.device
        inside, across = device.intra.of("all_gather"), device.inter.of("all_gather")
        routed = device.inter.of("all_to_all")
        fabric = Fabric(
            devices_per_node=devices_per_node,
            link_bytes_per_us=inside.bytes_per_s / 1e6,
            link_latency_us=inside.latency_us,
            inter_bytes_per_us=across.bytes_per_s / 1e6 * devices_per_node,
            inter_latency_us=across.latency_us,
            exchange_bytes_per_us=routed.bytes_per_s / 1e6,
        )
        return Exchanges(fabric, sizes, profile)

    def shard_us(self, size_bytes: float, *, experts: bool) -> float:
        """Return the time of a gather or reduce-scatter of a unit with ``size_bytes`` unsharded bytes."""
        if experts:
            return self.fabric.one_shot_us(size_bytes, self.sizes.expert_shard_size, self.sizes.expert_size)
        return self.fabric.one_shot_us(size_bytes, self.sizes.fully_shard_size, 1)

    def replicas_us(self, shard_bytes: float, *, experts: bool) -> float:
        """Return the time of the all-reduce of a shard over the replicas of the parameters."""
        sizes = self.sizes
        if experts:
            return self.fabric.all_reduce_us(shard_bytes, sizes.expert_replicas, sizes.experts_spread)
        return self.fabric.all_reduce_us(shard_bytes, sizes.replicas, sizes.fully_shard_size)

    def forward_us(self, costs: ModuleCosts) -> float:
        """Return the exchange time of one forward pass of a module; a backward pass takes as long."""
        sizes = self.sizes
        time = self.fabric.exchange_us(costs.ulysses_sent_bytes, sizes.ulysses_size, sizes.ring_size)
        if sizes.ring_size > 1 and costs.ring_sent_bytes:
            time += (sizes.ring_size - 1) * self.fabric.link_latency_us + self.fabric.send_us(costs.ring_sent_bytes, 1)
        if sizes.expert_size > 1 and costs.expert_sent_bytes:
            routing, copies = self.profile.routing, max(1, self.profile.topk)
            experts = self.profile.num_experts if routing.in_order else 0
            time += 2 * self.fabric.dispatch_us(
                costs.expert_sent_bytes, sizes.expert_size, 1, copies, once=routing.once, in_order_of=experts
            )
        return time
