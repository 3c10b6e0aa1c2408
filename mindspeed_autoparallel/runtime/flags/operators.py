"""Flags of ``--operator-search``: the seed's words for its own keys, and where the rest of the search is told."""

from mindspeed_autoparallel.runtime.flags.flag import Flag, FlagGroup, positive_int

GROUP = FlagGroup(
    title="operator-search: a strategy per operator",
    flags=(
        Flag(
            name="--operator-search",
            help="Search a strategy for every operator of the model that the script's flags describe, write it with "
            "the Megatron configuration derived from it, and exit before training.",
        ),
        Flag(
            name="--operator-config",
            type=str,
            metavar="YAML",
            help="use_parallel, parallel and parallel_config block; the flags below come before it.",
        ),
        # Plain types: what is out of range is refused with the numbers of the search, not by argparse.
        Flag(
            name="--parallel-mode", type=int, metavar="0|1|2", help="Data parallel, pins spread, or searched (default)."
        ),
        Flag(
            name="--search-mode",
            type=str,
            help="recursive_programming (default), sharding_propagation or exact.",
        ),
        Flag(name="--auto-pipeline", help="Choose the number of pipeline stages, up to the number of microbatches."),
        Flag(
            name="--mem-coeff",
            type=float,
            help="Below 1 leans to data parallel, above to model parallel (default 0.1).",
        ),
        Flag(
            name="--operator-pin",
            type=str,
            metavar="OP:AXIS=PARTS[;..]",
            help="Operators to fix, such as 'layers.*.q:rows=4,columns=2;output:columns=8'.",
        ),
        Flag(
            name="--operator-explain",
            type=str,
            metavar="OP",
            help="Print the costs of each cut of this operator, and the mem_coeff to set.",
        ),
        Flag(
            name="--operator-devices",
            type=positive_int,
            metavar="N",
            help="Devices to plan for. Default: the simulated cluster, or the processes that were started.",
        ),
        Flag(
            name="--operator-output-dir",
            type=str,
            default=".",
            metavar="DIR",
            help="Where operator_plan.json and operator_plan.html are written.",
        ),
    ),
)

APPLY_GROUP = FlagGroup(
    title="operator-plan: train by the derived configuration",
    flags=(
        Flag(
            name="--operator-plan",
            type=str,
            metavar="FILE",
            help="Train by the Megatron configuration in this operator_plan.json.",
        ),
    ),
)
