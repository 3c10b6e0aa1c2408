"""What moves between an encoder and the backbone's first stage when both have layouts of their own. Formulas H1-H3.

Samples are taken for equal, so that sizes follow from the layouts alone; on equal samples they are those of the plan
that training makes (a test compares them).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, gcd

from mindspeed_autoparallel.profiles import DeviceCost, LinkTier
from mindspeed_autoparallel.spec import Cluster, Layout, ModuleLayout


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Ranks that exchange with each other: ``homes`` backbone replicas and ``replicas`` encoder replicas."""

    homes: int
    replicas: int
    backbone: Layout
    encoder: ModuleLayout

    @property
    def encoder_width(self) -> int:
        """Ranks of one encoder replica."""
        return self.encoder.tensor_size * self.encoder.context_size

    @property
    def stage_width(self) -> int:
        """First-stage ranks of one backbone replica."""
        return self.backbone.tensor_size * self.backbone.context_size

    @property
    def nested(self) -> bool:
        """Whether every encoder replica lies inside one backbone replica, and so has its inputs."""
        return self.homes == 1

    def samples_of_busiest(self, samples_per_home: int) -> int:
        """H1: what the encoder replica with most work computes of a macro-batch."""
        return -(-self.homes * samples_per_home // self.replicas)


@dataclass(frozen=True, kw_only=True)
class MovedSamples:
    """Of one macro-batch, the busiest rank's share in samples: the larger of what it sends and what it receives."""

    inputs: float
    outputs: float
    gradients: float


def exchange_of(backbone: Layout, encoder: ModuleLayout, balance: str) -> Exchange:
    """H2: the smallest set of ranks that holds whole replicas of both (``balance`` global: all ranks).

    Encoder replicas are runs of g ranks, first stages runs of b; with q = g / gcd(g, b), every q neighbouring homes
    are tied together, and all of them where q does not divide their number.
    """
    width = encoder.tensor_size * encoder.context_size
    tied = width // gcd(width, backbone.tensor_size * backbone.context_size)
    homes = tied if backbone.data_size % tied == 0 and balance != "global" else backbone.data_size
    return Exchange(
        homes=homes, replicas=encoder.data_size * homes // backbone.data_size, backbone=backbone, encoder=encoder
    )


def moved_samples(exchange: Exchange, samples_per_home: int) -> MovedSamples:
    """H3: what one macro-batch of ``samples_per_home`` samples per backbone replica moves on the busiest rank.

    Replica j computes every r-th sample; those on the first stage come first. A first-stage rank lacks what its own
    encoder replica did not compute. A gradient goes to every member of the replica that computed the sample, from one
    tensor rank of every context rank; a member that is such a rank itself has it.
    """
    if exchange.replicas * exchange.encoder_width == exchange.stage_width == exchange.encoder_width:
        contexts = exchange.backbone.context_size
        return MovedSamples(inputs=0.0, outputs=0.0, gradients=float((contexts - 1) * samples_per_home))
    width, stage, contexts = exchange.encoder_width, exchange.stage_width, exchange.backbone.context_size
    every, left = divmod(samples_per_home, exchange.replicas)
    near = max(1, stage // width)
    """Encoder replicas on a home's first stage."""
    covered = min(width, stage)
    """First-stage ranks of a home in one of these."""
    own = every + (left >= near if exchange.nested else 0)
    at_home = near * every + min(left, near) if exchange.nested else near * every
    most_near, most_far = every + (left > 0), every + (left > near)
    if not exchange.nested:
        most_near = most_far = exchange.samples_of_busiest(samples_per_home)
    some_far = exchange.replicas > near
    received = samples_per_home - own if exchange.replicas > 1 else 0
    sent = ceil(max(most_near * (stage - covered), most_far * stage if some_far else 0) / width) if received else 0
    owing = (samples_per_home - at_home) * width + at_home * (width - covered)
    sent_back = ceil((owing * contexts + at_home * covered * (contexts - 1)) / stage)
    near_received = contexts * most_near - (every if not exchange.nested else most_near)
    if width > stage and exchange.nested:
        near_received = contexts * most_near
    received_back = max(near_received, contexts * most_far if some_far else 0)
    inputs = 0.0 if exchange.nested else exchange.samples_of_busiest(samples_per_home) * (1 - 1 / exchange.homes)
    return MovedSamples(
        inputs=inputs, outputs=float(max(received, sent)), gradients=float(max(sent_back, received_back))
    )


def exchange_link(exchange: Exchange, cluster: Cluster, device: DeviceCost) -> LinkTier:
    """The slowest link between ranks that exchange: first stage and later stages are a whole stage apart."""
    if cluster.num_devices <= cluster.devices_per_node:
        return device.intra
    inside = exchange.backbone.pipeline_size == 1 and cluster.devices_per_node % (
        exchange.homes * exchange.stage_width
    ) == 0  # fmt: skip
    return device.intra if inside else device.inter


def all_to_all_us(size_bytes: float, link: LinkTier) -> float:
    """H4: one all-to-all-v; ``size_bytes`` is the busiest rank's. Nothing to move: no call."""
    if size_bytes <= 0:
        return 0.0
    cost = link.of("all_to_all")
    return cost.latency_us + size_bytes / cost.bytes_per_s * 1e6
