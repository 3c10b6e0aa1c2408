"""Options of a search: one record from the command line or Python for every search mode."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.operators.search.pins import Pins
from mindspeed_autoparallel.operators.search.pricing import Machine

SEARCH_MODES = ("recursive_programming", "sharding_propagation", "exact")


@dataclass(frozen=True)
class SearchOptions:
    """Options of a search; see docs/operators.md for the modes and units.

    ``tied``: repeated layers are cut alike; None lets the exact mode decide by the size of the graph.
    ``parameter_limit_bytes`` (exact): limit of one device's weights; ``InfeasiblePlan`` if it cannot be met.
    ``memory_limit_bytes`` (exact): limit of one device's weights, gradients, optimizer states and outputs kept for
    backward of one of ``num_microbatches``; a note of the plan reports a limit that cannot be met. ``mem_coeff``
    (recursive_programming): products are cut by symbolic costs; without it every halving is solved to its least
    modelled time. ``most_row_parts`` (the same mode): the most parts that rows are cut into.
    """

    search_mode: str = "recursive_programming"
    mem_coeff: float | None = None
    pins: Pins | None = None
    tied: bool | None = None
    machine: Machine = field(default_factory=Machine)
    parameter_limit_bytes: int | None = None
    memory_limit_bytes: int | None = 64 * 2**30
    num_microbatches: int = 1
    most_row_parts: int | None = None

    def __post_init__(self) -> None:
        if self.search_mode not in SEARCH_MODES:
            raise ConfigError(f"search_mode {self.search_mode!r} is none of {', '.join(SEARCH_MODES)}.")
        given = self.mem_coeff
        if given is not None and not (isinstance(given, (int, float)) and 0 < given < math.inf):
            raise ConfigError(f"mem_coeff={given}: give a positive number, for example 0.1.")
        if self.parameter_limit_bytes is not None and self.search_mode != "exact":
            raise ConfigError(
                f"a limit of parameter bytes is kept by search_mode exact only, not by {self.search_mode}."
            )
