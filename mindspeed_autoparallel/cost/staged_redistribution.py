"""What moves between the backbone's first stage and an encoder with a pipeline of its own: counted, rank by rank.

An encoder replica then lies on ranks far apart, and no closed form covers all layouts. Ranks are in Megatron's order:
tensor fastest, then context, data, pipeline. Formulas H2 and H3 of such encoders.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache

from mindspeed_autoparallel.spec import Layout, ModuleLayout


@dataclass(frozen=True, kw_only=True)
class MovedSamples:
    """Of one macro-batch, the busiest rank's share in samples: the larger of what it sends and what it receives."""

    inputs: float
    outputs: float
    gradients: float


@dataclass(frozen=True)
class _Sizes:
    """Ranks of one stage of one replica, and replicas, of both modules."""

    dp_replica_width: int
    num_dp_replicas: int
    backbone_stages: int
    width: int
    num_replicas: int
    stages: int

    def dp_replica_of(self, rank: int) -> int:
        """Return the backbone replica of a rank."""
        return rank % (self.dp_replica_width * self.num_dp_replicas) // self.dp_replica_width

    def members(self, replica: int, stage: int) -> range:
        """Return the ranks of one stage of an encoder replica."""
        first = (stage * self.num_replicas + replica) * self.width
        return range(first, first + self.width)

    def first_stage(self, dp_replica: int) -> range:
        """Return the ranks of a backbone replica's first stage."""
        return range(dp_replica * self.dp_replica_width, (dp_replica + 1) * self.dp_replica_width)


def tied_replicas(backbone: Layout, encoder: ModuleLayout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the first closed set: backbone replicas and encoder replicas that share ranks, in order."""
    return _tied(_sizes_of(backbone, encoder))


def staged_samples(
    backbone: Layout, encoder: ModuleLayout, dp_replicas: int, samples_per_dp_replica: int, shards: int
) -> MovedSamples:
    """Return H3 for one macro-batch: every replica gets every so manyth sample; senders share evenly."""
    sizes = _sizes_of(backbone, encoder)
    everyone = tuple(range(sizes.num_dp_replicas)), tuple(range(sizes.num_replicas))
    tied = everyone if dp_replicas == sizes.num_dp_replicas else _tied(sizes)
    return _moved(sizes, *tied, samples_per_dp_replica, shards)


def _sizes_of(backbone: Layout, encoder: ModuleLayout) -> _Sizes:
    return _Sizes(
        dp_replica_width=backbone.tensor_size * backbone.context_size,
        num_dp_replicas=backbone.data_size,
        backbone_stages=backbone.pipeline_size,
        width=encoder.tensor_size * encoder.context_size,
        num_replicas=encoder.data_size,
        stages=encoder.pipeline_size,
    )


@lru_cache(maxsize=4096)
def _tied(sizes: _Sizes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    replicas_at: dict[int, set[int]] = defaultdict(set)
    dp_replicas_at: dict[int, set[int]] = defaultdict(set)
    for replica in range(sizes.num_replicas):
        for stage in range(sizes.stages):
            for rank in sizes.members(replica, stage):
                replicas_at[sizes.dp_replica_of(rank)].add(replica)
                dp_replicas_at[replica].add(sizes.dp_replica_of(rank))
    dp_replicas, replicas, grown = {0}, set[int](), -1
    while grown < len(dp_replicas):
        grown = len(dp_replicas)
        replicas = {replica for dp_replica in dp_replicas for replica in replicas_at[dp_replica]}
        dp_replicas |= {dp_replica for replica in replicas for dp_replica in dp_replicas_at[replica]}
    return tuple(sorted(dp_replicas)), tuple(sorted(replicas))


@lru_cache(maxsize=65536)
def _moved(
    sizes: _Sizes, dp_replicas: tuple[int, ...], replicas: tuple[int, ...], samples: int, shards: int
) -> MovedSamples:
    """Count samples by (dp_replica, replica): sample i of all goes to replica i modulo their number."""
    inputs, outputs, gradients = _Traffic(), _Traffic(), _Traffic()
    for place, dp_replica in enumerate(dp_replicas):
        stage = sizes.first_stage(dp_replica)
        readers = [
            stage.start + shift * sizes.dp_replica_width * sizes.num_dp_replicas + rank
            for shift in range(sizes.backbone_stages)
            for rank in range(sizes.dp_replica_width)
        ]
        for turn, replica in enumerate(replicas):
            first = (turn - place * samples) % len(replicas)
            count = len(range(first, samples, len(replicas)))
            if not count:
                continue
            takers = [rank for rank in sizes.members(replica, 0) if sizes.dp_replica_of(rank) != dp_replica]
            inputs.deliver(takers, readers, count)
            owners = sizes.members(replica, sizes.stages - 1)
            outputs.deliver([rank for rank in stage if rank not in owners], owners, count / shards)
            gradients.deliver([rank for rank in owners if rank not in stage], stage, count)
            gradients.deliver([rank for rank in owners if rank in stage], stage, count * (1 - 1 / shards))
    return MovedSamples(inputs=inputs.most, outputs=outputs.most, gradients=gradients.most)


class _Traffic:
    """Samples sent and received by rank."""

    def __init__(self) -> None:
        self._sent: dict[int, float] = defaultdict(float)
        self._received: dict[int, float] = defaultdict(float)

    def deliver(self, targets: list[int], sources: range | list[int], samples: float) -> None:
        """Send ``samples`` to every target, the sources in turns."""
        for rank in targets:
            self._received[rank] += samples
        for rank in sources if targets else ():
            self._sent[rank] += samples * len(targets) / len(sources)

    @property
    def most(self) -> float:
        """Return the busiest rank's samples."""
        return max([0.0, *self._sent.values(), *self._received.values()])
