"""Flags of ``--hetero-parallel``."""

from dataclasses import dataclass

from mindspeed_autoparallel.runtime.flags.flag import FlagGroup, flag
from mindspeed_autoparallel.spec.hetero import Balance, MemoryMode


@dataclass(frozen=True, kw_only=True)
class HeteroFlags(FlagGroup):
    """Flags of ``--hetero-parallel``; the request checks ranges, because they depend on the step's sizes."""

    USED_BY = ("--hetero-parallel", "--auto-parallel-hetero")
    TITLE = "hetero-parallel: every module under its own layout"

    hetero_parallel: bool = flag(
        False,
        "Train every module of model.json that carries tp, pp or cp under these sizes of its own, all on the "
        "same devices. The script's TP, PP and CP must be 1.",
    )
    auto_parallel_hetero: bool = flag(
        False,
        "The same as --hetero-parallel, for hosts that have a --hetero-parallel of their own (MindSpeed-MM): that flag "
        "is left to such a host.",
    )
    hetero_model: str | None = flag(
        None, "model.json with the modules' sizes, for training scripts that have no --mm-model.", metavar="FILE"
    )
    hetero_encoder_mbs_scale: int = flag(
        1,
        "Microbatches of the backbone whose images or clips an encoder computes together; a module's own mbs "
        "in model.json comes before it.",
        metavar="N",
    )
    hetero_balance: Balance = flag(
        "local",
        "Which replica of an encoder computes which item: longest first inside the replica of the backbone "
        "that read it, longest first over all ranks, or in order.",
    )
    hetero_memory: MemoryMode = flag(
        "upfront",
        "Keep the encoders' activations of the whole step; or drop them and run the encoders' forward again "
        "before their backward; or encode along with the backbone's 1F1B schedule, so that a few macro-"
        "batches live at a time.",
    )
