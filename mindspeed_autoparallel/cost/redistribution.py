"""Data that moves between an encoder and the backbone's first stage if both have separate layouts. Formulas H1-H4.

Samples are assumed to be equal, so that sizes follow from the layouts alone; for equal samples they match the plan that
training makes (a test compares them).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from mindspeed_autoparallel.cost.staged_redistribution import MovedSamples, counted_samples, tied_replicas
from mindspeed_autoparallel.profiles import DeviceCost, LinkTier
from mindspeed_autoparallel.spec import Cluster, Layout, ModuleLayout


@dataclass(frozen=True, kw_only=True)
class EncoderExchange:
    """Ranks that exchange with each other: those of some backbone replicas and some encoder replicas."""

    backbone_replicas: int
    encoder_replicas: int
    backbone: Layout
    encoder: ModuleLayout

    @property
    def encoder_width(self) -> int:
        """Return the number of ranks of one encoder replica on one stage of its pipeline."""
        return self.encoder.tensor_size * self.encoder.context_size

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks that exchange."""
        return self.encoder_replicas * self.encoder_width * self.encoder.pipeline_size

    @property
    def stage_width(self) -> int:
        """Return the number of first-stage ranks of one backbone replica."""
        return self.backbone.tensor_size * self.backbone.context_size

    @property
    def nested(self) -> bool:
        """Return whether every encoder replica lies inside one backbone replica, and so has its inputs."""
        return self.backbone_replicas == 1

    def samples_of_busiest(self, samples_per_dp_replica: int) -> int:
        """Return H1: the samples of a macro-batch that the busiest encoder replica computes."""
        return -(-self.backbone_replicas * samples_per_dp_replica // self.encoder_replicas)

    @property
    def shards(self) -> int:
        """Return the number of parts into which first-stage ranks divide a sequence; each gets only its own rows."""
        tensor = self.backbone.tensor_size if self.backbone.sequence_parallel else 1
        return tensor * self.backbone.context_size


def exchange_of(backbone: Layout, encoder: ModuleLayout, balance: str) -> EncoderExchange:
    """Return H2: the smallest set of ranks that holds whole replicas of both (``balance`` global: all ranks).

    Encoder replicas are runs of g ranks, first stages runs of b; with q = g / gcd(g, b), every q neighbouring backbone
    replicas are tied together, and all of them if q does not divide their number.
    """
    width = encoder.tensor_size * encoder.context_size
    if encoder.pipeline_size > 1:
        owners = backbone.data_size if balance == "global" else len(tied_replicas(backbone, encoder)[0])
        replicas = encoder.data_size * owners // backbone.data_size
        return EncoderExchange(backbone_replicas=owners, encoder_replicas=replicas, backbone=backbone, encoder=encoder)
    tied = width // gcd(width, backbone.tensor_size * backbone.context_size)
    backbone_replicas = tied if backbone.data_size % tied == 0 and balance != "global" else backbone.data_size
    return EncoderExchange(
        backbone_replicas=backbone_replicas,
        encoder_replicas=encoder.data_size * backbone_replicas // backbone.data_size,
        backbone=backbone,
        encoder=encoder,
    )


def moved_samples(exchange: EncoderExchange, samples_per_dp_replica: int) -> MovedSamples:
    """Return H3: the samples that a macro-batch of ``samples_per_dp_replica`` samples per replica moves on the busiest
    rank.

    A first-stage rank receives, of its shard of the sequence, what its own encoder replica did not compute. A gradient
    goes to every member of the replica that computed the sample, each shard from a rank that keeps it, unless the
    member keeps it itself. Exact for few samples that every replica gets alike (``staged_redistribution``).
    """
    if exchange.nested and exchange.encoder.pipeline_size == 1:
        return _nested(exchange, samples_per_dp_replica)
    return counted_samples(
        exchange.backbone, exchange.encoder, exchange.backbone_replicas, samples_per_dp_replica, exchange.shards
    )


def generator_samples(exchange: EncoderExchange, samples_per_dp_replica: int) -> tuple[MovedSamples, MovedSamples]:
    """Return H3 of a generator's microbatch: of the decoder's rows, and of the one number that goes with each.

    Targets are the inputs; rows go to the first stage as gradients of outputs go to an encoder, and their gradients
    come back from there as outputs do. The numbers are exchanged with the last stage.
    """
    rows, numbers = (
        counted_samples(
            exchange.backbone,
            exchange.encoder,
            exchange.backbone_replicas,
            samples_per_dp_replica,
            exchange.shards,
            generator_stage=stage,
        )
        for stage in (0, exchange.encoder.pipeline_size - 1)
    )
    return rows, numbers


def _nested(exchange: EncoderExchange, samples: int) -> MovedSamples:
    """Count samples if replica j of r computes j, j + r, ...; the ``near`` replicas, on the first stage, come first."""
    width, stage, shards = exchange.encoder_width, exchange.stage_width, exchange.shards
    every, left = divmod(samples, exchange.encoder_replicas)
    near, covered = max(1, stage // width), min(width, stage)
    has_far = exchange.encoder_replicas > near
    of_near, of_far = every + (left > 0), every + (left > near) if has_far else 0
    at_home = near * every + min(left, near)
    received = (samples - every - (left >= near)) / shards
    sent = max(of_near * (stage - covered), of_far * stage) / width / shards
    owing = samples * width - at_home * covered / shards
    received_back = max(of_near * (1 - 1 / shards if width <= stage else 1), of_far)
    return MovedSamples(inputs=0.0, outputs=max(received, sent), gradients=max(owing / stage, received_back))


def stage_loads(exchange: EncoderExchange, samples: int) -> list[int]:
    """Return, by stage of the backbone, the samples that the busiest encoder replica there computes of a macro-batch of
    ``samples`` per backbone replica; if replicas are tied, the busiest of all.

    For encoders without a pipeline of their own.
    """
    stages = range(exchange.backbone.pipeline_size)
    if not exchange.nested:
        return [exchange.samples_of_busiest(samples) for _ in stages]
    # Of the replicas on a stage the first has most: samples are dealt out in turns.
    first = [stage * exchange.stage_width // exchange.encoder_width for stage in stages]
    return [max(0, -(-(samples - replica) // exchange.encoder_replicas)) for replica in first]


def exchange_link(exchange: EncoderExchange, cluster: Cluster, device: DeviceCost) -> LinkTier:
    """Return the slowest link between ranks that exchange: first stage and later stages are a whole stage apart."""
    if cluster.num_devices <= cluster.devices_per_node:
        return device.intra
    inside = (
        exchange.backbone.pipeline_size == exchange.encoder.pipeline_size == 1
        and cluster.devices_per_node % (exchange.backbone_replicas * exchange.stage_width) == 0
    )
    return device.intra if inside else device.inter


def all_to_all_us(size_bytes: float, link: LinkTier) -> float:
    """Return H4: one all-to-all-v; ``size_bytes`` is the busiest rank's; 0 if there is nothing to move."""
    if size_bytes <= 0:
        return 0.0
    cost = link.of("all_to_all")
    return cost.latency_us + size_bytes / cost.bytes_per_s * 1e6
