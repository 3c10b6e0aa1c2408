"""The memory margin of ``plan``, and the duration of a whole training."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from mindspeed_autoparallel.errors import ConfigError

if TYPE_CHECKING:
    from mindspeed_autoparallel.profiles import Profile
    from mindspeed_autoparallel.profiles.sharded import ShardedProfile
    from mindspeed_autoparallel.spec import Cluster

_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_MOST_TOKENS = 1e18


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--memory-margin",
        type=float,
        metavar="PERCENT",
        default=0.0,
        help="percent of the memory to leave free in addition to the 6 that plans never use (default 0)",
    )
    add(
        "--time-limit-s",
        type=float,
        help="then end with the best plan so far and its gap (default: 600, with --fsdp2 60)",
    )
    add_tokens(parser)


def add_tokens(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokens", help="tokens of the whole training, such as 1T or 300B: also print its duration in days"
    )


def with_margin(arguments: argparse.Namespace, profile: Profile | ShardedProfile, cluster: Cluster) -> Cluster:
    """Return ``cluster`` with the memory that a plan may use."""
    margin = arguments.memory_margin
    if not 0 <= margin < 100:
        raise ConfigError(f"--memory-margin must be 0 to below 100 percent, got {margin:g}.")
    if not margin:
        return cluster
    from mindspeed_autoparallel.planner.candidate import limit_of

    return replace(cluster, memory_limit_bytes=int(limit_of(profile.device, cluster) * (1 - margin / 100)))


def tokens(text: str | None) -> float | None:
    """Parse ``1T``, ``300B`` or a plain number."""
    if text is None:
        return None
    try:
        number = float(text.rstrip("KMBTkmbt")) * _UNITS.get(text[-1:].upper(), 1.0)
    except ValueError:
        number = -1.0
    if not 0 < number <= _MOST_TOKENS:
        raise ConfigError(f"--tokens must be above 0 and at most 1000000T, such as 1T or 300B, got {text!r}.")
    return number
