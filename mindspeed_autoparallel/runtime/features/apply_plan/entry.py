"""``--auto-parallel-plan``: applies a plan to the host's arguments after they are parsed and before they are
validated."""

from __future__ import annotations

import argparse

from mindspeed_autoparallel.runtime.features.apply_plan.apply import apply
from mindspeed_autoparallel.runtime.features.apply_plan.request import read_request


def prepare(arguments: argparse.Namespace) -> None:
    """Set ``arguments`` to the plan; ``PlanError`` if it does not fit the model or the world."""
    apply(read_request(arguments), arguments)
