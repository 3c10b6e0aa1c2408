"""Flags of ``--auto-tuning``."""

from dataclasses import dataclass
from typing import Literal

from mindspeed_autoparallel.runtime.flags.flag import FlagGroup, flag


@dataclass(frozen=True, kw_only=True)
class AutoTuningFlags(FlagGroup):
    """Flags of ``--auto-tuning``."""

    TITLE = "auto-tuning: the best layout of a language model"

    auto_tuning: bool = flag(
        False,
        "Trace the model of this script in every layout, measure unknown operators, write the three fastest "
        "configurations that fit, and exit before training. Start the script with plain python on every node.",
    )
    auto_tuning_work_dir: str = flag(
        "auto_tuning_dir",
        "Directory of traces, measurements, logs, the knowledge base and the results, readable by you only.",
        metavar="DIR",
    )
    auto_tuning_ranks: int = flag(
        16, "Devices of the training to tune for; may exceed the number of measuring devices.", metavar="N", least=1
    )
    auto_tuning_log_level: Literal["warning", "info", "debug"] = flag(
        "info", "What is printed: problems only, also progress, or also every launch and trace."
    )
    auto_tuning_verify: bool = flag(
        False, "Run the three configurations for a few steps and compare step time and memory with the prediction."
    )
    auto_tuning_knowledge_base: str | None = flag(
        None,
        "File of operator times, which other runs may share. Default: knowledge.sqlite in the work dir.",
        metavar="FILE",
    )
    auto_tuning_memory_limit_mib: float | None = flag(
        None,
        "Memory that a configuration may use per device. Default: that of the device minus a reserve.",
        metavar="MIB",
    )
    auto_tuning_launch_timeout_s: int = flag(
        1800, "Time limit of a launch, and of waiting for the other nodes, in seconds.", metavar="S", least=1
    )
