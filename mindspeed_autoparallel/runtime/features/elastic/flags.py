"""Flags of ``--auto-parallel-elastic``."""

from dataclasses import dataclass

from mindspeed_autoparallel.runtime.flags.flag import FlagGroup, flag


@dataclass(frozen=True, kw_only=True)
class ElasticFlags(FlagGroup):
    """Flags of ``--auto-parallel-elastic``."""

    TITLE = "auto-parallel-elastic: resume after losing a node"

    auto_parallel_elastic: bool = flag(
        False,
        "With --auto-parallel-plan and --save: whenever torchrun restarts the processes, plan for the number of "
        "processes and resume from the newest checkpoint. Nodes may leave and come back.",
    )
    auto_parallel_elastic_time_limit_s: int = flag(
        20, "Time limit of the search for a new plan, in seconds.", metavar="S", least=1
    )
