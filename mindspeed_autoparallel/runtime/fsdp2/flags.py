"""The flags after the YAML's name: those of ``--auto-parallel-mm``, ``--auto-parallel-plan`` and
``--auto-parallel-preflight`` that apply here."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.features.preflight.flags import SCRIPT, check_imbalance
from mindspeed_autoparallel.whole_numbers import LARGE, WholeNumber

_DEFAULT_SECONDS = 600
_DEFAULT_STEPS = 5
_JOBS = ("auto_parallel_mm", "auto_parallel_plan", "auto_parallel_preflight")


@dataclass(frozen=True, kw_only=True)
class NativeRequest:
    """The user's flags of the plugin; without a search, a plan or a pre-flight the plugin does nothing."""

    search: bool
    plan: Path | None
    """The plan to train under or to pre-flight."""
    preflight: bool
    preflight_ranks: str
    preflight_steps: int
    preflight_imbalance: float
    preflight_timeout_s: int
    num_nodes: int
    devices_per_node: int
    output_dir: Path
    work_dir: Path
    memory_limit_mib: int | None
    time_limit_s: int
    check_steps: int


class _Parser(argparse.ArgumentParser):
    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.register("type", int, WholeNumber())

    def error(self, message: str) -> None:  # type: ignore[override]  # argparse never returns
        raise ConfigError(f"after the YAML: {message}.")


def read_native_flags(words: Sequence[str]) -> NativeRequest:
    """Return the flags among ``words``, the trainer's command line; ``ConfigError`` for a misspelt one.

    The trainer ignores arguments that start with dashes, so it would not report a misspelt flag.
    """
    parser = _Parser()
    switch = parser.add_argument
    switch("--auto-parallel-mm", action="store_true")
    switch("--auto-parallel-plan", type=Path)
    switch("--auto-parallel-preflight", nargs="?", const=SCRIPT)
    switch("--auto-parallel-preflight-ranks", default="distinct")
    switch("--auto-parallel-preflight-steps", type=int, default=3)
    switch("--auto-parallel-preflight-imbalance", type=float, default=1.0)
    switch("--auto-parallel-preflight-timeout-s", type=int, default=_DEFAULT_SECONDS)
    for name in ("--simulated-nnodes", "--simulated-nproc-per-node"):
        switch(name, type=int)
    switch("--auto-parallel-memory-limit-mib", type=LARGE)
    switch("--auto-parallel-output-dir", type=Path, default=Path())
    switch("--auto-parallel-work-dir", type=Path, default=Path("auto_parallel_work"))
    switch("--auto-parallel-time-limit-s", type=int, default=_DEFAULT_SECONDS)
    switch("--auto-parallel-check-steps", type=int, default=_DEFAULT_STEPS)
    known = [action.option_strings[0] for action in parser._actions]
    arguments, others = parser.parse_known_args(list(words))
    for word in others:
        name = word.split("=", 1)[0].replace("_", "-")
        close = difflib.get_close_matches(name, known, 1, 0.75) if name.startswith("--") else []
        if close or name.startswith(("--auto-", "--simulated-")):
            means = f"; the nearest is {close[0]}" if close else ""
            raise ConfigError(f"{name} is not a flag of the native FSDP2 trainer's plugin{means}.")
    _check(arguments)
    preflight = arguments.auto_parallel_preflight
    return NativeRequest(
        search=arguments.auto_parallel_mm,
        plan=arguments.auto_parallel_plan if preflight in (None, SCRIPT) else Path(preflight),
        preflight=preflight is not None,
        preflight_ranks=arguments.auto_parallel_preflight_ranks,
        preflight_steps=arguments.auto_parallel_preflight_steps,
        preflight_imbalance=arguments.auto_parallel_preflight_imbalance,
        preflight_timeout_s=arguments.auto_parallel_preflight_timeout_s,
        num_nodes=arguments.simulated_nnodes or 1,
        devices_per_node=arguments.simulated_nproc_per_node or 1,
        output_dir=arguments.auto_parallel_output_dir,
        work_dir=arguments.auto_parallel_work_dir,
        memory_limit_mib=arguments.auto_parallel_memory_limit_mib,
        time_limit_s=arguments.auto_parallel_time_limit_s,
        check_steps=arguments.auto_parallel_check_steps,
    )


def _check(arguments: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for jobs that exclude each other, a missing cluster, or a count below its minimum."""
    jobs = ["--" + name.replace("_", "-") for name in _JOBS if getattr(arguments, name)]
    if len(jobs) > 1:
        raise ConfigError(f"{' and '.join(jobs)} exclude each other: search first, then pre-flight, then train.")
    if arguments.auto_parallel_mm or arguments.auto_parallel_preflight == SCRIPT:
        for name in ("simulated_nnodes", "simulated_nproc_per_node"):
            if (getattr(arguments, name) or 0) < 1:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{jobs[0]} needs {flag}: the cluster to plan for.")
    check_imbalance(arguments.auto_parallel_preflight_imbalance)
    counts = ("time_limit_s", "check_steps", "preflight_timeout_s", "memory_limit_mib")
    for name, least in (*((f"auto_parallel_{name}", 1) for name in counts), ("auto_parallel_preflight_steps", 3)):
        if getattr(arguments, name) is not None and getattr(arguments, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(arguments, name)}.")
