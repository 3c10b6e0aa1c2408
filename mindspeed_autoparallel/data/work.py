"""Work of samples: linear in rows and, for attention, in the sum of their squares."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy

from mindspeed_autoparallel.errors import ConfigError

Array = Any
"""A numpy array."""


class SampleSize(NamedTuple):
    """Counts of one sample. Attention in an encoder is limited to one picture or clip, hence the sums of squares."""

    tokens: int
    """Tokens of the text decoder, including those of pictures and audio."""
    images: int = 0
    patches: int = 0
    """Rows of the image encoder, all pictures together."""
    squared_patches: int = 0
    """Sum over the pictures of patches squared."""
    clips: int = 0
    """Audio clips."""
    frames: int = 0
    """Mel frames of all clips."""
    squared_frames: int = 0


COLUMNS = SampleSize._fields
SHOWN_COLUMNS = ("tokens", "images", "patches", "clips", "frames")
"""Displayed columns; the squares follow from them."""


_ROWS = {"tokens": None, "patches": "squared_patches", "frames": "squared_frames"}
"""Rows of a module, and the column with their squares (of ``tokens``: each sample is one row of attention)."""


@dataclass(frozen=True, kw_only=True)
class ModuleWork:
    """Time of one module for one sample, in any unit: ``fixed`` + ``linear`` x rows + ``quadratic`` x sum of
    squares."""

    name: str
    rows: str
    """``tokens``, ``patches`` or ``frames``."""
    linear: float
    quadratic: float = 0.0
    fixed: float = 0.0

    def __post_init__(self) -> None:
        if self.rows not in _ROWS:
            raise ConfigError(f"{self.name}: rows must be {', '.join(_ROWS)}, got {self.rows!r}.")
        parts = (self.fixed, self.linear, self.quadratic)
        if not all(0 <= part < math.inf for part in parts) or sum(parts) == 0:
            raise ConfigError(
                f"{self.name}: fixed {self.fixed}, linear {self.linear} and quadratic {self.quadratic} are not valid "
                "work."
            )

    def of(self, sizes: Array) -> Array:
        """Return the work of every sample of ``sizes [sample, column]``."""
        rows = sizes[:, COLUMNS.index(self.rows)].astype(numpy.float64)
        squares = _ROWS[self.rows]
        squared = rows**2 if squares is None else sizes[:, COLUMNS.index(squares)]
        work: Array = self.fixed + self.linear * rows + self.quadratic * squared
        return work


@dataclass(frozen=True, kw_only=True)
class WorkModel:
    """Modules by phase. Phases, such as encoders with separate layouts and the backbone, follow one another, and each
    ends with its slowest replica. Modules of one phase are added up."""

    phases: tuple[tuple[ModuleWork, ...], ...]

    def of(self, sizes: Array) -> Array:
        """Return ``[sample, phase]`` for ``sizes [sample, column]``."""
        return numpy.stack([sum(module.of(sizes) for module in phase) for phase in self.phases], axis=1)


TOKENS = WorkModel(phases=((ModuleWork(name="text_decoder", rows="tokens", linear=1.0),),))
"""Work proportional to tokens."""
