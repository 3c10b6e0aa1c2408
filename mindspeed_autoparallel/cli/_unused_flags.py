"""Flags that one use of a command does not read: each is refused before anything starts."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from mindspeed_autoparallel.errors import ConfigError, flag_of

MEDIA = ("images_per_sample", "image_size", "patches_per_sample", "audio_seconds", "freeze_encoders")
COMPUTED = ("model", "device", "device_file", "network_gbit_per_s", "seq_length", "train", *MEDIA)
"""Flags of computed costs."""
MINDSPEED_FILE = ("profile_tensor_size", "p2p_gbit_per_s")
"""Flags that complete MindSpeed's profile file."""
OF_DATA = ("mm_data", "data_padding", "data_pack_length", "data_balance", "max_oom_probability", "oom_steps")
"""Flags that describe the training on ``--data``."""
MEGATRON = (
    *("overlap_grad_reduce", "overlap_moe_expert_parallel_comm", "virtual_sizes", "schedules", "no_standalone_ends"),
    *("candidate", "hetero_parallel", "hetero_balance", "mm_model", "train", "script", "megatron_release", "why"),
    *("tokens", "data", *OF_DATA),
)
"""Flags of Megatron's layouts."""


def given(arguments: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Return the flags among ``names`` that have another value than their default, as ``--flag``.

    ``arguments.default_of`` returns the default of a name.
    """
    found = [name for name in names if getattr(arguments, name) != arguments.default_of(name)]
    return [flag_of(name) for name in found]


def refuse(arguments: argparse.Namespace, names: Iterable[str], reason: str) -> None:
    """Raise ``ConfigError`` with the ``given`` flags among ``names``; ``reason`` follows them."""
    if flags := given(arguments, names):
        raise ConfigError(f"{', '.join(flags)}: {reason}")
