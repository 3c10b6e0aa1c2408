"""``plan --data``: a plan for data whose samples differ, and what it says about their spread."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.units import format_bytes

if TYPE_CHECKING:
    from mindspeed_autoparallel.planner.spread.choose import Search
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
    parser.add_argument("--data-balance", action="store_true", help="samples are rearranged while training")
    parser.add_argument(
        "--max-oom-probability", type=float, default=1e-3, help="of running out of memory within --oom-steps (1e-3)"
    )
    parser.add_argument("--oom-steps", type=int, default=10_000, help="steps of the training (10000)")


def check(arguments: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for flags that do not go together."""
    if arguments.data is None and (arguments.data_balance or arguments.mm_data is not None):
        raise ConfigError("--data-balance and --mm-data need --data: a distribution of `data describe`.")
    if arguments.data is not None and (arguments.hetero_parallel or arguments.candidate is not None):
        raise ConfigError("--data goes with neither --hetero-parallel nor --candidate: their steps are not drawn yet.")


def plan(arguments: argparse.Namespace, profile: Profile, search: Search) -> Plan:
    """Return the plan that ``--data`` asks for."""
    from mindspeed_autoparallel.data.distribution import Distribution
    from mindspeed_autoparallel.data.records import read_format, read_record_set
    from mindspeed_autoparallel.planner.spread.choose import SpreadOptions, choose_plan

    options = SpreadOptions(
        padding=arguments.data_padding,
        is_balanced=arguments.data_balance,
        max_oom_probability=arguments.max_oom_probability,
        oom_steps=arguments.oom_steps,
    )
    data = Distribution.read(arguments.data)
    if arguments.mm_data is not None:
        found = read_record_set(read_format(arguments.mm_data)).sha256
        if found != data.source.sha256:
            raise ConfigError(
                f"{arguments.data} is of other records (sha256 {data.source.sha256[:12]}) than {arguments.mm_data} "
                f"({found[:12]}). Describe the data again."
            )
    return choose_plan(profile, data, options, search)


def text_lines(plan: Plan) -> list[str]:
    """Return what a plan says about the spread of its data; nothing for a plan of equal samples."""
    data = plan.data
    if data is None:
        return []
    lines = [
        f"data: step {data.by_means_us / 1000:.3f} ms if all samples were the mean one; of {data.num_draws} drawn "
        f"steps mean {data.mean_us / 1000:.3f}, P50 {data.p50_us / 1000:.3f}, P95 {data.p95_us / 1000:.3f}: the spread "
        f"costs {data.mean_us / data.by_means_us - 1:.1%}",
        f"data: in the order of the data the slowest replica has {data.imbalance:.2f} times the mean work",
    ]
    if not data.is_balanced:
        lines.append(
            f"would help: rearranged samples (--data-balance): {data.balanced_mean_us / 1000:.3f} ms "
            f"({data.balanced_mean_us / data.mean_us - 1:+.1%})"
        )
    if data.packed_mean_us < data.balanced_mean_us:
        lines.append(
            f"would help: rearranged samples without padding: {data.packed_mean_us / 1000:.3f} ms "
            f"({data.packed_mean_us / data.mean_us - 1:+.1%})"
        )
    chance = f"at most {data.oom_probability:.2g}" if data.oom_probability else "0 for the samples described"
    limit = plan.memory[data.worst_rank].limit_bytes
    lines.append(
        f"data: chance to run out of memory within {data.oom_steps} steps: {chance}; the heaviest samples together "
        f"need {format_bytes(data.worst_bytes)} of {format_bytes(limit)} on pipeline rank {data.worst_rank}"
    )
    lines += [
        f"considered: {one.label}: {one.by_means_us / 1000:.2f} ms by means, {one.mean_us / 1000:.2f} drawn, "
        f"P95 {one.p95_us / 1000:.2f}, out of memory {one.oom_probability:.2g}"
        for one in data.considered
    ]
    lines.append("only the plans considered were drawn: one that is slower by means may be faster for this spread")
    return [*lines, *(f"note: {note}" for note in data.notes)]
