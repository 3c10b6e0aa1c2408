"""This process's order of microbatches, which the patched schedule follows."""

from __future__ import annotations

import argparse

from mindspeed_autoparallel.runtime.features.data_balance.request import BalanceRequest
from mindspeed_autoparallel.runtime.features.data_balance.stepping import MicrobatchOrder
from mindspeed_autoparallel.runtime.state import of_process


def apply(request: BalanceRequest, arguments: argparse.Namespace) -> None:
    """Set up this process's order; the host's ``arguments`` stay."""
    order = of_process(MicrobatchOrder)
    order.work, order.is_exchanged, order.log_every = request.work, request.is_exchanged, request.log_every
