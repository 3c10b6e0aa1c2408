"""Flags of ``--auto-parallel-mm`` and of applying its plan."""

from mindspeed_autoparallel.runtime.flags.flag import Flag, FlagGroup, positive_int

GROUP = FlagGroup(
    title="auto-parallel-mm: search the best plan",
    flags=(
        Flag(
            name="--auto-parallel-mm",
            help="Search the best parallel plan for the cluster to train on, write it, and exit before training. Start "
            "the script with plain python on every node.",
        ),
        Flag(
            name="--simulated-nnodes",
            type=positive_int,
            help="Nodes of the cluster to train on.",
            used_by=("--auto-tuning", "--operator-search"),
        ),
        Flag(
            name="--simulated-nproc-per-node",
            type=positive_int,
            help="Devices per node of the cluster to train on.",
            used_by=("--auto-tuning", "--operator-search"),
        ),
        Flag(
            name="--auto-parallel-work-dir",
            type=str,
            default="auto_parallel_work",
            metavar="DIR",
            help="Measurements, cache, logs and the full plan are kept here.",
        ),
        Flag(
            name="--auto-parallel-output-dir",
            type=str,
            default=".",
            metavar="DIR",
            help="Where the result, the plan and the report are written. Default: the directory the script runs in.",
        ),
        Flag(
            name="--auto-parallel-memory-limit-mib",
            type=positive_int,
            metavar="MIB",
            help="Memory a plan may use per device. Default: what the measuring device has, less a reserve.",
        ),
        Flag(
            name="--auto-parallel-time-limit-s",
            type=positive_int,
            default=600,
            metavar="S",
            help="The search returns its best plan and an honest gap after this many seconds.",
        ),
        Flag(
            name="--auto-parallel-profile",
            type=str,
            metavar="FILE",
            help="Plan from this profile instead of measuring (our profile or MindSpeed's model_profile.json).",
        ),
        Flag(
            name="--auto-parallel-launch-timeout-s",
            type=positive_int,
            default=1800,
            metavar="S",
            help="A measuring launch, or a node that does not come, is given up after this many seconds.",
        ),
    ),
)

APPLY_GROUP = FlagGroup(
    title="auto-parallel-plan: train by a plan",
    flags=(
        Flag(
            name="--auto-parallel-plan",
            type=str,
            metavar="FILE",
            help="Train by this plan.json: parallel sizes, layers of each module on each stage, recompute per stage.",
        ),
        Flag(
            name="--auto-parallel-check-steps",
            type=positive_int,
            default=5,
            metavar="N",
            help="Print predicted against measured step time and peak memory after this many steps.",
        ),
    ),
)
