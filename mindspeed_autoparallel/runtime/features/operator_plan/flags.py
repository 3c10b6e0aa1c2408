"""Flags of ``--operator-plan``."""

from dataclasses import dataclass

from mindspeed_autoparallel.runtime.flags.flag import FlagGroup, flag


@dataclass(frozen=True, kw_only=True)
class OperatorPlanFlags(FlagGroup):
    """Flags of ``--operator-plan``."""

    TITLE = "operator-plan: train with the derived configuration"

    operator_plan: str | None = flag(
        None, "Train with the Megatron configuration in this operator_plan.json.", metavar="FILE"
    )
