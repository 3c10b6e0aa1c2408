"""Sets up ``--data-balance`` and ``--order-microbatches``, or refuses them if the training would change."""

from __future__ import annotations

import argparse

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.features.data_balance.flags import DataBalanceFlags
from mindspeed_autoparallel.runtime.features.data_balance.stepping import MicrobatchOrder
from mindspeed_autoparallel.runtime.features.data_balance.weights import batch_work
from mindspeed_autoparallel.runtime.flags.flag import read_flags
from mindspeed_autoparallel.runtime.flags.switches import hetero_switches
from mindspeed_autoparallel.runtime.megatron.description import describe
from mindspeed_autoparallel.runtime.state import of_process

_GLOO = "--disable-gloo-process-groups"
_GLOO_ARGUMENTS = ("use_gloo_process_groups", "enable_gloo_process_groups")
"""Its destinations in Megatron's releases."""


def prepare(arguments: argparse.Namespace) -> None:
    """Set up this process's order of microbatches before any process group exists.

    Raises ``ConfigError`` for an incompatible flag.
    """
    flags = read_flags(DataBalanceFlags, arguments)
    own = "--data-balance" if flags.data_balance else "--order-microbatches"
    if hetero_switches(arguments):
        raise ConfigError(
            f"{own} cannot be combined with --hetero-parallel, whose encoders take their batches in the order of the "
            "data: use its --hetero-balance."
        )
    if flags.data_balance and not all(getattr(arguments, name, True) for name in _GLOO_ARGUMENTS):
        raise ConfigError(f"--data-balance exchanges microbatches over gloo: leave out {_GLOO}.")
    order = of_process(MicrobatchOrder)
    order.work, order.is_exchanged = batch_work(describe(arguments), arguments), flags.data_balance
    if int(getattr(arguments, "rank", 0) or 0) == 0:
        order.log_every = int(getattr(arguments, "log_interval", 0) or 0)
