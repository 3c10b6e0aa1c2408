"""Microbatches of different sizes: memory is measured on the largest of the next ones, times at several lengths."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from mindspeed_autoparallel.profiles import layer_block
from mindspeed_autoparallel.runtime.megatron.description import MODEL_FILE_ARGUMENT
from mindspeed_autoparallel.runtime.profiling.measure.costs import Run
from mindspeed_autoparallel.runtime.profiling.measure.structure import Stack

NUM_SAMPLED = 16
"""A constant, so that all ranks that read the same data choose the same microbatch."""

_NUM_LENGTHS, _NUM_REPEATS = 3, 3
Costs = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Costs by stack, block and name, the result of ``block_costs``."""


def samples_differ(arguments: Any) -> bool:
    """Return whether microbatches of this training differ in size: those of a multimodal model do."""
    return bool(getattr(arguments, MODEL_FILE_ARGUMENT, None))


def largest_of_next(iterator: Any, count: int = NUM_SAMPLED) -> Any:
    """Return an iterator over one item: the one with most tensor bytes among the next ``count`` of ``iterator``.

    The items are read now. The chosen item's tensors are allocated when it is requested, like a loader's, and have no
    other reference. Anything but a single iterator is returned unchanged: ``None`` on ranks that receive their
    batches, a list under virtual stages.
    """
    if not hasattr(iterator, "__next__"):
        return iterator
    largest = max(next_of(iterator, count), key=num_bytes, default=None)
    return iterator if largest is None else _made_when_asked(pickle.dumps(largest))


def _made_when_asked(pickled: bytes) -> Iterator[Any]:
    yield pickle.loads(pickled)


def next_of(iterator: Any, count: int) -> Iterator[Any]:
    """Yield at most the next ``count`` items of ``iterator``, which needs only ``__next__``: Megatron's own has no
    ``__iter__``."""
    for _ in range(count):
        try:
            following = next(iterator)
        except StopIteration:
            return
        yield following


def num_bytes(batch: Any) -> int:
    """Return the bytes of all tensors in a batch of nested mappings and sequences."""
    if isinstance(batch, Mapping):
        return sum(num_bytes(value) for value in batch.values())
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        return sum(num_bytes(value) for value in batch)
    return int(getattr(batch, "nbytes", 0) or 0)


class Microbatches(Protocol):
    """Runs the host's step with the next microbatch of ``iterator`` (``point.Microbatch``)."""

    iterator: Any

    def run(self, tracked: bool) -> Run:
        """Run one microbatch; ``tracked`` also follows live memory."""


def rows_of(stack: Stack, shapes: Mapping[str, tuple[int, ...]], arguments: Any) -> int:
    """Return the rows of a microbatch that enter the stack's layers, over all its ranks; 0 if unknown."""
    shape = shapes.get(f"{stack.name} 1", ())
    if len(shape) != 3:
        return 0
    # [sequence, batch, hidden]; a packed encoder has batch 1 and all tokens of the microbatch in the sequence.
    split = arguments.tensor_model_parallel_size if getattr(stack.config, "sequence_parallel", False) else 1
    return int(shape[0] * shape[1] * split * arguments.context_parallel_size)


def runs_at_lengths(microbatch: Microbatches) -> list[Run]:
    """Run short, medium and long microbatches, each several times, after a warm-up run of each.

    The number of runs is the same on every rank, including those that receive their batches.
    """
    iterator = microbatch.iterator
    chosen = spread_of_next(iterator) or [None] * _NUM_LENGTHS
    runs = []
    for batch in chosen:
        for repeat in range(1 + _NUM_REPEATS):
            if batch is not None:
                microbatch.iterator = iter([copy.deepcopy(batch)])
            run = microbatch.run(tracked=False)
            runs += [run] if repeat else []
    microbatch.iterator = iterator
    return runs


def spread_of_next(iterator: Any, count: int = NUM_SAMPLED) -> list[Any]:
    """Return, of the next ``count`` of ``iterator``, those with least, median and most tensor bytes; empty unless it
    is a single iterator (``None`` on ranks that receive their batches, a list under virtual stages)."""
    if not hasattr(iterator, "__next__"):
        return []
    ordered = sorted(next_of(iterator, count), key=num_bytes)
    if not ordered:
        return []
    return [ordered[index * (len(ordered) - 1) // (_NUM_LENGTHS - 1)] for index in range(_NUM_LENGTHS)]


def times_by_rows(
    runs: Sequence[Run], costs: Costs, arguments: Any, seconds_between: Callable[[Any, Any], float]
) -> dict[str, tuple[tuple[float, float], ...]]:
    """Return, by stack, a pair per run: rows of a sample, and the time of all layers (forward and backward) relative to
    ``costs``; stacks with unknown rows are left out."""
    found: dict[str, tuple[tuple[float, float], ...]] = {}
    for stack in runs[0].stacks if runs else ():
        layers = Counter(map(layer_block, stack.kinds))
        times = costs[stack.name]
        whole = sum(
            count * (times[block]["forward_us"] + times[block]["backward_us"]) for block, count in layers.items()
        )
        rows = [rows_of(stack, run.shapes, arguments) / arguments.micro_batch_size for run in runs]
        if whole > 0 and all(rows):
            found[stack.name] = tuple(
                (number, _layers_us(run, stack, layers, seconds_between) / whole)
                for number, run in zip(rows, runs, strict=True)
            )
    return found


def _layers_us(
    run: Run, stack: Stack, blocks: Mapping[str, int], seconds_between: Callable[[Any, Any], float]
) -> float:
    intervals = [
        item for block in blocks for direction in (run.forward, run.backward) for item in direction(stack, block)
    ]
    return 1e6 * sum(seconds_between(item.start.clock, item.end.clock) for item in intervals)
