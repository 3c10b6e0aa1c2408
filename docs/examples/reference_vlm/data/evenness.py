"""How even an assignment of samples to replicas is, and a lower bound of the cost of any other."""

from __future__ import annotations

from typing import NamedTuple

import numpy

from mindspeed_autoparallel.data.balance import BatchShape, group_weights
from mindspeed_autoparallel.data.partition import lower_bound
from mindspeed_autoparallel.data.work import COLUMNS, Array, WorkModel

TOKENS = COLUMNS.index("tokens")


class Evenness(NamedTuple):
    loads: Array
    """``[replica, phase]``: work, in the unit of the model."""
    bound: float

    @property
    def cost(self) -> float:
        """Return the sum over phases of the slowest replica's work."""
        return float(self.loads.max(axis=0).sum())

    @property
    def imbalance(self) -> float:
        """Return the slowest replica's work divided by the mean."""
        return self.cost / float(self.loads.mean(axis=0).sum())

    @property
    def gap(self) -> float:
        """Return the excess of the cost over the lower bound, as a share of the bound."""
        return self.cost / self.bound - 1


def evenness(sizes: Array, model: WorkModel, shape: BatchShape, samples: Array) -> Evenness:
    """Return the evenness of ``samples [replica, microbatch, place]``."""
    weights = group_weights(sizes, model, samples.reshape(-1, samples.shape[2]), shape.is_padded)
    loads = weights.reshape(shape.num_replicas, shape.num_microbatches, -1).sum(axis=1)
    return Evenness(loads, bound_of(sizes, model, shape))


def bound_of(sizes: Array, model: WorkModel, shape: BatchShape) -> float:
    """Return a bound over all groupings into microbatches and all assignments of these.

    Padded: neighbours in length pad least, so their mean is a bound; so is the longest sample with its own padding.
    """
    size = shape.micro_batch_size
    if size == 1 or not shape.is_padded:
        per_replica = 0 if shape.is_filled else shape.num_microbatches * size
        return lower_bound(model.of(sizes), shape.num_replicas, per_replica)
    neighbours = numpy.argsort(-sizes[:, TOKENS], kind="stable").reshape(-1, size)
    longest = sizes[numpy.repeat(int(sizes[:, TOKENS].argmax()), size)]
    longest[1:, TOKENS + 1 :] = 0
    mean = group_weights(sizes, model, neighbours, is_padded=True).sum(axis=0) / shape.num_replicas
    return float(numpy.maximum(mean, model.of(longest).sum(axis=0)).sum())
