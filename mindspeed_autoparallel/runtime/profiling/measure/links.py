"""Latency and bandwidth of the links between the measuring processes: two sizes, one straight line.

A tier that the measuring nodes do not have (between nodes, on one node) is left out; the search prints what it uses.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from mindspeed_autoparallel.planner.tuner.links import fit
from mindspeed_autoparallel.profiles.device import Collective

_SMALL_BYTES = 4 * 1024
_LARGE_BYTES = 4 * 1024 * 1024
_REPEATS = 5


def measure_links(device: Any, num_processes_per_node: int, placed_on: Any = None) -> dict[str, dict[str, Collective]]:
    """Return ``{tier: {operation: cost}}`` for ``p2p`` and ``all_reduce``; collective on all ranks.

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
    """Return bytes and microseconds of a small and of a large call, the fastest of several."""
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
            # Everyone's time counts: a send may return before it has arrived.
            distributed.barrier()
            samples.append(time.perf_counter() - begin)
        found.append((size, min(samples) * 1e6))
    return found
