"""The file with the distribution of a data set's samples: combinations of sizes, with their frequencies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy

from mindspeed_autoparallel.data.work import COLUMNS, Array, SampleSize
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import shown
from mindspeed_autoparallel.spec.codec import JsonFile

FORMAT = "mindspeed-autoparallel/data"
SCHEMA_VERSION = 1
KINDS = ("records", "lengths", "indexed", "table")
_LARGEST = 2**40


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """The source of the data, and the method that gave its sizes."""

    kind: str
    """``records`` (the mllm format), ``lengths`` (a list), ``indexed`` (documents of a Megatron data set) or ``table``
    (rows of tables or archives)."""
    files: tuple[str, ...]
    sha256: str
    """Hash of the content of ``files`` (for tables: names, sizes and ends), to detect another data set."""
    tokens_by: str
    """``bytes``, a tokenizer's folder, an estimate in words, or ``given``."""
    num_records: int
    """Number of records of the whole data set."""
    num_read: int
    """Number of records read, including broken ones: all, or a sample drawn without replacement."""
    num_broken: int = 0
    num_cut: int = 0
    """Texts longer than ``longest_tokens``, which training cuts there."""
    longest_tokens: int = 0
    """Length at which training cuts texts (``--seq-length``); 0: none."""
    seed: int = 0
    fingerprint: str = ""
    """Hash of the data and of everything that affects the sizes: if equal, nothing is read again."""
    longest_record: str = ""
    """Name of the record with the most tokens."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"kind must be one of {', '.join(KINDS)}, got {shown(self.kind)}.")
        if not 0 <= self.num_broken < self.num_read <= self.num_records:
            raise ConfigError(
                f"{self.num_broken} broken of {self.num_read} read of {self.num_records} records is impossible."
            )

    @property
    def is_whole(self) -> bool:
        """Return whether every record was read."""
        return self.num_read == self.num_records


@dataclass(frozen=True, kw_only=True)
class Distribution(JsonFile):
    """Weighted samples: ``rows`` are distinct sizes (the columns of ``SampleSize``), ``weights`` their numbers of
    samples."""

    WHAT, ERROR = "data distribution", ConfigError
    AGAIN = "Create one with: mindspeed-autoparallel data describe."

    source: DataSource
    columns: tuple[str, ...]
    rows: tuple[tuple[int, ...], ...]
    weights: tuple[int, ...]
    format: str = FORMAT
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if self.columns != COLUMNS:
            raise ConfigError(f"columns must be {', '.join(COLUMNS)}.")
        if not self.rows or len(self.rows) != len(self.weights) or min(self.weights) < 1:
            raise ConfigError(
                f"{len(self.rows)} rows and {len(self.weights)} weights: every row needs one, at least 1."
            )
        for index, row in enumerate(self.rows):
            if len(row) != len(COLUMNS) or not all(0 <= value <= _LARGEST**2 for value in row) or row[0] < 1:
                raise ConfigError(f"rows[{index}]: {shown(row)} is not a sample of at least one token.")
        if sum(self.weights) != self.source.num_read - self.source.num_broken:
            raise ConfigError(f"the weights add up to {sum(self.weights)}, {self.source.num_read} records were read.")

    def sizes(self) -> Array:
        """Return ``[row, column]``, int64."""
        return numpy.array(self.rows, dtype=numpy.int64).reshape(-1, len(COLUMNS))

    def shares(self) -> Array:
        """Return every row's share of the samples; they add up to 1."""
        weights = numpy.array(self.weights, dtype=numpy.float64)
        return weights / weights.sum()

    @property
    def mean_tokens(self) -> float:
        """Return the mean tokens of a sample."""
        return float(self.sizes()[:, COLUMNS.index("tokens")] @ self.shares())

    def column(self, name: str) -> tuple[Array, Array]:
        """Return the values of one column in ascending order, and their counts."""
        values, weights = self.sizes()[:, COLUMNS.index(name)], numpy.array(self.weights)
        found, place = numpy.unique(values, return_inverse=True)
        return found, numpy.bincount(place, weights=weights).astype(numpy.int64)


def make_distribution(source: DataSource, samples: Iterable[SampleSize]) -> Distribution:
    """Return ``samples`` with equal ones merged, in ascending order."""
    counts = sorted(Counter(tuple(sample) for sample in samples).items())
    return Distribution(
        source=source,
        columns=COLUMNS,
        rows=tuple(row for row, _ in counts),
        weights=tuple(count for _, count in counts),
    )
