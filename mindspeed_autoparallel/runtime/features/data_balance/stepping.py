"""The schedule of a step, whose iterators give the microbatches in another order, some of them loaded elsewhere."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mindspeed_autoparallel.runtime.state import of_process

if TYPE_CHECKING:
    from mindspeed_autoparallel.data.balance import Shared
    from mindspeed_autoparallel.runtime.features.data_balance.weights import BatchWork


class MicrobatchOrder:
    """What this process does with the microbatches of its steps; nothing until ``apply`` has set ``work``."""

    def __init__(self) -> None:
        self.work: BatchWork | None = None
        self.is_exchanged = False
        """Between replicas; otherwise within one."""
        self.log_every = 0
        """Steps between lines of the log; 0: none."""
        self._num_steps = 0

    def ordered(self, iterators: Any, number: int) -> Any:
        """Return ``iterators`` (one, one of each virtual stage, or none) with the next ``number`` microbatches."""
        if isinstance(iterators, (list, tuple)):
            return type(iterators)(self.ordered(one, number) for one in iterators)
        if iterators is None:
            return None
        from mindspeed_autoparallel.data.balance import share
        from mindspeed_autoparallel.runtime.features.data_balance.exchange import exchange, gathered_works

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
    """Return a line for the log: how even a global batch is before and after, and how far from the best possible."""
    if not is_exchanged:
        return f"microbatches ordered by their work in {took_ms:.1f} ms"
    return (
        f"data balance: slowest replica {shared.imbalance:.3f} times the mean work ({shared.imbalance_before:.3f} as "
        f"loaded), {max(0.0, shared.gap):.2%} above the batch's bound, exchanged in {took_ms:.1f} ms"
    )


def data_group() -> Any:
    """Return the gloo group of the ranks that hold the same part of the model in every replica, or nothing for one."""
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
