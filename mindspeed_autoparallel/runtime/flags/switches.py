"""The flags that start a feature, in one table: parsing, the checks of an installation and ``doctor`` read it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from mindspeed_autoparallel.errors import destination_of

_FEATURES = "mindspeed_autoparallel.runtime.features"


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A flag that starts a feature once the host has parsed its arguments."""

    flag: str
    """With dashes: ``--auto-parallel-mm``."""
    start: str
    """``module:function(arguments)``."""
    is_job: bool = False
    """Excludes the other jobs: some search and exit, the plans train."""
    is_own_launcher: bool = False
    """Starts its own processes: refuses torchrun."""
    is_hidden: bool = False
    """Left out of the command line of the processes that measure for a feature."""
    is_for_whole_parameters: bool = False
    """Refuses scripts in which Megatron shards the parameters."""
    may_be_hosts: bool = False
    """If the host's parser already has the flag, it keeps the host's meaning."""

    @property
    def destination(self) -> str:
        """Return the attribute of the parsed arguments."""
        return destination_of(self.flag)


HETERO, HETERO_BESIDE = "--hetero-parallel", "--auto-parallel-hetero"
"""MindSpeed-MM has a flag of the first name for its own hetero parallel; the second means ours on every host."""
SWITCHES = (
    Switch(
        flag="--auto-parallel-preflight",
        start=f"{_FEATURES}.preflight.entry:run_and_exit",
        is_job=True,
        is_own_launcher=True,
    ),
    Switch(
        flag="--auto-parallel-mm",
        start=f"{_FEATURES}.auto_parallel_mm.entry:search_and_exit",
        is_job=True,
        is_own_launcher=True,
        is_hidden=True,
        is_for_whole_parameters=True,
    ),
    Switch(flag="--auto-parallel-elastic", start=f"{_FEATURES}.elastic.entry:prepare"),
    Switch(
        flag="--auto-parallel-plan",
        start=f"{_FEATURES}.apply_plan.entry:prepare",
        is_job=True,
        is_for_whole_parameters=True,
    ),
    Switch(flag=HETERO, start=f"{_FEATURES}.hetero_parallel.entry:prepare", is_hidden=True, may_be_hosts=True),
    Switch(flag=HETERO_BESIDE, start=f"{_FEATURES}.hetero_parallel.entry:prepare", is_hidden=True),
    Switch(
        flag="--auto-tuning",
        start=f"{_FEATURES}.auto_tuning.entry:search_and_exit",
        is_job=True,
        is_own_launcher=True,
        is_hidden=True,
        is_for_whole_parameters=True,
    ),
    Switch(
        flag="--operator-search",
        start=f"{_FEATURES}.operator_search.entry:search_and_exit",
        is_job=True,
        is_hidden=True,
    ),
    Switch(flag="--operator-plan", start=f"{_FEATURES}.operator_plan.entry:prepare", is_job=True),
    # The reference training has a balance of its own under this name.
    Switch(flag="--data-balance", start=f"{_FEATURES}.data_balance.entry:prepare", may_be_hosts=True),
    Switch(flag="--order-microbatches", start=f"{_FEATURES}.data_balance.entry:prepare"),
)
"""In the order in which the features start."""


def hetero_switches(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the destinations that are on of the two switches for encoders under their own layouts."""
    both = (switch.destination for switch in SWITCHES if switch.flag in (HETERO, HETERO_BESIDE))
    return tuple(name for name in both if getattr(arguments, name, False))
