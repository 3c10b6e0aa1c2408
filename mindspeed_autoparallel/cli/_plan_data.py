"""``plan --data``: a plan for data whose samples differ, and the cost of their spread."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_autoparallel.cli import _unused_flags
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.whole_numbers import LARGE

if TYPE_CHECKING:
    from mindspeed_autoparallel.data.distribution import Distribution
    from mindspeed_autoparallel.planner.spread.samples import SpreadOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--data`` and its companion flags."""
    add = parser.add_argument
    add("--data", type=Path, help="distribution of the samples, written by `data describe`")
    add(
        "--mm-data",
        type=Path,
        help="with --data: data.json of the training; a distribution of other records is refused",
    )
    add(
        "--data-padding",
        choices=("longest", "sequence", "none"),
        help="pad texts to the longest of a microbatch (default) or to the sequence length, or pack them",
    )
    add(
        "--data-pack-length",
        type=LARGE,
        default=0,
        metavar="TOKENS",
        help="with --data-padding none and --data-balance: fill packs with any number of samples up to this length",
    )
    add("--data-balance", action="store_true", help="assume that training rearranges samples")
    add(
        "--max-oom-probability",
        type=float,
        help="largest probability of running out of memory within --oom-steps (default: 1e-3)",
    )
    add("--oom-steps", type=LARGE, help="steps of the training (default: 10000)")


def check(arguments: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for incompatible flags."""
    without_data = _unused_flags.given(arguments, _unused_flags.OF_DATA)
    if arguments.data is None and without_data:
        raise ConfigError(
            f"{', '.join(without_data)} need{'s' * (len(without_data) == 1)} --data: a distribution of `data describe`."
        )
    if arguments.hetero_parallel and arguments.data_pack_length:
        raise ConfigError(
            "--data-pack-length cannot be combined with --hetero-parallel, whose packs hold equal numbers of samples."
        )
    if arguments.data is not None and arguments.candidate is not None:
        raise ConfigError("--data cannot be combined with --candidate, whose steps are not drawn. Remove one of them.")


def read(arguments: argparse.Namespace) -> tuple[Distribution, SpreadOptions]:
    """Return the distribution and the options for planning with it."""
    from mindspeed_autoparallel.data.distribution import Distribution
    from mindspeed_autoparallel.data.records import refuse_other_records
    from mindspeed_autoparallel.planner.spread.samples import SpreadOptions

    options = SpreadOptions(
        padding=arguments.data_padding or "longest",
        is_balanced=arguments.data_balance,
        max_oom_probability=1e-3 if arguments.max_oom_probability is None else arguments.max_oom_probability,
        oom_steps=10_000 if arguments.oom_steps is None else arguments.oom_steps,
        pack_length=arguments.data_pack_length,
        top_k=arguments.top_k,
    )
    data = Distribution.read(arguments.data)
    if arguments.mm_data is not None:
        refuse_other_records(arguments.data, data.source.sha256, arguments.mm_data)
    return data, options
