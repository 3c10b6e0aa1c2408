"""Samples differ in size: memory is measured on the largest of the next microbatches."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mindspeed_autoparallel.runtime.megatron.description import MODEL_FILE_ARGUMENT

NUM_SAMPLED = 16
"""A fixed number, so that all ranks that read the same data choose the same microbatch."""


def samples_differ(arguments: Any) -> bool:
    """Return whether microbatches of this training differ in size: those of a multimodal model do."""
    return bool(getattr(arguments, MODEL_FILE_ARGUMENT, None))


def largest_of_next(iterator: Any, count: int = NUM_SAMPLED) -> Any:
    """Return an iterator over one item: of the next ``count`` of ``iterator`` the one with most tensor bytes.

    They are read now; the item's tensors are allocated when it is requested, as a loader does, and nothing else keeps
    them. What is no single iterator is returned as it is: ``None`` on ranks that are sent their batches, a list under
    virtual stages.
    """
    return _made_when_asked(_largest(iterator, count)) if hasattr(iterator, "__next__") else iterator


def _largest(iterator: Any, count: int) -> bytes:
    return pickle.dumps(max(next_of(iterator, count), key=num_bytes))


def _made_when_asked(pickled: bytes) -> Iterator[Any]:
    yield pickle.loads(pickled)


def next_of(iterator: Any, count: int) -> Iterator[Any]:
    """Return at most the next ``count`` of ``iterator``, which need be no iterable: Megatron's own has ``__next__``
    alone."""
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
