"""Reads a profile file: ours, or MindSpeed's ``model_profile.json``."""

from __future__ import annotations

from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError, ProfileError
from mindspeed_autoparallel.files import read_json
from mindspeed_autoparallel.profiles.mindspeed import is_mindspeed_profile, parse_mindspeed_profile
from mindspeed_autoparallel.profiles.profile import Profile


def read_profile(path: Path, *, tensor_size: int = 1, p2p_gbps: float = 25.0) -> Profile:
    """Return the profile in ``path``; ``ProfileError`` if it is foreign or broken.

    ``tensor_size`` and ``p2p_gbps`` (GiB/s) only complete MindSpeed's file, which holds neither.
    """
    try:
        value = read_json(path, "profile")
    except ConfigError as error:
        raise ProfileError(str(error)) from error
    if is_mindspeed_profile(value):
        return parse_mindspeed_profile(value, str(path), tensor_size=tensor_size, p2p_gbps=p2p_gbps)
    return Profile.parse(value, str(path))
