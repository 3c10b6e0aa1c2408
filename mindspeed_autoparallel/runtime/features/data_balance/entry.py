"""``--data-balance`` and ``--order-microbatches``: refused where training would change, else set up."""

from __future__ import annotations

import argparse

from mindspeed_autoparallel.runtime.features.data_balance.apply import apply
from mindspeed_autoparallel.runtime.features.data_balance.request import read_request


def prepare(arguments: argparse.Namespace) -> None:
    """Set up this process's order of microbatches; ``ConfigError`` before any process group exists."""
    apply(read_request(arguments), arguments)
