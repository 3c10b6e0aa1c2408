"""Flags of ``--hetero-parallel``."""

from mindspeed_autoparallel.runtime.flags.flag import Flag, FlagGroup

GROUP = FlagGroup(
    title="hetero-parallel: every module under its own layout",
    flags=(
        Flag(
            name="--hetero-parallel",
            help="Train every module of model.json that carries tp, pp or cp under these sizes of its own, all on the "
            "same devices. The script's TP, PP and CP must be 1.",
        ),
        Flag(
            name="--hetero-model",
            type=str,
            metavar="FILE",
            help="model.json with the modules' sizes, for training scripts that have no --mm-model.",
        ),
        # Plain int: what is out of range is refused with the numbers of the step, not by argparse.
        Flag(
            name="--hetero-encoder-mbs-scale",
            type=int,
            default=1,
            metavar="N",
            help="Microbatches of the backbone whose images or clips an encoder computes together; a module's own mbs "
            "in model.json comes before it.",
        ),
        Flag(
            name="--hetero-balance",
            type=str,
            default="local",
            choices=("local", "global", "off"),
            help="Which replica of an encoder computes which item: longest first inside the replica of the backbone "
            "that read it, longest first over all ranks, or in order.",
        ),
        Flag(
            name="--hetero-memory",
            type=str,
            default="upfront",
            choices=("upfront", "recompute", "window"),
            help="Keep the encoders' activations of the whole step; or drop them and run the encoders' forward again "
            "before their backward; or encode along with the backbone's 1F1B schedule, so that a few macro-batches "
            "live at a time.",
        ),
    ),
)
