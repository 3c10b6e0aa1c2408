"""Times single operators and collectives on the device, for the knowledge base."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as distributed

from mindspeed_autoparallel.errors import first_line
from mindspeed_autoparallel.profiles.calibration_records import LinkRow, OperatorRow, Spread
from mindspeed_autoparallel.profiles.knowledge import Operator
from mindspeed_autoparallel.runtime.profiling.operator_calls import rebuild_arguments

_BATCH_S = 1e-3
"""Calls between two readings of the clock take at least this long, so that the cost of the clock is negligible."""
_MAX_BATCH = 64
_NUM_BATCHES = 7
_NUM_WARMUP = 2
_NUM_COLLECTIVE_RUNS = 21


def replay(operators: Sequence[Operator], device: Any) -> Iterator[OperatorRow]:
    """Yield one row per operator: its times, or the reason why it failed; a failure does not stop the others."""
    where = torch.device("cpu") if device.name == "cpu" else torch.device(device.name, torch.cuda.current_device())
    for index, operator in enumerate(operators):
        row = OperatorRow(name=operator.name, signature=operator.signature, sizes=operator.sizes)
        try:
            with torch.no_grad():
                row = replace(row, **vars(_times(operator, device, where)))
        except Exception as error:  # out of memory, a kernel that rejects generated values, an unknown argument
            row = replace(row, reason=first_line(error))
        yield row
        if (index + 1) % 200 == 0:
            print(f"replayed {index + 1} of {len(operators)} operators", flush=True)


def _times(operator: Operator, device: Any, where: Any) -> Spread:
    function = _function(operator.name)
    args, kwargs = rebuild_arguments(operator, where)
    for _ in range(_NUM_WARMUP):
        function(*args, **kwargs)
    device.synchronize()
    begin = time.perf_counter()
    function(*args, **kwargs)
    device.synchronize()
    once_s = max(time.perf_counter() - begin, 1e-7)
    batch = max(1, min(_MAX_BATCH, round(_BATCH_S / once_s)))
    samples = []
    for _ in range(_NUM_BATCHES):
        start = device.clock()
        for _ in range(batch):
            function(*args, **kwargs)
        end = device.clock()
        samples.append(device.seconds_between(start, end) / batch * 1e6)
    return spread(samples, _NUM_BATCHES * batch)


def _function(name: str) -> Any:
    namespace, base, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload)


def spread(samples_us: Iterable[float], num_runs: int) -> Spread:
    """Return the median, the 10th and the 90th percentile, in microseconds."""
    ordered = sorted(max(sample, 1e-3) for sample in samples_us)
    last = len(ordered) - 1
    return Spread(
        median_us=ordered[last // 2],
        p10_us=ordered[round(0.1 * last)],
        p90_us=ordered[round(0.9 * last)],
        num_runs=num_runs,
    )


def sample_collectives(
    kinds: Sequence[str], sizes: Sequence[int], device: Any, num_processes_per_node: int
) -> Iterator[LinkRow]:
    """Yield one row per collective, tier and size; call it on every rank with the same arguments.

    Tier ``intra``: the ranks of a node (every node at once); ``inter``: the first ranks of the nodes, one each.
    """
    world, rank = distributed.get_world_size(), distributed.get_rank()
    groups: dict[str, tuple[list[int], Any]] = {}
    for start in range(0, world, num_processes_per_node):
        members = list(range(start, min(world, start + num_processes_per_node)))
        group = distributed.new_group(members) if len(members) > 1 else None
        if rank in members and group is not None:
            groups["intra"] = (members, group)
    firsts = list(range(0, world, num_processes_per_node))
    if len(firsts) > 1:
        group = distributed.new_group(firsts)
        if rank in firsts:
            groups["inter"] = (firsts, group)
    for tier in ("intra", "inter"):
        for kind in kinds:
            for size in sizes:
                distributed.barrier()
                if tier in groups:
                    members, group = groups[tier]
                    times = _sample(kind, size, members, group, device)
                    yield LinkRow(kind=kind, tier=tier, ranks=len(members), size_bytes=size, **vars(times))
    for _, group in groups.values():
        distributed.destroy_process_group(group)  # its threads would disturb the next measurement


def _sample(kind: str, size: int, members: list[int], group: Any, device: Any) -> Spread:
    call = _call(kind, size, members, group)
    samples = []
    for turn in range(_NUM_COLLECTIVE_RUNS):
        distributed.barrier(group)
        device.synchronize()
        begin = time.perf_counter()
        call()
        device.synchronize()
        if turn:  # the first call sets up the connections
            samples.append((time.perf_counter() - begin) * 1e6)
    return spread(samples, len(samples))


def _call(kind: str, size: int, members: list[int], group: Any) -> Callable[[], Any]:
    """Return the call with tensors of ``size`` bytes; if input and output differ, the larger one has ``size``."""
    where = torch.cuda.current_device()
    count = max(len(members), size // 4 // len(members) * len(members))
    whole = torch.zeros(count, device=where)
    part = torch.zeros(count // len(members), device=where)
    other = torch.zeros(count, device=where)
    rank = distributed.get_rank()

    def exchange() -> None:
        # Both directions, as in pipelines; a lone send may return before the data arrives.
        if rank in members[:2]:
            peer = members[1] if rank == members[0] else members[0]
            works = distributed.batch_isend_irecv(
                [
                    distributed.P2POp(distributed.isend, whole, peer, group),
                    distributed.P2POp(distributed.irecv, other, peer, group),
                ]
            )
            for work in works:
                work.wait()

    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: distributed.all_reduce(whole, group=group),
        "all_gather": lambda: distributed.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: distributed.reduce_scatter_tensor(part, whole, group=group),
        "all_to_all": lambda: distributed.all_to_all_single(other, whole, group=group),
        "broadcast": lambda: distributed.broadcast(whole, members[0], group=group),
        "p2p": exchange,
    }
    return calls[kind]
