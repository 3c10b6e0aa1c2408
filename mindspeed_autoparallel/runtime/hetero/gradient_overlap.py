"""Reducing an encoder's gradients during its last backward, as ``--overlap-grad-reduce`` does for the backbone.

Megatron's DDP starts a bucket's reduction once the hooks of its parameters fired. Ranks whose last macro-batch is
empty fire none, and ranks may finish their buckets in different orders: so buckets start in one order everywhere, and
what the hooks did not start is started by hand after the last macro-batch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any


class OrderedReduction:
    """The buckets of one DDP in the order in which every rank starts their reductions."""

    def __init__(self, ddp: Any) -> None:
        self._ddp = ddp
        groups = [*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups]
        self._starts = [group.start_grad_sync for group in groups]
        self._ready = [False] * len(groups)
        self._num_started = 0
        self._ordering = False
        self.num_by_hooks = 0
        """Reductions that started during a backward, since the beginning."""
        self.num_in_all = 0
        for number, group in enumerate(groups):
            group.start_grad_sync = functools.partial(self._is_ready, number)

    @contextlib.contextmanager
    def during(self, *, is_last: bool) -> Iterator[None]:
        """Run one macro-batch's backward inside the block; the last one's hooks start reductions, what they left is
        started after it. Every rank comes here for every macro-batch."""
        if not is_last:
            with self._ddp.no_sync():
                yield
            return
        self._ready, self._num_started = [False] * len(self._starts), 0
        self._ordering = True
        yield
        self.num_by_hooks += self._num_started
        self.num_in_all += len(self._starts)
        self._ready = [True] * len(self._starts)
        self._start()
        self._ordering = False

    def _is_ready(self, number: int, *arguments: Any, **named: Any) -> None:
        """Stand in for a bucket's ``start_grad_sync``."""
        if not self._ordering:
            # Megatron starts the reduction again where it has no record of the first start: on the first step.
            self._starts[number](*arguments, **named)
            return
        self._ready[number] = True
        self._start()

    def _start(self) -> None:
        while self._num_started < len(self._starts) and self._ready[self._num_started]:
            start = self._starts[self._num_started]
            self._num_started += 1
            start()
