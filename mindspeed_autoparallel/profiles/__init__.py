"""Measured costs with provenance. The format is described in docs/profile.md."""

from mindspeed_autoparallel.profiles.blocks import (
    BlockCost,
    MeasuredAt,
    Measurement,
    ModuleCost,
    RecomputeCost,
    SharedBytes,
    StateBytes,
    layer_block,
    mean_layer,
)
from mindspeed_autoparallel.profiles.device import Collective, DeviceCost, GradientExchange, LinkTier, NodeNetwork
from mindspeed_autoparallel.profiles.mindspeed import read_profile
from mindspeed_autoparallel.profiles.profile import PROFILE_SCHEMA_VERSION, Profile, Provenance, VariableData

__all__ = [
    "PROFILE_SCHEMA_VERSION",
    "BlockCost",
    "Collective",
    "DeviceCost",
    "GradientExchange",
    "LinkTier",
    "MeasuredAt",
    "Measurement",
    "ModuleCost",
    "NodeNetwork",
    "Profile",
    "Provenance",
    "RecomputeCost",
    "SharedBytes",
    "StateBytes",
    "VariableData",
    "layer_block",
    "mean_layer",
    "read_profile",
]
