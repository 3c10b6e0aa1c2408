"""Time and memory of a module for a sample, relative to the profile's point.

Memory is linear in rows (fused attention). Time is linear in rows plus a quadratic part for attention. Both parts are
fitted to times at several lengths if the profile has them (``measured_work``). Otherwise the quadratic part's share at
the profile's point is that of its operations: 4 x hidden size x rows (half of it for causal attention) compared with 2
x parameters, per row of a layer. Formula X1 in docs/data.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from mindspeed_autoparallel.data.distribution import Distribution
from mindspeed_autoparallel.data.work import COLUMNS, ModuleWork
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.spread.draws import Array
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec.model import Module

_MIN_SPREAD = 1.2
"""Least ratio of the longest to the shortest length: differences between closer ones are noise."""


def measured_work(
    name: str, rows: str, points: Sequence[tuple[float, float]], share: float, per_row: float
) -> ModuleWork | None:
    """Return the non-negative work that fits ``points`` (rows of a sample, time) with the least relative error.

    For text the squares are a part of their own. For pictures and sounds only the rows of a microbatch are known, not
    those of each item: attention has the ``share`` of its operations, with ``per_row`` rows of one picture for a row.
    ``None`` if the lengths are too close to one another.
    """
    found = numpy.array(points, dtype=numpy.float64).reshape(-1, 2)
    found = found[found[:, 1] > 0]
    if len(found) < 3 or found[:, 0].max() < _MIN_SPREAD * found[:, 0].min():
        return None
    count, times = found[:, 0], found[:, 1]
    if rows == "tokens":
        columns = numpy.stack((numpy.ones(len(found)), count, count**2), axis=1)
        fixed, linear, quadratic = _not_negative_fit(columns / times[:, None]).tolist()
    else:
        columns = numpy.stack((numpy.ones(len(found)), count * (1 + share * per_row)), axis=1)
        fixed, linear = _not_negative_fit(columns / times[:, None]).tolist()
        quadratic = share * linear
    if fixed + linear + quadratic <= 0:
        return None
    return ModuleWork(name=name, rows=rows, linear=linear, quadratic=quadratic, fixed=fixed)


def _not_negative_fit(columns: Array) -> Array:
    """Return the non-negative weights of ``columns [point, part]`` whose sums are nearest to 1 at every point.

    There are few parts, so every set of them is tried.
    """
    number = columns.shape[1]
    best: Array = numpy.zeros(number)
    least = float(len(columns))
    scale = numpy.abs(columns).max(axis=0)
    for size in range(1, number + 1):
        for chosen in itertools.combinations(range(number), size):
            parts = columns[:, chosen] / scale[list(chosen)]
            weights = numpy.linalg.lstsq(parts, numpy.ones(len(columns)), rcond=None)[0]
            error = float(((parts @ weights - 1) ** 2).sum())
            if (weights >= 0).all() and error < least * (1 - 1e-9):
                least, best = error, numpy.zeros(number)
                best[list(chosen)] = weights / scale[list(chosen)]
    return best


ROWS_OF = {"text_decoder": "tokens", "image_encoder": "patches", "audio_encoder": "frames"}
PADDINGS = ("longest", "sequence", "none")
"""Padding of a microbatch's texts: to its longest, to the sequence length, or packed."""
_TOKENS = COLUMNS.index("tokens")


@dataclass(frozen=True, kw_only=True)
class SampleFactors:
    """Factors of every module, in the order of the profile's model; 1 for modules without rows."""

    work: tuple[ModuleWork | None, ...]
    """Work by module; 1 in the reference sample."""
    reference_rows: tuple[float, ...]
    padding: str
    sequence_length: int
    notes: tuple[str, ...]
    pack_length: int = 0
    """Tokens to which packs of any number of samples are filled; 0: packs have as many samples as a microbatch."""

    def of_packs(self, sizes: Array, micro_batch_size: int) -> Array:
        """Return time factors ``[pack, module]`` for ``sizes [pack, place, column]``, relative to a microbatch.

        Unused places of a pack are rows of zeros; the microbatch has ``micro_batch_size`` samples.
        """
        share = sizes.shape[1] / micro_batch_size
        times, _ = self.of(sizes)
        # A module's fixed time counts once per microbatch.
        fixed: Array = numpy.array([1.0 if work is None else work.fixed for work in self.work])
        return fixed + share * (times - fixed)

    def largest(self, data: Distribution) -> Array:
        """Return upper bounds ``[module]`` of the byte factors of a microbatch of ``data``, each separately."""
        factors: Array = self.of(data.sizes()[:, None, :])[1].max(axis=0)
        return factors

    def largest_pack(self, data: Distribution, micro_batch_size: int) -> Array:
        """Return upper bounds ``[module]`` of the byte factors of a filled pack, each separately."""
        sizes = data.sizes()
        _, rows = self.of(sizes[:, None, :])
        per_token: Array = rows / sizes[:, [_TOKENS]].clip(1)
        factors: Array = per_token.max(axis=0) * self.pack_length / micro_batch_size
        return numpy.where([work is None for work in self.work], 1.0, factors)

    def of(self, sizes: Array) -> tuple[Array, Array]:
        """Return factors of time and of bytes ``[microbatch, module]`` for ``sizes [microbatch, sample, column]``."""
        padded = sizes.copy()
        if self.padding == "longest":
            padded[:, :, _TOKENS] = padded[:, :, _TOKENS].max(axis=1, keepdims=True)
        elif self.padding == "sequence":
            padded[:, :, _TOKENS] = self.sequence_length
        flat = padded.reshape(-1, sizes.shape[2])
        shape = (sizes.shape[0], sizes.shape[1])
        times: Array = numpy.ones((sizes.shape[0], len(self.work)))
        rows: Array = numpy.ones((sizes.shape[0], len(self.work)))
        for index, work in enumerate(self.work):
            if work is not None:
                times[:, index] = work.of(flat).reshape(shape).mean(axis=1)
                counted = flat[:, COLUMNS.index(work.rows)].reshape(shape).mean(axis=1)
                rows[:, index] = counted / self.reference_rows[index]
        return times, rows

    def weight(self, sizes: Array) -> Array:
        """Return the sum of the modules' time factors ``[sample]`` for ``sizes [sample, column]``, without padding."""
        weight: Array = sum((work.of(sizes) for work in self.work if work is not None), numpy.zeros(len(sizes)))
        return weight

    def mean(self, data: Distribution, micro_batch_size: int) -> tuple[Array, Array]:
        """Return the exact means ``[module]`` of both results of ``of`` over microbatches drawn from ``data``."""
        sizes, shares = data.sizes(), data.shares()
        times, rows = self.of(sizes[:, None, :])
        weights = numpy.repeat(shares[:, None], len(self.work), axis=1)
        if self.padding == "longest":
            order = numpy.argsort(sizes[:, _TOKENS], kind="stable")
            below: Array = numpy.append(0.0, numpy.cumsum(shares[order])) ** micro_batch_size
            # The probability that a row is the longest of a microbatch, to which all others are padded.
            texts = [work is not None and work.rows == "tokens" for work in self.work]
            weights[order[:, None], numpy.flatnonzero(texts)] = numpy.diff(below)[:, None]
        return (weights * times).sum(axis=0), (weights * rows).sum(axis=0)


def sample_factors(
    profile: Profile, data: Distribution, padding: str = "longest", pack_length: int = 0
) -> SampleFactors:
    """Return the factors of a profile's modules for the samples of ``data``.

    The reference is the profile's sample (``tokens_per_sample``), or the mean sample if the profile has none.
    """
    if profile.memory_semantics == "mindspeed":
        raise ConfigError("memory by samples needs a profile of this tool; MindSpeed's file has one figure a layer.")
    if padding not in PADDINGS:
        raise ConfigError(f"padding must be one of {', '.join(PADDINGS)}, got {padding!r}.")
    longest, length = int(data.sizes()[:, _TOKENS].max()), profile.model.sequence_length
    if pack_length and longest > pack_length:
        raise ConfigError(f"the longest sample has {longest} tokens and fits in no pack of {pack_length}.")
    if longest > length:
        raise ConfigError(
            f"the longest sample has {longest} tokens, the profile's sequences {length}: describe the data with "
            f"--seq-length {length}, or plan by a profile of longer sequences."
        )
    works: list[ModuleWork | None] = []
    references, notes = [], []
    measurement = profile.measurements[0]
    for module in profile.model.modules:
        rows = ROWS_OF.get(module.name)
        if rows is None:
            works.append(None)
            references.append(1.0)
            notes.append(f"{module.name} is planned with equal samples.")
            continue
        mean, items = _mean_rows(data, rows)
        reference = float(module.tokens_per_sample or (length if rows == "tokens" else mean))
        notes += _notes_on(module, rows, mean, reference, longest)
        if reference <= 0:
            works.append(None)
            references.append(1.0)
            continue
        parameters = measurement.modules[module.name].layer.dense.num_parameters * measurement.at.tensor_size
        causal = 0.5 if rows == "tokens" else 1.0
        share = 2.0 * module.hidden_size * causal / parameters if parameters and module.hidden_size else 0.0
        if not share:
            notes.append(
                f"{module.name}: no hidden size or parameters in the profile, its time is taken as linear in {rows}."
            )
        squared = reference**2 if rows == "tokens" else reference * items
        works.append(
            measured_work(module.name, rows, profile.time_by_rows.get(module.name, ()), share, squared / reference)
            or _computed_work(module.name, rows, reference, share, squared)
        )
        references.append(reference)
    return SampleFactors(
        work=tuple(works),
        reference_rows=tuple(references),
        padding=padding,
        sequence_length=length,
        notes=tuple(notes),
        pack_length=pack_length,
    )


def _notes_on(module: Module, rows: str, mean: float, reference: float, longest: int) -> list[str]:
    """Return a warning about a module measured with ``reference`` rows when samples have ``mean`` rows, if
    it matters."""
    notes = []
    if reference <= 0:
        notes.append(f"no sample has {rows}: {module.name} is planned as measured.")
    elif not mean:
        notes.append(
            f"no sample has {rows}: {module.name} is planned with little or no time and memory. If it is trained on "
            "some, describe those records (--mm-data)."
        )
    if not module.tokens_per_sample:
        basis = "its sequence length" if rows == "tokens" else "the data's mean"
        notes.append(f"the profile lacks the number of {rows} in the measurement of {module.name}: {basis} is assumed.")
    if rows == "tokens" and longest > reference:
        notes.append(
            f"{module.name} was measured at {reference:g} tokens, the longest sample has {longest}: its time and "
            "memory are extrapolated, memory as linear in tokens."
        )
    return notes


def _computed_work(name: str, rows: str, reference: float, share: float, squared: float) -> ModuleWork:
    whole = reference + share * squared
    return ModuleWork(name=name, rows=rows, linear=1 / whole, quadratic=share / whole)


def _mean_rows(data: Distribution, rows: str) -> tuple[float, float]:
    """Return the mean rows per sample, and the mean over rows of the rows in their picture or clip."""
    sizes, shares = data.sizes(), data.shares()
    mean = float((shares * sizes[:, COLUMNS.index(rows)]).sum())
    if rows == "tokens" or not mean:
        return mean, mean
    return mean, float((shares * sizes[:, COLUMNS.index(f"squared_{rows}")]).sum()) / mean
