"""Reorders the microbatches of a step: exchanges them between replicas and passes them to the schedule."""

from __future__ import annotations

import functools
import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mindspeed_autoparallel.data.balance import Shared, share
from mindspeed_autoparallel.runtime.state import of_process

if TYPE_CHECKING:
    from mindspeed_autoparallel.runtime.features.data_balance.weights import BatchWork


def gathered_works(works: Sequence[float], group: dist.ProcessGroup | None) -> list[list[float]]:
    """Return the works of every replica's microbatches; ``group``: a gloo group of one rank per replica."""
    if group is None:
        return [list(works)]
    own = torch.tensor(works, dtype=torch.float64)
    every = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(every, own, group=group)
    return [row.tolist() for row in every]


def exchange(batches: Sequence[Any], shared: Shared, group: dist.ProcessGroup | None) -> list[Any]:
    """Return this replica's microbatches in the order of training, after the exchange with the others."""
    rank = group.rank() if group is not None else 0
    number = len(batches)
    mine = shared.places[rank]
    held = {rank * number + index: batch for index, batch in enumerate(batches)}
    if group is not None and any(place // number != owner for owner, row in enumerate(shared.places) for place in row):
        held |= _received(held, shared, number, group)
    return [held[place] for place in mine]


def _received(held: dict[int, Any], shared: Shared, number: int, group: dist.ProcessGroup) -> dict[int, Any]:
    """Return the microbatches that others loaded, by place."""
    rank, size = group.rank(), group.size()
    sent = []
    for other in range(size):
        own = {place: held[place] for place in shared.places[other] if place in held and other != rank}
        sent.append(_packed(own) if own else torch.empty(0, dtype=torch.uint8))
    lengths = torch.tensor([len(part) for part in sent])
    others = torch.empty_like(lengths)
    dist.all_to_all_single(others, lengths, group=group)
    arrived = torch.empty(int(others.sum()), dtype=torch.uint8)
    dist.all_to_all_single(
        arrived, torch.cat(sent), output_split_sizes=others.tolist(), input_split_sizes=lengths.tolist(), group=group
    )
    found: dict[int, Any] = {}
    for part in torch.split(arrived, others.tolist()):
        if len(part):
            found |= torch.load(io.BytesIO(part.numpy().tobytes()), weights_only=False)
    return found


def _packed(batches: dict[int, Any]) -> torch.Tensor:
    # A view would be serialized with its whole storage.
    whole = {
        place: {
            name: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
        }
        for place, batch in batches.items()
    }
    buffer = io.BytesIO()
    torch.save(whole, buffer)
    return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)


class MicrobatchOrder:
    """How this process reorders the microbatches of its steps; without ``work``, which ``entry`` sets, not at all."""

    def __init__(self) -> None:
        self.work: BatchWork | None = None
        self.is_exchanged = False
        """Whether microbatches move between replicas; otherwise only within one."""
        self.log_every = 0
        """Steps between log lines; 0: none."""
        self._num_steps = 0

    def ordered(self, iterators: Any, number: int) -> Any:
        """Return ``iterators`` (one, one of each virtual stage, or none) with the next ``number`` microbatches."""
        if isinstance(iterators, (list, tuple)):
            return type(iterators)(self.ordered(one, number) for one in iterators)
        if iterators is None:
            return None
        assert self.work is not None
        batches = [next(iterators) for _ in range(number)]
        began = time.perf_counter()
        group = data_group() if self.is_exchanged else None
        shared = share(gathered_works([self.work.of(batch) for batch in batches], group))
        result = exchange(batches, shared, group)
        self._log(shared, 1000 * (time.perf_counter() - began))
        return iter(result)

    def _log(self, shared: Shared, took_ms: float) -> None:
        self._num_steps += 1
        if self.log_every and self._num_steps % self.log_every == 1 % self.log_every:
            print(describe(shared, self.is_exchanged, took_ms), flush=True)


def describe(shared: Shared, is_exchanged: bool, took_ms: float) -> str:
    """Return a log line: the balance of a global batch before and after, and its gap to the best possible."""
    if not is_exchanged:
        return f"microbatches ordered by their work in {took_ms:.1f} ms"
    return (
        f"data balance: slowest replica {shared.imbalance:.3f} times the mean work ({shared.imbalance_before:.3f} as "
        f"loaded), {max(0.0, shared.gap):.2%} above the batch's bound, exchanged in {took_ms:.1f} ms"
    )


def data_group() -> Any:
    """Return the gloo group of the ranks that hold the same part of the model in every replica, or ``None`` for one."""
    from megatron.core import parallel_state

    if parallel_state.get_data_parallel_world_size() == 1:
        return None
    return parallel_state.get_data_parallel_group_gloo()


def schedule(wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, object]) -> Any:
    """Wrap ``get_forward_backward_func``: steps that train get their microbatches in another order."""
    stock = wrapped(*args, **kwargs)
    order = of_process(MicrobatchOrder)
    return stock if order.work is None else functools.partial(_run, order, stock)


def _run(order: MicrobatchOrder, stock: Callable[..., Any], **given: Any) -> Any:
    if given.get("forward_only"):
        return stock(**given)
    iterators: Iterator[Any] | list[Iterator[Any]] | None = given["data_iterator"]
    return stock(**{**given, "data_iterator": order.ordered(iterators, given["num_microbatches"])})
