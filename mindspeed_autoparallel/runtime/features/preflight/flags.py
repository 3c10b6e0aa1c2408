"""Flags of ``--auto-parallel-preflight``."""

import math
from dataclasses import dataclass

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.flags.flag import FlagGroup, flag

SCRIPT = "script"
"""Value of the flag without a plan: the layout is the script's own."""


@dataclass(frozen=True, kw_only=True)
class PreflightFlags(FlagGroup):
    """Flags of ``--auto-parallel-preflight``."""

    TITLE = "auto-parallel-preflight: run each distinct rank of a layout alone on this device"

    auto_parallel_preflight: str | None = flag(
        None,
        "Run each distinct rank of this plan.json alone for a few steps on this device, report memory and time, and "
        "exit before training. Without a file: the layout of the script's own flags. Start the script with plain "
        "python.",
        metavar="PLAN",
        const=SCRIPT,
    )
    auto_parallel_preflight_ranks: str = flag(
        "distinct",
        "Ranks to run: distinct (one of each kind), ends (first, last and the one predicted to hold most), or numbers "
        "such as 0,37.",
        metavar="RANKS",
    )
    auto_parallel_preflight_steps: int = flag(
        3, "Steps of each rank: one to warm up, one for memory, the others for time.", metavar="N", least=3
    )
    auto_parallel_preflight_imbalance: float = flag(
        1.0,
        "Tokens that the experts of the rank receive, relative to an even share; routers are balanced at 1.",
        metavar="RATIO",
    )
    auto_parallel_preflight_timeout_s: int = flag(600, "Time limit of each rank, in seconds.", metavar="S", least=1)


def check_imbalance(ratio: float) -> None:
    """Raise ``ConfigError`` for an impossible share of tokens."""
    if not (math.isfinite(ratio) and ratio >= 1):
        raise ConfigError(f"--auto-parallel-preflight-imbalance must be at least 1, got {ratio:g}.")
