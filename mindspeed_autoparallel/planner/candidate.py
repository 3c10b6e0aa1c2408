"""A layout that can be solved: legal, and with costs."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_autoparallel.profiles import Measurement
from mindspeed_autoparallel.spec import Layout


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A legal, measured layout."""

    layout: Layout
    measurement: Measurement
    num_microbatches: int
