"""``plan --data``: a plan for data whose samples differ, and what it says about their spread."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_autoparallel.errors import ConfigError

if TYPE_CHECKING:
    from mindspeed_autoparallel.data.distribution import Distribution
    from mindspeed_autoparallel.planner.spread.choose import Search, SpreadOptions
    from mindspeed_autoparallel.profiles import Profile
    from mindspeed_autoparallel.spec import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--data`` and what goes with it."""
    parser.add_argument("--data", type=Path, help="distribution of the samples, written by `data describe`")
    parser.add_argument(
        "--mm-data", type=Path, help="with --data: data.json of the training, whose records it must be of"
    )
    parser.add_argument(
        "--data-padding",
        choices=("longest", "sequence", "none"),
        default="longest",
        help="texts are padded to the longest of a microbatch, to the sequence length, or packed",
    )
    parser.add_argument(
        "--data-pack-length",
        type=int,
        default=0,
        metavar="TOKENS",
        help="with --data-padding none and --data-balance: packs are filled with any number of samples up to this",
    )
    parser.add_argument("--data-balance", action="store_true", help="samples are rearranged while training")
    parser.add_argument(
        "--max-oom-probability", type=float, default=1e-3, help="of running out of memory within --oom-steps (1e-3)"
    )
    parser.add_argument("--oom-steps", type=int, default=10_000, help="steps of the training (10000)")


def check(arguments: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for flags that do not go together."""
    needs = arguments.data_balance or arguments.mm_data is not None or arguments.data_pack_length
    if arguments.data is None and needs:
        raise ConfigError(
            "--data-balance, --data-pack-length and --mm-data need --data: a distribution of `data describe`."
        )
    if arguments.hetero_parallel and arguments.data_pack_length:
        raise ConfigError("--data-pack-length does not go with --hetero-parallel: its packs have equal numbers.")
    if arguments.data is not None and arguments.candidate is not None:
        raise ConfigError("--data does not go with --candidate: its steps are not drawn. Leave one out.")


def plan(arguments: argparse.Namespace, profile: Profile, search: Search) -> Plan:
    """Return the plan that ``--data`` asks for."""
    from mindspeed_autoparallel.planner.spread.choose import choose_plan

    return choose_plan(profile, *read(arguments), search)


def read(arguments: argparse.Namespace) -> tuple[Distribution, SpreadOptions]:
    """Return the distribution and what is asked of a plan for it."""
    from mindspeed_autoparallel.data.distribution import Distribution
    from mindspeed_autoparallel.data.records import refuse_other_records
    from mindspeed_autoparallel.planner.spread.choose import SpreadOptions

    options = SpreadOptions(
        padding=arguments.data_padding,
        is_balanced=arguments.data_balance,
        max_oom_probability=arguments.max_oom_probability,
        oom_steps=arguments.oom_steps,
        pack_length=arguments.data_pack_length,
    )
    data = Distribution.read(arguments.data)
    if arguments.mm_data is not None:
        refuse_other_records(arguments.data, data.source.sha256, arguments.mm_data)
    return data, options
