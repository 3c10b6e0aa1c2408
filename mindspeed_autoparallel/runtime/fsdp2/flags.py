"""The flags after the YAML's name: those of ``--auto-parallel-mm``, ``--auto-parallel-plan`` and
``--auto-parallel-preflight`` that apply here."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError, flag_of
from mindspeed_autoparallel.runtime.features.apply_plan.flags import ApplyPlanFlags
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.flags import AutoParallelFlags
from mindspeed_autoparallel.runtime.features.measuring import check_memory_limit
from mindspeed_autoparallel.runtime.features.preflight.flags import SCRIPT, PreflightFlags, check_imbalance
from mindspeed_autoparallel.runtime.flags.flag import flags_of, read_flags
from mindspeed_autoparallel.runtime.flags.registration import add_flag
from mindspeed_autoparallel.units import MIB

_JOBS = ("auto_parallel_mm", "auto_parallel_plan", "auto_parallel_preflight")
_NOT_HERE = ("auto_parallel_profile_file", "auto_parallel_launch_timeout_s", "auto_parallel_calibrate")


@dataclass(frozen=True, kw_only=True)
class NativeRequest:
    """The user's flags of the plugin; without a search, a plan or a pre-flight the plugin does nothing."""

    search: AutoParallelFlags
    preflight: PreflightFlags
    plan: Path | None
    """The plan to train under or to pre-flight."""
    check_steps: int

    @property
    def is_preflight(self) -> bool:
        """Return whether ranks are run alone."""
        return self.preflight.auto_parallel_preflight is not None

    @property
    def num_nodes(self) -> int:
        """Return the nodes of the cluster to plan for."""
        return self.search.simulated_nnodes or 1

    @property
    def devices_per_node(self) -> int:
        """Return the devices of each of these nodes."""
        return self.search.simulated_nproc_per_node or 1

    @property
    def memory_limit_bytes(self) -> int | None:
        """Return the memory that the user allows per device."""
        limit = self.search.auto_parallel_memory_limit_mib
        return None if limit is None else int(limit * MIB)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]  # argparse never returns
        raise ConfigError(f"after the YAML: {message}.")


def read_native_flags(words: Sequence[str]) -> NativeRequest:
    """Return the flags among ``words``, the trainer's command line; ``ConfigError`` for a misspelt one.

    The trainer ignores arguments that start with dashes, so it would not report a misspelt flag.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    groups = (AutoParallelFlags, PreflightFlags, ApplyPlanFlags)
    flags = [flag for group in groups for flag in flags_of(group) if flag.destination not in _NOT_HERE]
    for flag in flags:
        add_flag(parser, flag)
    arguments, others = parser.parse_known_args(list(words))
    for word in others:
        name = word.split("=", 1)[0].replace("_", "-")
        close = difflib.get_close_matches(name, [flag.name for flag in flags], 1, 0.75) if name[:2] == "--" else []
        if close or name.startswith(("--auto-", "--simulated-")):
            means = f"; the nearest is {close[0]}" if close else ""
            raise ConfigError(f"{name} is not a flag of the native FSDP2 trainer's plugin{means}.")
    _check(arguments)
    preflight, applied = read_flags(PreflightFlags, arguments), read_flags(ApplyPlanFlags, arguments)
    plan = preflight.auto_parallel_preflight
    plan = applied.auto_parallel_plan if plan in (None, SCRIPT) else plan
    return NativeRequest(
        search=read_flags(AutoParallelFlags, arguments),
        preflight=preflight,
        plan=Path(plan) if plan else None,
        check_steps=applied.auto_parallel_check_steps,
    )


def _check(arguments: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for jobs that exclude each other, a missing cluster, or an impossible figure."""
    jobs = [flag_of(name) for name in _JOBS if getattr(arguments, name)]
    if len(jobs) > 1:
        raise ConfigError(f"{' and '.join(jobs)} exclude each other: search first, then pre-flight, then train.")
    if arguments.auto_parallel_mm or arguments.auto_parallel_preflight == SCRIPT:
        for name in ("simulated_nnodes", "simulated_nproc_per_node"):
            if getattr(arguments, name) is None:
                flag = flag_of(name)
                raise ConfigError(f"{jobs[0]} needs {flag}: the cluster to plan for.")
    check_imbalance(arguments.auto_parallel_preflight_imbalance)
    if arguments.auto_parallel_memory_limit_mib is not None:
        check_memory_limit(arguments.auto_parallel_memory_limit_mib)
