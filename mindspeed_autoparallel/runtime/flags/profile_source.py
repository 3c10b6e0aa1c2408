"""Where the costs of a search come from: measured here, or computed from the device catalogue."""

from mindspeed_autoparallel.runtime.flags.flag import Flag, FlagGroup

GROUP = FlagGroup(
    title="profile source: search without an accelerator",
    used_by=("--auto-parallel-mm", "--auto-tuning", "--operator-search"),
    flags=(
        Flag(
            name="--profile-source",
            type=str,
            default="measured",
            choices=("measured", "analytic"),
            help="analytic: nothing is launched; costs are computed from the model's shapes for --profile-device, and "
            "every result says so.",
        ),
        Flag(
            name="--profile-device",
            type=str,
            metavar="NAME",
            help="With analytic: the device to plan for, one of the catalogue (docs/devices-catalogue.md) or your own.",
        ),
        Flag(
            name="--profile-device-file",
            type=str,
            metavar="FILE",
            help="With analytic: a device of your own, in the form of the catalogue's files.",
        ),
    ),
)
