"""``--auto-parallel-data``: the training's samples for a search, checked before anything is started."""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.flags.flag import flags_of, read_flags
from mindspeed_autoparallel.runtime.flags.shared import DataFlags

if TYPE_CHECKING:
    from mindspeed_autoparallel.data.distribution import Distribution
    from mindspeed_autoparallel.planner.spread.samples import SpreadOptions

_LOGGER = logging.getLogger(__name__)
_OOM_STEPS = 10_000


@dataclass(frozen=True, kw_only=True)
class SampleData:
    """The samples of a training, and the constraints of a plan for them."""

    distribution: Distribution
    options: SpreadOptions


def read_sample_data(arguments: argparse.Namespace) -> SampleData | None:
    """Return the samples of ``--auto-parallel-data``; ``None`` without that flag.

    Raises ``ConfigError`` if the file is broken or describes other records than the script's ``--mm-data``, and if
    another flag of the group is given without it.
    """
    flags = read_flags(DataFlags, arguments)
    if flags.auto_parallel_data is None:
        for flag in flags_of(DataFlags)[1:]:
            if getattr(flags, flag.destination) != flag.default:
                raise ConfigError(f"{flag.name} needs --auto-parallel-data: a distribution of `data describe`.")
        return None
    # Imported only if needed: these modules load numpy and the planner.
    from mindspeed_autoparallel.data.distribution import Distribution
    from mindspeed_autoparallel.data.records import refuse_other_records
    from mindspeed_autoparallel.planner.spread.samples import SpreadOptions

    file = Path(flags.auto_parallel_data)
    distribution = Distribution.read(file)
    if distribution.source.kind == "records" and getattr(arguments, "mm_data", None):
        refuse_other_records(file, distribution.source.sha256, Path(arguments.mm_data))
    padding = flags.auto_parallel_data_padding
    if padding is None:
        varies = getattr(arguments, "foreign_variable_seq_lengths", getattr(arguments, "variable_seq_lengths", False))
        padding, why = "longest" if varies else "sequence", f"{'with' if varies else 'without'} --variable-seq-lengths"
        if getattr(arguments, "pack_samples", False) or getattr(arguments, "pack_length", 0):
            padding, why = "none", "with --pack-samples or --pack-length"
        taken = "packed" if padding == "none" else f"padded to the {padding}"
        _LOGGER.info(f"texts are taken as {taken}, {why}; --auto-parallel-data-padding changes it")
    is_packed = padding == "none" and not getattr(arguments, "auto_parallel_hetero", False)
    options = SpreadOptions(
        padding=padding,
        pack_length=int(getattr(arguments, "pack_length", 0) or 0) if is_packed else 0,
        is_balanced=bool(getattr(arguments, "data_balance", False)),
        # Only the reference training has this flag; it forms new microbatches instead of exchanging loaded ones.
        is_exchanged=not hasattr(arguments, "data_balance_max_tokens"),
        is_ordered=bool(getattr(arguments, "order_microbatches", False)),
        max_oom_probability=flags.auto_parallel_data_max_oom_probability,
        oom_steps=flags.auto_parallel_data_oom_steps or int(getattr(arguments, "train_iters", 0) or 0) or _OOM_STEPS,
    )
    return SampleData(distribution=distribution, options=options)
