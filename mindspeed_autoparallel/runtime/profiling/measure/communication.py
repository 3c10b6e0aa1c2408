"""Communication: links measured between ranks, and computed for the collectives of a rank that is measured alone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_autoparallel.planner.tuner.links import fit
from mindspeed_autoparallel.planner.tuner.pricing import collective_us
from mindspeed_autoparallel.profiles.device import Collective
from mindspeed_autoparallel.runtime.devices.cpu.storages import tensors_in
from mindspeed_autoparallel.runtime.profiling.measure.costs import Run, block_costs
from mindspeed_autoparallel.runtime.profiling.measure.task import PlayedWorld
from mindspeed_autoparallel.runtime.profiling.operator_calls import collective_of
from mindspeed_autoparallel.units import US_PER_S

_SMALL_BYTES = 4 * 1024
_LARGE_BYTES = 4 * 1024 * 1024
_REPEATS = 5

Costs = dict[str, dict[str, dict[str, float]]]


def measure_links(device: Any, num_processes_per_node: int, placed_on: Any = None) -> dict[str, dict[str, Collective]]:
    """Return ``{tier: {operation: cost}}`` for ``p2p`` and ``all_reduce``; call it on all ranks.

    ``placed_on`` is the torch device of the buffers, by default the current one of ``torch.cuda``.
    """
    import torch
    import torch.distributed as distributed

    world_size, rank = distributed.get_world_size(), distributed.get_rank()
    result: dict[str, dict[str, Collective]] = {}
    if world_size == 1:
        return result
    where = {"device": torch.cuda.current_device() if placed_on is None else placed_on}
    peers = {"intra": 1 if num_processes_per_node > 1 else 0, "inter": num_processes_per_node}
    for tier, peer in peers.items():
        if not 0 < peer < world_size:
            continue

        def send(size: int, peer: int = peer) -> None:
            tensor = torch.zeros(size, dtype=torch.uint8, **where)
            if rank == 0:
                distributed.send(tensor, peer)
            elif rank == peer:
                distributed.recv(tensor, 0)

        result[tier] = {"p2p": fit("p2p", 2, _times(send, device))}
    tier = "inter" if world_size > num_processes_per_node else "intra"

    def reduce(size: int) -> None:
        distributed.all_reduce(torch.zeros(size // 4, **where))

    result.setdefault(tier, {})["all_reduce"] = fit("all_reduce", world_size, _times(reduce, device))
    return result


def _times(operation: Callable[[int], None], device: Any) -> list[tuple[int, float]]:
    """Return bytes and microseconds of a small and a large call, each the fastest of several."""
    import torch.distributed as distributed

    found = []
    for size in (_SMALL_BYTES, _LARGE_BYTES):
        samples = []
        for _ in range(_REPEATS):
            distributed.barrier()
            device.synchronize()
            begin = time.perf_counter()
            operation(size)
            device.synchronize()
            # Use the time of the slowest rank: a send may return before the data has arrived.
            distributed.barrier()
            samples.append(time.perf_counter() - begin)
        found.append((size, min(samples) * 1e6))
    return found


class CommunicationClock(TorchDispatchMode):
    """A device whose clock advances by the time of each collective on the links of ``world``."""

    def __init__(self, world: PlayedWorld) -> None:
        super().__init__()
        self._world = world
        self._us = 0.0

    def synchronize(self) -> None:
        """Return at once."""

    def clock(self) -> float:
        """Return seconds of communication so far."""
        return self._us / US_PER_S

    @contextlib.contextmanager
    def tracked_memory(self) -> Iterator[None]:
        """Follow no memory."""
        yield None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = str(function), kwargs or {}
        if name.startswith("c10d."):
            collective = collective_of(name, tensors_in((args, kwargs)), args)
            if collective is not None:
                nodes = {rank // self._world.devices_per_node for rank in collective.ranks}
                link = self._world.tiers["intra" if len(nodes) == 1 else "inter"]
                self._us += collective_us(collective.name, collective.size_bytes, len(collective.ranks), link)
        return function(*args, **kwargs)


def with_communication(costs: Mapping[str, Mapping[str, Mapping[str, float]]], sent: Run, tracked: Run) -> Costs:
    """Return ``costs`` with the communication of every block added to its forward and backward."""
    sent_us = block_costs([sent], tracked, lambda start, end: float(end - start))
    return {
        stack: {
            block: {
                name: value + (sent_us[stack][block][name] if name in ("forward_us", "backward_us") else 0.0)
                for name, value in values.items()
            }
            for block, values in blocks.items()
        }
        for stack, blocks in costs.items()
    }
