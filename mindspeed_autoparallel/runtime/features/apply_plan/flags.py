"""Flags of ``--auto-parallel-plan``."""

from dataclasses import dataclass

from mindspeed_autoparallel.runtime.flags.flag import FlagGroup, flag


@dataclass(frozen=True, kw_only=True)
class ApplyPlanFlags(FlagGroup):
    """Flags of ``--auto-parallel-plan``."""

    TITLE = "auto-parallel-plan: train with a plan"

    auto_parallel_plan: str | None = flag(
        None,
        "Train with this plan.json: parallel sizes, layers of each module on each stage, recompute per stage.",
        metavar="FILE",
    )
    auto_parallel_check_steps: int = flag(
        5, "Print predicted against measured step time and peak memory after this many steps.", metavar="N", least=1
    )
    auto_parallel_calibrate: str | None = flag(
        None,
        "Calibrate this device file (created if missing) by the measured step of this run, or of the launches of "
        "--auto-tuning-verify; language models only. predict, tune and --profile-device-file read it.",
        metavar="DEVICE.json",
        used_by=("--auto-tuning",),
    )
