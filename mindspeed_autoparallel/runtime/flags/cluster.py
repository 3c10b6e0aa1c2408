"""The flags that several features share: which nodes take the measurements."""

from mindspeed_autoparallel.runtime.flags.flag import Flag, FlagGroup, non_negative_int, positive_int

GROUP = FlagGroup(
    title="nodes that take the measurements",
    used_by=("--auto-parallel-mm", "--auto-tuning", "--operator-search"),
    flags=(
        Flag(name="--nnodes", type=positive_int, default=1, help="Nodes that take the measurements."),
        Flag(name="--nproc-per-node", type=positive_int, default=1, help="Devices used on each of these nodes."),
        Flag(name="--master-addr", type=str, default="localhost", help="Address of the main node (rank 0)."),
        Flag(
            name="--master-port",
            type=positive_int,
            default=6000,
            help="Port on the main node where the other nodes meet it; the same on every node.",
        ),
        Flag(name="--node-rank", type=non_negative_int, default=0, help="This node: 0 is the main node, then 1, 2."),
    ),
)
