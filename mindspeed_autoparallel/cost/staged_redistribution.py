"""Data that moves between the backbone's first stage and an encoder whose replicas are tied to several of the
backbone's, or that has a pipeline of its own, and between its last stage and a generator: counted, rank by rank.

No closed form covers all layouts. Few items are delivered one by one, as in training; many are divided evenly among the
senders. Ranks are in Megatron's order: tensor fastest, then context, data, pipeline. Formulas H2 and H3 of such
encoders.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from mindspeed_autoparallel.spec import Layout, ModuleLayout

MOST_ITEMS = 48
"""Most samples of a macro-batch, over all tied replicas, that are delivered one by one."""


@dataclass(frozen=True, kw_only=True)
class MovedSamples:
    """Samples of one macro-batch that the busiest rank moves: the larger of those sent and those received."""

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
    takes: int
    """Stage of the module's own pipeline that gets inputs."""
    gives: int
    """Its stage that exchanges rows with the backbone."""
    meets: int
    """Stage of the backbone that exchanges rows with the module."""

    def dp_replica_of(self, rank: int) -> int:
        """Return the backbone replica of a rank."""
        return rank % (self.dp_replica_width * self.num_dp_replicas) // self.dp_replica_width

    def members(self, replica: int, stage: int) -> range:
        """Return the ranks of one stage of an encoder replica."""
        first = (stage * self.num_replicas + replica) * self.width
        return range(first, first + self.width)

    def readers(self, dp_replica: int) -> list[int]:
        """Return the ranks of a backbone replica, all of which read its batches."""
        world_stage = self.dp_replica_width * self.num_dp_replicas
        return [
            shift * world_stage + rank
            for shift in range(self.backbone_stages)
            for rank in range(dp_replica * self.dp_replica_width, (dp_replica + 1) * self.dp_replica_width)
        ]

    def met(self, dp_replica: int) -> range:
        """Return the ranks of a backbone replica that exchange rows."""
        first = (self.meets * self.num_dp_replicas + dp_replica) * self.dp_replica_width
        return range(first, first + self.dp_replica_width)


def tied_replicas(backbone: Layout, encoder: ModuleLayout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the first closed set: backbone replicas and encoder replicas that share ranks, in order."""
    return _tied(_sizes_of(backbone, encoder))


def counted_samples(
    backbone: Layout,
    encoder: ModuleLayout,
    dp_replicas: int,
    samples_per_dp_replica: int,
    shards: int,
    *,
    generator_stage: int | None = None,
) -> MovedSamples:
    """Return H3 for one macro-batch, whose samples the encoder replicas take in turn.

    ``generator_stage``: the module is a generator, and this stage of it exchanges with the backbone's last one.
    """
    sizes = _sizes_of(backbone, encoder)
    if generator_stage is not None:
        last = encoder.pipeline_size - 1
        sizes = replace(sizes, takes=last, gives=generator_stage, meets=backbone.pipeline_size - 1)
    everyone = tuple(range(sizes.num_dp_replicas)), tuple(range(sizes.num_replicas))
    tied = everyone if dp_replicas == sizes.num_dp_replicas else _tied(sizes)
    if len(tied[0]) * samples_per_dp_replica > MOST_ITEMS:
        return _moved(sizes, *tied, samples_per_dp_replica, shards)
    # With context parallelism alone, a rank has two runs of every sequence.
    runs = 2 if backbone.context_size == shards > 1 else 1
    return _followed(sizes, *tied, samples_per_dp_replica, shards, runs)


def _sizes_of(backbone: Layout, encoder: ModuleLayout) -> _Sizes:
    return _Sizes(
        dp_replica_width=backbone.tensor_size * backbone.context_size,
        num_dp_replicas=backbone.data_size,
        backbone_stages=backbone.pipeline_size,
        width=encoder.tensor_size * encoder.context_size,
        num_replicas=encoder.data_size,
        stages=encoder.pipeline_size,
        takes=0,
        gives=encoder.pipeline_size - 1,
        meets=0,
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
        stage = sizes.met(dp_replica)
        readers = sizes.readers(dp_replica)
        for turn, replica in enumerate(replicas):
            first = (turn - place * samples) % len(replicas)
            count = len(range(first, samples, len(replicas)))
            if not count:
                continue
            takers = [rank for rank in sizes.members(replica, sizes.takes) if sizes.dp_replica_of(rank) != dp_replica]
            inputs.deliver(takers, readers, count)
            owners = sizes.members(replica, sizes.gives)
            outputs.deliver([rank for rank in stage if rank not in owners], owners, count / shards)
            gradients.deliver([rank for rank in owners if rank not in stage], stage, count)
            gradients.deliver([rank for rank in owners if rank in stage], stage, count * (1 - 1 / shards))
    return MovedSamples(inputs=inputs.most, outputs=outputs.most, gradients=gradients.most)


@lru_cache(maxsize=65536)
def _followed(
    sizes: _Sizes, dp_replicas: tuple[int, ...], replicas: tuple[int, ...], samples: int, shards: int, runs: int
) -> MovedSamples:
    """Count as ``_moved`` does; every piece comes from the holder that has sent fewest."""
    inputs, outputs, gradients = _Traffic(), _Traffic(), _Traffic()
    homes = [dp_replica for dp_replica in dp_replicas for _ in range(samples)]
    owners = [replicas[number % len(replicas)] for number in range(len(homes))]
    stages, readers = [sizes.met(home) for home in homes], [sizes.readers(home) for home in homes]
    takers = [sizes.members(owner, sizes.takes) for owner in owners]
    givers = [sizes.members(owner, sizes.gives) for owner in owners]
    share, part = sizes.dp_replica_width // shards, 1 / shards / runs
    inputs.follow(takers, readers, 1.0, 1)
    outputs.follow(stages, givers, part, runs)
    for first in range(0, sizes.dp_replica_width, share):
        gradients.follow(givers, [stage[first : first + share] for stage in stages], part, runs)
    return MovedSamples(inputs=inputs.most, outputs=outputs.most, gradients=gradients.most)


class _Traffic:
    """Samples sent and received by rank."""

    def __init__(self) -> None:
        self._sent: dict[int, float] = defaultdict(float)
        self._received: dict[int, float] = defaultdict(float)

    def deliver(self, targets: list[int], sources: range | list[int], samples: float) -> None:
        """Send ``samples`` to every target; the sources share the work evenly."""
        for rank in targets:
            self._received[rank] += samples
        for rank in sources if targets else ():
            self._sent[rank] += samples * len(targets) / len(sources)

    def follow(self, targets: Sequence[range], holders: Sequence[Sequence[int]], samples: float, times: int) -> None:
        """Send ``samples`` of every item ``times`` times to each of its targets, in the order of training."""
        turns: dict[int, int] = defaultdict(int)
        for target, item in sorted((target, item) for item, ranks in enumerate(targets) for target in ranks):
            if target in holders[item]:
                continue
            for _ in range(times):
                source = min(holders[item], key=lambda rank: (turns[rank], rank))
                turns[source] += 1
                self._sent[source] += samples
                self._received[target] += samples

    @property
    def most(self) -> float:
        """Return the busiest rank's samples."""
        return max([0.0, *self._sent.values(), *self._received.values()])
