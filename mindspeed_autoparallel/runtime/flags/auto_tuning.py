"""Flags of ``--auto-tuning``."""

from mindspeed_autoparallel.runtime.flags.flag import Flag, FlagGroup, positive_int

GROUP = FlagGroup(
    title="auto-tuning: the best layout of a language model",
    flags=(
        Flag(
            name="--auto-tuning",
            help="Trace the model of this script in every layout, measure what is unknown, write the three fastest "
            "configurations that fit, and exit before training. Start the script with plain python on every node.",
        ),
        Flag(
            name="--auto-tuning-work-dir",
            type=str,
            default="auto_tuning_dir",
            metavar="DIR",
            help="Traces, measurements, logs, the knowledge base and the results are kept here, readable by you only.",
        ),
        Flag(
            name="--auto-tuning-ranks",
            type=positive_int,
            default=16,
            metavar="N",
            help="Devices of the training to tune for; it may be more than take the measurements.",
        ),
        Flag(
            name="--auto-tuning-log-level",
            type=str,
            default="info",
            choices=("warning", "info", "debug"),
            help="How much is said: only what is wrong, progress, or every launch and trace.",
        ),
        Flag(
            name="--auto-tuning-verify",
            help="Run the three configurations for a few steps and compare their time and memory with the prediction.",
        ),
        Flag(
            name="--auto-tuning-knowledge-base",
            type=str,
            metavar="FILE",
            help="Operator times shared with other runs and people. Default: knowledge.sqlite in the work dir.",
        ),
        Flag(
            name="--auto-tuning-memory-limit-mib",
            type=positive_int,
            metavar="MIB",
            help="Memory a configuration may use per device. Default: what the device has, less a reserve.",
        ),
        Flag(
            name="--auto-tuning-launch-timeout-s",
            type=positive_int,
            default=1800,
            metavar="S",
            help="A launch, or a node that does not come, is given up after this many seconds.",
        ),
    ),
)
