"""A layout that can be solved: legal, and with costs; and the splits that a host can run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from mindspeed_autoparallel.profiles import Measurement
from mindspeed_autoparallel.spec import Layout


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A legal, measured layout."""

    layout: Layout
    measurement: Measurement
    num_microbatches: int


Layers = Mapping[str, tuple[int, ...]]
"""Module name to layers by virtual stage."""


@dataclass(frozen=True, kw_only=True)
class Splits:
    """The splits that a host can run."""

    of_layout: Callable[[Layout], Iterable[Layers]]
    """Every split of a layout; none if the host cannot run the layout."""
    recompute_by_stage: bool
    """Whether stages may recompute different numbers of layers; otherwise all layers of all modules, or none."""
    description: str
    """Text for messages: ``first and last stage of any size, those between alike``."""
