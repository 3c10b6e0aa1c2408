"""What a host can run of the splits that a search could find."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from mindspeed_autoparallel.spec import Layout

Layers = Mapping[str, tuple[int, ...]]
"""Module name to layers by virtual stage."""


@dataclass(frozen=True, kw_only=True)
class Splits:
    """What a host can run."""

    of_layout: Callable[[Layout], Iterable[Layers]]
    """Every split of a layout; none where it cannot run the layout at all."""
    recompute_by_stage: bool
    """Whether each stage may recompute a number of its own; else all layers of all modules, or none."""
    description: str
    """For people: ``first and last stage of any size, those between alike``."""
