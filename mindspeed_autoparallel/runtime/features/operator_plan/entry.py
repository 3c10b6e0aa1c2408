"""``--operator-plan``: a derived configuration becomes the host's arguments, or is refused with its numbers."""

from __future__ import annotations

import argparse

from mindspeed_autoparallel.runtime.features.operator_plan.apply import apply
from mindspeed_autoparallel.runtime.features.operator_plan.request import read_request


def prepare(arguments: argparse.Namespace) -> None:
    """Set ``arguments`` by the plan; ``PlanError`` where it does not fit."""
    apply(read_request(arguments), arguments)
