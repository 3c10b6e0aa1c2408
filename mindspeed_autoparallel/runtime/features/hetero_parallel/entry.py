"""``--hetero-parallel``: model.json's sizes become the host's arguments, or are refused with their numbers."""

from __future__ import annotations

import argparse

from mindspeed_autoparallel.runtime.features.hetero_parallel.apply import apply
from mindspeed_autoparallel.runtime.features.hetero_parallel.request import read_request


def prepare(arguments: argparse.Namespace) -> None:
    """Read the layouts and train under them; ``ConfigError`` before any process group exists."""
    apply(read_request(arguments), arguments)
