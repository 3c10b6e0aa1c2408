"""The step's raw batches: read ahead for the encoders, then passed to the stock schedule one by one and released."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_autoparallel.runtime.state import of_process


@dataclass
class _Waiting:
    """Whether batches read ahead are kept packed."""

    packed: bool = False


@contextlib.contextmanager
def packed_while_waiting() -> Iterator[None]:
    """Keep batches read inside the block as bytes; each reader gets new tensors.

    On the CPU device, where host memory is the device's own, a memory-tracked step then counts only the batches in
    use, as on a device with its own memory.
    """
    waiting = of_process(_Waiting)
    before, waiting.packed = waiting.packed, True
    try:
        yield
    finally:
        waiting.packed = before


class StepBatches(Sequence[Any]):
    """One rank's microbatches of a step; ``take`` releases a batch."""

    def __init__(self, batches: Sequence[Any], packed: bool) -> None:
        self._batches, self._packed = list(batches), packed

    @classmethod
    def read(cls, source: Iterator[Any], count: int) -> StepBatches:
        """Read the next ``count`` batches."""
        packed = of_process(_Waiting).packed
        return cls([pickle.dumps(next(source)) if packed else next(source) for _ in range(count)], packed)

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, microbatch: Any) -> Any:
        batch = self._batches[microbatch]
        return pickle.loads(batch) if self._packed and batch is not None else batch

    def take(self, microbatch: int) -> Any:
        """Return a batch and release it here; ``None`` if it was taken before."""
        batch = self[microbatch]
        self._batches[microbatch] = None
        return batch

    def copy(self) -> StepBatches:
        """Return the same batches for a second reader, which releases them separately."""
        return StepBatches(self._batches, self._packed)

    def handed_over(self) -> Iterator[Any]:
        """Yield every batch, taking it when it is requested."""
        for microbatch in range(len(self)):
            yield self.take(microbatch)


def pull(data_iterator: Any, num_microbatches: int) -> tuple[StepBatches | None, Any]:
    """Return the step's raw batches on ranks that have an iterator, and iterators over them for the stock schedule.

    The schedule takes each batch after the encoders have read it.
    """
    several = isinstance(data_iterator, list)
    sources = data_iterator if several else [data_iterator]
    pulled = [None if it is None else StepBatches.read(it, num_microbatches) for it in sources]
    again = [None if batches is None else batches.handed_over() for batches in pulled]
    return pulled[0], again if several else again[0]
