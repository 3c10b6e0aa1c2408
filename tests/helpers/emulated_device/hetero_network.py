"""The network of hetero steps: messages between stages of either module, and all-to-all transfers that go on by
themselves."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from emulated_device.hetero_cases import INPUT_WIDTH, ROWS, SHAPE, HeteroCase
from emulated_device.network import EmulatedNetwork
from emulated_device.stage import Rank


class HeteroNetwork(EmulatedNetwork):
    """Also all-to-all: begins when every rank of the group has started it and the one before is through, and takes
    the time of the rank that moves most."""

    def __init__(self, rank: Rank, store: Any, case: HeteroCase) -> None:
        super().__init__(rank.clock, store, case.link_ns)
        self._case = case
        self._newest: dict[int, _Arrival] = {}

    def __enter__(self) -> HeteroNetwork:
        super().__enter__()
        self._original["all_to_all_single"] = dist.all_to_all_single
        dist.all_to_all_single = self._all_to_all
        return self

    def link_of(self, data: torch.Tensor) -> int:
        """Shapes, and rows between an encoder's stages; otherwise the backbone's messages, distinguished by
        their size."""
        if data.dtype == torch.int64:
            return self._case.encoder_latency_ns
        if data.shape[0] != SHAPE[0]:
            return self._case.encoder_latency_ns + round(data.shape[0] / ROWS * self._case.encoder_ns_per_sample)
        return super().link_of(data)

    def _all_to_all(
        self,
        output: Any,
        given: Any,
        output_splits: list[int],
        input_splits: list[int],
        group: Any = None,
        async_op: bool = False,
    ) -> _Arrival | None:
        # Nothing blocks here: an encoder's stages start a transfer before the next stage can.
        real = self._original["all_to_all_single"](
            output, given, output_splits, input_splits, group=group, async_op=True
        )
        rows = max(sum(output_splits), sum(input_splits))
        # A sample has one row of inputs.
        per_row_ns = self._case.transfer_ns_per_sample / ROWS
        if tuple(given.shape[1:]) == (INPUT_WIDTH,):
            per_row_ns = self._case.input_ns_per_sample
        elif given.dim() == 1:
            # One number for each of a generator's rows.
            per_row_ns = 0.0
        arrival = _Arrival(self, real, round(rows * per_row_ns), group, self._newest.get(id(group)))
        self._newest[id(group)] = arrival
        self._works.append(arrival)
        if not async_op or self._case.sequential:
            arrival.wait()
        return arrival if async_op else None

    def length_ns(self, moving_ns: int) -> int:
        """Of an all-to-all in which one rank's bytes take ``moving_ns``, and no other's more."""
        return self._case.transfer_ns + moving_ns


class _Arrival:
    """An all-to-all on its way, behind ``before`` of the same group."""

    def __init__(self, network: HeteroNetwork, real: Any, moving_ns: int, group: Any, before: _Arrival | None) -> None:
        self._network, self._real, self._before = network, real, before
        self._latest = torch.tensor([network.clock.now_ns, moving_ns])
        self._told = dist.all_reduce(self._latest, op=dist.ReduceOp.MAX, group=group, async_op=True)
        self._end_ns: int | None = None

    @property
    def end_ns(self) -> int:
        if self._end_ns is None:
            self._real.wait()
            self._told.wait()
            free_ns = 0 if self._before is None else self._before.end_ns
            self._before = None
            self._end_ns = max(int(self._latest[0]), free_ns) + self._network.length_ns(int(self._latest[1]))
        return self._end_ns

    def finish(self) -> None:
        """The real transfer is through."""
        assert self.end_ns >= 0

    def wait(self) -> None:
        self._network.clock.reach(self.end_ns)
