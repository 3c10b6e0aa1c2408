"""Assign the samples of one global batch to replicas and microbatches so that their work is even."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from mindspeed_autoparallel.data.packs import equal_packs, filled_packs
from mindspeed_autoparallel.data.partition import cost_of, lower_bound, partition
from mindspeed_autoparallel.data.work import COLUMNS, Array, WorkModel
from mindspeed_autoparallel.errors import ConfigError

_TOKENS = COLUMNS.index("tokens")


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """A global batch: ``num_replicas`` x ``num_microbatches`` x ``micro_batch_size`` samples."""

    num_replicas: int
    num_microbatches: int
    """Microbatches per replica."""
    micro_batch_size: int
    is_padded: bool = True
    """Whether texts of a microbatch are padded to its longest; otherwise they are packed."""
    max_tokens: int = 0
    """Most tokens of a microbatch, padding included, within memory; 0: any number."""
    is_filled: bool = False
    """Whether packs hold any number of samples within ``max_tokens``, ``micro_batch_size`` on average."""

    def __post_init__(self) -> None:
        for name in ("num_replicas", "num_microbatches", "micro_batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.is_filled and self.is_padded:
            raise ConfigError("microbatches filled to a length are packs and cannot be padded.")

    @property
    def num_samples(self) -> int:
        return self.num_replicas * self.num_microbatches * self.micro_batch_size


def in_order(sizes: Array, shape: BatchShape) -> Array:
    """Return ``samples`` of a training without rearrangement: microbatch k of every replica, then k + 1."""
    _check(sizes, shape)
    return numpy.arange(shape.num_samples).reshape(shape.num_microbatches, shape.num_replicas, -1).swapaxes(0, 1)


def balance(sizes: Array, model: WorkModel, shape: BatchShape) -> Array:
    """Return the most even assignment found, with equal numbers of samples everywhere or, if packs are filled to a
    length, of packs.

    ``samples [replica, microbatch, place]`` are indexes into ``sizes [sample, column]``, each once; -1 fills up packs
    with fewer samples than the largest one. The result is the same for the same input on every rank. Inside a replica
    short microbatches come first and last. Raises ``ConfigError`` if the batch does not fill the shape, or for a sample
    that fits no microbatch.
    """
    _check(sizes, shape)
    samples = _packs(sizes, model, shape)
    if samples is None:
        groups = _microbatches(sizes, shape)
        weights = group_weights(sizes, model, groups, shape.is_padded)
        bins = partition(weights, shape.num_replicas, shape.num_microbatches)
        samples = groups[numpy.argsort(bins, kind="stable")].reshape(*_cut(shape), -1)
    totals = group_weights(sizes, model, samples.reshape(-1, samples.shape[2]), shape.is_padded).sum(axis=1)
    order = numpy.stack([short_at_the_ends(row) for row in totals.reshape(_cut(shape))])
    return numpy.take_along_axis(samples, order[:, :, None], axis=1)


@dataclass(frozen=True, kw_only=True)
class Shared:
    """The microbatches of a global batch for each replica, and the gain."""

    places: tuple[tuple[int, ...], ...]
    """By replica, in the order of training: microbatch ``replica * number + index`` of the replica that loaded it."""
    imbalance_before: float
    """Work of the slowest replica divided by the mean."""
    imbalance: float
    gap: float
    """Excess of the slowest replica over the batch's lower bound, as a share of the bound."""


def share(works: Sequence[Sequence[float]]) -> Shared:
    """Assign microbatches with ``works [replica][microbatch]``; the result is the same on every rank.

    Every replica keeps its number of microbatches. A batch that cannot become more even keeps its order.
    """
    replicas, number = len(works), len(works[0])
    weights: Array = numpy.array(works, dtype=numpy.float64).reshape(-1, 1)
    as_loaded: Array = numpy.repeat(numpy.arange(replicas), number)
    before = cost_of(weights, as_loaded, replicas)
    bins, cost = as_loaded, before
    if replicas > 1:
        found = partition(weights, replicas, number)
        if (lower := cost_of(weights, found, replicas)) < before * (1 - 1e-9):
            bins, cost = found, lower
    places = []
    for replica in range(replicas):
        rows = numpy.flatnonzero(bins == replica)
        times = weights[rows, 0]
        # Equal microbatches keep their order: another gains nothing.
        rows = rows if numpy.ptp(times) == 0 else rows[short_at_the_ends(times)]
        places.append(tuple(int(row) for row in rows))
    mean = float(weights.sum()) / replicas
    bound = lower_bound(weights, replicas, number)
    return Shared(
        places=tuple(places),
        imbalance_before=before / mean if mean else 1.0,
        imbalance=cost / mean if mean else 1.0,
        gap=cost / bound - 1 if bound else 0.0,
    )


def as_loaded(sizes: Array, model: WorkModel, shape: BatchShape, is_exchanged: bool) -> Array:
    """Return ``samples [replica, microbatch, place]`` of microbatches as loaded, in another order, or
    (``is_exchanged``) on other replicas, too."""
    groups = in_order(sizes, shape).reshape(-1, shape.micro_batch_size)
    works = group_weights(sizes, model, groups, shape.is_padded).sum(axis=1).reshape(_cut(shape))
    if is_exchanged:
        return groups[numpy.array(share(works).places)]
    places = numpy.array([share(row[None]).places[0] for row in works])
    return groups[places + numpy.arange(shape.num_replicas)[:, None] * shape.num_microbatches]


def short_at_the_ends(times: Array) -> Array:
    """Return an order of microbatches with the shortest first and last, while a pipeline fills and drains."""
    rising = numpy.argsort(times, kind="stable")
    return numpy.concatenate((rising[::2], rising[1::2][::-1]))


def _check(sizes: Array, shape: BatchShape) -> None:
    if len(sizes) < shape.num_replicas:
        raise ConfigError(f"{len(sizes)} samples are fewer than the {shape.num_replicas} replicas.")
    if len(sizes) != shape.num_samples:
        raise ConfigError(
            f"{len(sizes)} samples do not fill {shape.num_replicas} replicas x {shape.num_microbatches} microbatches x "
            f"{shape.micro_batch_size} samples."
        )
    if shape.max_tokens and (longest := int(sizes[:, _TOKENS].max())) > shape.max_tokens:
        raise ConfigError(
            f"sample {int(sizes[:, _TOKENS].argmax())} of the batch has {longest} tokens and fits no microbatch: a "
            f"microbatch may have {shape.max_tokens}."
        )


def _cut(shape: BatchShape) -> tuple[int, int]:
    return shape.num_replicas, shape.num_microbatches


def _packs(sizes: Array, model: WorkModel, shape: BatchShape) -> Array | None:
    """Return packs ``[replica, microbatch, place]``; ``None`` if microbatches are single samples or padded, or if packs
    of equal numbers must be formed before their assignment to replicas to respect the limit."""
    if shape.is_padded or shape.micro_batch_size == 1:
        return None
    work, tokens = model.of(sizes), sizes[:, _TOKENS]
    if not shape.is_filled:
        return equal_packs(work, tokens, shape.num_replicas, shape.micro_batch_size, shape.max_tokens)
    packs = filled_packs(work, tokens, *_cut(shape), shape.max_tokens)
    if packs is None:
        raise ConfigError(
            f"the batch has {int(tokens.sum())} tokens, its {shape.num_replicas * shape.num_microbatches} packs of "
            f"{shape.max_tokens} hold {shape.num_replicas * shape.num_microbatches * shape.max_tokens}, and no packing "
            "that fits was found. Raise the length of a pack, or lower the micro batch size for more packs."
        )
    return packs


def _microbatches(sizes: Array, shape: BatchShape) -> Array:
    """Return ``[microbatch, place]``: the samples of each microbatch, within the limit of tokens."""
    size, number = shape.micro_batch_size, shape.num_replicas * shape.num_microbatches
    tokens = sizes[:, _TOKENS]
    if size == 1:
        return numpy.arange(number)[:, None]
    if shape.is_padded:
        # Neighbours in length: no other grouping pads less.
        groups = numpy.argsort(-tokens, kind="stable").reshape(number, size)
        used = tokens[groups].max(axis=1) * size
    else:
        bins = partition(tokens[:, None].astype(numpy.float64), number, size)
        groups = numpy.argsort(bins, kind="stable").reshape(number, size)
        used = tokens[groups].sum(axis=1)
    if shape.max_tokens and used.max() > shape.max_tokens:
        longest = groups[int(used.argmax())]
        raise ConfigError(
            f"samples {', '.join(map(str, longest.tolist()))} of the batch need {int(used.max())} tokens in one "
            f"microbatch of {size}, which may have {shape.max_tokens}. Lower the micro batch size."
        )
    return groups


def group_weights(sizes: Array, model: WorkModel, groups: Array, is_padded: bool) -> Array:
    """Return ``[microbatch, phase]``: work, including that of padding."""
    if not is_padded or groups.shape[1] == 1:
        # Absent samples use the last row.
        of_sample: Array = numpy.concatenate((model.of(sizes), numpy.zeros((1, len(model.phases)))))
        return of_sample[groups].sum(axis=1)
    padded = sizes[groups]
    padded[:, :, _TOKENS] = padded[:, :, _TOKENS].max(axis=1, keepdims=True)
    work: Array = model.of(padded.reshape(-1, sizes.shape[1])).reshape(*groups.shape, -1).sum(axis=1)
    return work
