"""Command line flags: one file per feature holds them as data; ``registration`` adds what the host's parser lacks."""

from mindspeed_autoparallel.runtime.flags.flag import Flag, FlagGroup
from mindspeed_autoparallel.runtime.flags.registration import add_missing_flags, flag_groups, flags_given, missing_flags

__all__ = ["Flag", "FlagGroup", "add_missing_flags", "flag_groups", "flags_given", "missing_flags"]
