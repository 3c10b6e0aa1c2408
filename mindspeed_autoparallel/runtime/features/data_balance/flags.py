"""Flags that let the microbatches of a step change places."""

from dataclasses import dataclass

from mindspeed_autoparallel.runtime.flags.flag import FlagGroup, flag


@dataclass(frozen=True, kw_only=True)
class DataBalanceFlags(FlagGroup):
    """Flags of ``--data-balance`` and ``--order-microbatches``."""

    TITLE = "data balance: microbatches change places, the global batch stays"
    USED_BY = ("--data-balance", "--order-microbatches")

    data_balance: bool = flag(
        False,
        "Give the microbatches of every global batch to replicas by their work, and order them within a replica: the "
        "same training, faster where samples differ.",
    )
    order_microbatches: bool = flag(
        False,
        "Order the microbatches of every replica by their work, short ones where the pipeline fills and drains; "
        "nothing is exchanged.",
    )
