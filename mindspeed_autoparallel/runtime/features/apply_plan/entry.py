"""``--auto-parallel-plan``: a plan put into the arguments the host has just parsed, before it validates them."""

from __future__ import annotations

import argparse

from mindspeed_autoparallel.runtime.features.apply_plan.apply import apply
from mindspeed_autoparallel.runtime.features.apply_plan.request import read_request


def prepare(arguments: argparse.Namespace) -> None:
    """Set ``arguments`` by the plan; ``PlanError`` where it does not fit the model or the world."""
    apply(read_request(arguments), arguments)
