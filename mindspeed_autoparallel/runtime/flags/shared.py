"""Flags that several features read: the nodes that measure, the source of costs, the samples."""

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


@dataclass(frozen=True, kw_only=True)
class NodeFlags(FlagGroup):
    """Nodes that take the measurements, and how they meet."""

    TITLE = "nodes that take the measurements"
    USED_BY = ("--auto-parallel-mm", "--auto-tuning", "--operator-search")

    nnodes: int = flag(1, "Nodes that take the measurements.", least=1)
    nproc_per_node: int = flag(1, "Devices used on each of these nodes.", least=1)
    master_addr: str = flag("localhost", "Address of the main node (rank 0).")
    master_port: int = flag(
        6000, "Port on the main node where the other nodes meet it; the same on every node.", least=1, most=65535
    )
    node_rank: int = flag(0, "This node: 0 is the main node, then 1, 2.", least=0)


@dataclass(frozen=True, kw_only=True)
class ProfileSourceFlags(FlagGroup):
    """The source of costs."""

    TITLE = "profile source: search without an accelerator"
    USED_BY = ("--auto-parallel-mm", "--auto-tuning", "--operator-search")

    profile_source: Literal["measured", "analytic"] = flag(
        "measured",
        "analytic: launch nothing and compute costs from the model's shapes for --profile-device; every result "
        "states so.",
    )
    profile_device: str | None = flag(
        None,
        "With analytic: the device to plan for, one of the catalogue (docs/devices-catalogue.md) or your own. Where "
        "one device measures alone (--auto-parallel-mm): the device whose links are used.",
        metavar="NAME",
    )
    profile_device_file: str | None = flag(
        None,
        "A device of your own, in the form of the catalogue's files (the calibrate command writes them).",
        metavar="FILE",
    )
