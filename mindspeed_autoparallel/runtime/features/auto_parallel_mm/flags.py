"""Flags of ``--auto-parallel-mm``."""

from dataclasses import dataclass

from mindspeed_autoparallel.runtime.flags.flag import FlagGroup, flag

_BESIDE = ("--auto-tuning", "--operator-search", "--auto-parallel-preflight")
_PREFLIGHT = ("--auto-parallel-preflight",)


@dataclass(frozen=True, kw_only=True)
class AutoParallelFlags(FlagGroup):
    """Flags of ``--auto-parallel-mm``."""

    TITLE = "auto-parallel-mm: find the best plan"

    auto_parallel_mm: bool = flag(
        False,
        "Find the best parallel plan for the cluster to train on, write it, and exit before training. Start "
        "the script with plain python on every node.",
    )
    simulated_nnodes: int | None = flag(None, "Nodes of the cluster to train on.", least=1, used_by=_BESIDE)
    simulated_nproc_per_node: int | None = flag(
        None, "Devices per node of the cluster to train on.", least=1, used_by=_BESIDE
    )
    auto_parallel_work_dir: str = flag(
        "auto_parallel_work",
        "Directory of measurements, cache, logs and the full plan.",
        metavar="DIR",
        used_by=_PREFLIGHT,
    )
    auto_parallel_output_dir: str = flag(
        ".",
        "Directory of the result, the plan and the report. Default: the current directory.",
        metavar="DIR",
        used_by=_PREFLIGHT,
    )
    auto_parallel_memory_limit_mib: float | None = flag(
        None,
        "Memory that a plan may use per device. Default: that of the measuring device minus a reserve.",
        metavar="MIB",
        used_by=_PREFLIGHT,
    )
    auto_parallel_time_limit_s: int = flag(
        600,
        "Time limit of the search in seconds; it then returns its best plan and the remaining gap.",
        metavar="S",
        least=1,
    )
    auto_parallel_profile_file: str | None = flag(
        None,
        "Plan from this profile instead of measuring (our profile or MindSpeed's model_profile.json).",
        metavar="FILE",
    )
    auto_parallel_launch_timeout_s: int = flag(
        1800, "Time limit of a measuring launch, and of waiting for the other nodes, in seconds.", metavar="S", least=1
    )
