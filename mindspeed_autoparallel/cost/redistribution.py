"""What moves between an encoder and the backbone's first stage when both have layouts of their own. Formulas H1-H3.

Samples are taken for equal, so that sizes follow from the layouts alone; on equal samples they are those of the plan
that training makes (a test compares them).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

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

    A first-stage rank lacks what its own encoder replica did not compute. A gradient goes to every member of the
    replica that computed the sample, from one tensor rank of every context rank.
    """
    owned = exchange.samples_of_busiest(samples_per_home)
    own_near = samples_per_home // exchange.replicas
    g, b, contexts = exchange.encoder_width, exchange.stage_width, exchange.backbone.context_size
    # Encoder replicas that sit on a home's first stage, and how many of its ranks each covers.
    near, covered = (b // g, g) if g <= b else (1, b)
    everywhere = exchange.replicas * g == exchange.homes * b
    received = samples_per_home - own_near
    sent = owned * max(0, b - (covered if everywhere else 0)) / g
    outputs = max(received, sent) if received or not everywhere else 0.0
    at_home = near * own_near
    far = (samples_per_home - at_home) * g + at_home * (g - covered)
    back_sent = far * contexts / b
    back_received = float(contexts * owned)
    if everywhere:
        back_received -= own_near
    if contexts > 1:
        back_sent += at_home * covered * (contexts - 1) / b
    gradients = max(back_sent, back_received) if far or contexts > 1 else 0.0
    inputs = 0.0 if exchange.nested else owned * (1 - 1 / exchange.homes)
    return MovedSamples(inputs=inputs, outputs=float(outputs), gradients=gradients)


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
