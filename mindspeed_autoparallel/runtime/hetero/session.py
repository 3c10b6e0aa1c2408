"""The modules of one job together: placements, ranks with data, and exchange groups."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.hetero.exchange import AllToAll, ItemGather
from mindspeed_autoparallel.runtime.hetero.modules import Encoder
from mindspeed_autoparallel.runtime.hetero.redistribution.placement import (
    Placement,
    closed_sets,
    num_stages,
    replica_ranks,
)
from mindspeed_autoparallel.runtime.hetero.redistribution.plan import replicas_nested
from mindspeed_autoparallel.runtime.hetero.states import ModuleStates
from mindspeed_autoparallel.spec.hetero import BALANCES, MEMORY_MODES


@dataclass
class PhaseTimes:
    """Seconds this rank spent in each part since the last ``reset``."""

    metadata: float = 0.0
    planning: float = 0.0
    encode: float = 0.0
    redistribute: float = 0.0
    backbone: float = 0.0
    generate: float = 0.0
    encoder_backward: float = 0.0
    finalize: float = 0.0

    @contextlib.contextmanager
    def during(self, phase: str, exchange: Any = None) -> Iterator[None]:
        """Add the block's time to ``phase``, less the time that the block adds to other phases.

        Time in ``exchange`` is added to ``redistribute``.
        """
        started, others = time.perf_counter(), self._total()
        moving = exchange.seconds if exchange is not None else 0.0
        try:
            yield
        finally:
            if exchange is not None:
                self.redistribute += exchange.seconds - moving
            inner = self._total() - others
            setattr(self, phase, getattr(self, phase) + time.perf_counter() - started - inner)

    def reset(self) -> None:
        for name in vars(self):
            setattr(self, name, 0.0)

    def _total(self) -> float:
        return float(sum(vars(self).values()))


@dataclass
class EncoderComm:
    """The exchange partners of an encoder or generator on this rank."""

    encoder: Encoder
    placement: Placement
    ranks: list[int]
    """Ranks that exchange with each other: the closed set around this rank, or the world."""
    group: Any
    exchange: AllToAll
    nested: bool
    stage: int = 0
    """This rank's stage of the encoder's own pipeline."""
    num_stages: int = 1
    seconds: dict[str, float] = field(default_factory=lambda: {"encode": 0.0, "encoder_backward": 0.0})
    """This encoder's seconds by phase."""


@dataclass
class HeteroSession:
    """State of the phases. Build with ``open_session`` once the states and the modules exist."""

    states: ModuleStates
    backbone: str
    backbone_placement: Placement
    encoder_comms: list[EncoderComm]
    balance: str
    memory: str
    rank: int
    generator_comms: list[EncoderComm] = field(default_factory=list)
    sequence_parallel: bool = False
    """Sequence parallelism of the backbone: each rank of its first stage then keeps only its share of the rows."""
    times: PhaseTimes = field(default_factory=PhaseTimes)
    batch_owner_ranks: dict[int, list[int]] | None = None
    """Ranks that hold the batches of each backbone replica; gathered once, at the first step."""
    _gathers: list[tuple[ItemGather, list[int]]] | None = None

    @property
    def encoders(self) -> list[Encoder]:
        return [comm.encoder for comm in self.encoder_comms]

    @property
    def generators(self) -> list[Encoder]:
        return [comm.encoder for comm in self.generator_comms]

    @property
    def comms(self) -> list[EncoderComm]:
        """Return the ``EncoderComm`` of every encoder, then of every generator."""
        return [*self.encoder_comms, *self.generator_comms]

    @property
    def dp_replica(self) -> int:
        """Return this rank's data-parallel replica of the backbone."""
        return self.backbone_placement[self.rank].data

    @property
    def first_stage(self) -> bool:
        return self.backbone_placement[self.rank].pipeline == 0

    @property
    def num_stages(self) -> int:
        """Return the backbone's pipeline size."""
        return num_stages(self.backbone_placement)

    @property
    def last_stage(self) -> bool:
        return self.backbone_placement[self.rank].pipeline == self.num_stages - 1

    @property
    def backbone_data_context(self) -> int:
        """Return DP_L x CP_L, the divisor of the gradient rule."""
        return (1 + max(at.data for at in self.backbone_placement)) * (
            1 + max(at.context for at in self.backbone_placement)
        )

    def learn_batch_owners(self, holds: bool) -> None:
        """Gather once which ranks have a data iterator (collective over the world)."""
        if self.batch_owner_ranks is not None:
            return
        flags: list[Any] = [None] * len(self.backbone_placement)
        torch.distributed.all_gather_object(flags, bool(holds))
        replicas = sorted({at.data for at in self.backbone_placement})
        self.batch_owner_ranks = {
            h: [r for r in replica_ranks(self.backbone_placement, h) if flags[r]] for h in replicas
        }
        empty = [replica for replica, ranks in self.batch_owner_ranks.items() if not ranks]
        if empty:
            raise ConfigError(
                f"no rank of backbone replica {empty[0]} has a data iterator; the loader must give it one."
            )

    def gathers(self) -> list[tuple[ItemGather, list[int]]]:
        """Return the gathers of items, each with the indices of its modules in ``comms``, in one order on all ranks."""
        if self._gathers is None:
            by_ranks: dict[tuple[int, ...], list[int]] = {}
            for number, comm in enumerate(self.comms):
                if self._needs_metadata(comm):
                    by_ranks.setdefault(tuple(comm.ranks), []).append(number)
            self._gathers = [(ItemGather(self.comms[numbers[0]].group), numbers) for numbers in by_ranks.values()]
        return self._gathers

    def _needs_metadata(self, comm: EncoderComm) -> bool:
        """Return whether items must be gathered: for global balancing, replicas across backbone replicas, or ranks
        without data."""
        assert self.batch_owner_ranks is not None
        everyone = all(
            ranks == replica_ranks(self.backbone_placement, replica)
            for replica, ranks in self.batch_owner_ranks.items()
        )
        own_set = set(comm.ranks) == set(replica_ranks(self.backbone_placement, self.dp_replica))
        return not (comm.nested and everyone and own_set)


def open_session(
    states: ModuleStates,
    backbone: str,
    encoders: Sequence[Encoder],
    *,
    balance: str = "local",
    memory: str = "upfront",
    sequence_parallel: bool = False,
    generators: Sequence[Encoder] = (),
) -> HeteroSession:
    """Gather every module's placement and make the exchange groups (collective; same order on every rank)."""
    if balance not in BALANCES:
        raise ConfigError(f"--hetero-balance {balance!r} must be one of {', '.join(BALANCES)}.")
    if memory not in MEMORY_MODES:
        raise ConfigError(f"hetero memory mode {memory!r} must be one of {', '.join(MEMORY_MODES)}.")
    rank = torch.distributed.get_rank()
    placement = states.placement(backbone)
    comms = []
    for encoder in (*encoders, *generators):
        own = states.placement(encoder.name)
        sets = closed_sets([own, placement]) if balance != "global" else [list(range(len(own)))]
        groups = {tuple(ranks): states.groups.of_ranks(ranks) for ranks in sets}
        mine = next(ranks for ranks in sets if rank in ranks)
        group = groups[tuple(mine)]
        comms.append(
            EncoderComm(
                encoder,
                own,
                mine,
                group,
                AllToAll(mine, group, rank),
                replicas_nested(own, placement),
                own[rank].pipeline,
                num_stages(own),
            )
        )
    before, after = comms[: len(encoders)], comms[len(encoders) :]
    return HeteroSession(states, backbone, placement, before, balance, memory, rank, after, sequence_parallel)
