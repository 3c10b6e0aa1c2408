"""An operator plan's configuration put into the host's arguments."""

from __future__ import annotations

import argparse
import shlex

from mindspeed_autoparallel.runtime.features.operator_plan.request import OperatorPlanRequest
from mindspeed_autoparallel.runtime.first_rank import print_once


def apply(request: OperatorPlanRequest, arguments: argparse.Namespace) -> None:
    """Set the host's ``arguments``, and print them as flags on rank 0."""
    for name, value in request.values.items():
        setattr(arguments, name, value)
    told = f"training by the operator plan {request.path}: {request.label}"
    print_once(f"{told}\nas flags: {shlex.join(request.flags)}")
