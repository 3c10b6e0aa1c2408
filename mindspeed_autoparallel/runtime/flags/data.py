"""Flags that hand a search the distribution of the training's samples."""

from dataclasses import dataclass
from typing import Literal

from mindspeed_autoparallel.runtime.flags.flag import FlagGroup, flag
from mindspeed_autoparallel.whole_numbers import LARGEST


@dataclass(frozen=True, kw_only=True)
class DataFlags(FlagGroup):
    """The input of a search on samples that differ."""

    TITLE = "data: plan for samples that differ"
    USED_BY = ("--auto-parallel-mm", "--auto-tuning")

    auto_parallel_data: str | None = flag(
        None,
        "Distribution of the samples (`mindspeed-autoparallel data describe`): plans are chosen by drawn steps and by "
        "the chance to run out of memory, not for equal samples.",
        metavar="FILE",
    )
    auto_parallel_data_padding: Literal["longest", "sequence", "none"] | None = flag(
        None,
        "Texts are padded to the longest of their microbatch, to the sequence length, or packed. Default: none with "
        "the reference training's --pack-samples, longest with --variable-seq-lengths, else sequence.",
    )
    auto_parallel_data_max_oom_probability: float = flag(
        1e-3,
        "A plan is safe if it runs out of memory within --auto-parallel-data-oom-steps with at most this probability.",
        metavar="P",
    )
    auto_parallel_data_oom_steps: int | None = flag(
        None,
        "Steps of the training. Default: the script's --train-iters, else 10000.",
        metavar="N",
        least=1,
        most=LARGEST,
    )
