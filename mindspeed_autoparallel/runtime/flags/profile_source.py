"""Flags that say where the costs of a search come from: measured here, or computed from the device catalogue."""

from dataclasses import dataclass
from typing import Literal

from mindspeed_autoparallel.runtime.flags.flag import FlagGroup, flag


@dataclass(frozen=True, kw_only=True)
class ProfileSourceFlags(FlagGroup):
    """Where costs come from."""

    TITLE = "profile source: search without an accelerator"
    USED_BY = ("--auto-parallel-mm", "--auto-tuning", "--operator-search")

    profile_source: Literal["measured", "analytic"] = flag(
        "measured",
        "analytic: nothing is launched; costs are computed from the model's shapes for --profile-device, and "
        "every result states it.",
    )
    profile_device: str | None = flag(
        None,
        "With analytic: the device to plan for, one of the catalogue (docs/devices-catalogue.md) or your own. Where "
        "one device measures alone (--auto-parallel-mm): the device whose links count.",
        metavar="NAME",
    )
    profile_device_file: str | None = flag(
        None,
        "A device of your own, in the form of the catalogue's files (the calibrate command writes them).",
        metavar="FILE",
    )
