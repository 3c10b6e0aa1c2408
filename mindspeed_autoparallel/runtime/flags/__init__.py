"""Command line flags: fields of a dataclass per feature (``features/*/flags.py``), added to the host's parser.

``flag``            a flag as a field; reading the fields back from parsed arguments
``registration``    adds the flags that the host's parser lacks
``shared``          the groups that several features read
"""

from mindspeed_autoparallel.runtime.flags.flag import Flag, FlagGroup, flag, flags_of, read_flags
from mindspeed_autoparallel.runtime.flags.registration import (
    add_missing_flags,
    flag_groups,
    flags_given,
    flags_of_command,
    flags_of_host,
    keys_given,
    missing_flags,
    plain_flag,
    without_switches,
    words_whose_flag,
)

__all__ = [
    "Flag",
    "FlagGroup",
    "add_missing_flags",
    "flag",
    "flag_groups",
    "flags_given",
    "flags_of",
    "flags_of_command",
    "flags_of_host",
    "keys_given",
    "missing_flags",
    "plain_flag",
    "read_flags",
    "without_switches",
    "words_whose_flag",
]
