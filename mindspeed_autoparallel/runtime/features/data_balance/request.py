"""What ``--data-balance`` and ``--order-microbatches`` ask for, refused where the training would not stay the same."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.features.data_balance.flags import DataBalanceFlags
from mindspeed_autoparallel.runtime.features.data_balance.weights import BatchWork, batch_work
from mindspeed_autoparallel.runtime.flags.flag import read_flags
from mindspeed_autoparallel.runtime.megatron.description import describe

_GLOO = "--disable-gloo-process-groups"
_GLOO_ARGUMENTS = ("use_gloo_process_groups", "enable_gloo_process_groups")
"""What Megatron's releases call it."""


@dataclass(frozen=True, kw_only=True)
class BalanceRequest:
    """How the microbatches of a step are ordered."""

    work: BatchWork
    is_exchanged: bool
    """Between replicas; otherwise within one."""
    log_every: int
    """Steps between lines of the log; 0: none."""


def read_request(arguments: argparse.Namespace) -> BalanceRequest:
    """Return the request; ``ConfigError`` names the flag that does not go with it."""
    flags = read_flags(DataBalanceFlags, arguments)
    asked = "--data-balance" if flags.data_balance else "--order-microbatches"
    if getattr(arguments, "hetero_parallel", False) or getattr(arguments, "auto_parallel_hetero", False):
        raise ConfigError(
            f"{asked} does not go with --hetero-parallel, whose encoders take their batches in the order of the data: "
            "use its --hetero-balance."
        )
    if flags.data_balance and not all(getattr(arguments, name, True) for name in _GLOO_ARGUMENTS):
        raise ConfigError(f"--data-balance exchanges microbatches over gloo: leave out {_GLOO}.")
    is_first = int(getattr(arguments, "rank", 0) or 0) == 0
    return BalanceRequest(
        work=batch_work(describe(arguments), arguments),
        is_exchanged=flags.data_balance,
        log_every=int(getattr(arguments, "log_interval", 0) or 0) if is_first else 0,
    )
