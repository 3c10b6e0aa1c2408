"""MindSpeed-MM's json files as frozen descriptions; every wrong value names its file, key and allowed range."""

from mindspeed_autoparallel.reference.configuration.data import DataDescription, read_data
from mindspeed_autoparallel.reference.configuration.descriptions import (
    AudioDescription,
    ModelDescription,
    ProjectorDescription,
    StackDescription,
    TextDescription,
    VisionDescription,
)
from mindspeed_autoparallel.reference.configuration.model import describe_model, read_model
from mindspeed_autoparallel.reference.configuration.tools import read_tools

__all__ = [
    "AudioDescription",
    "DataDescription",
    "ModelDescription",
    "ProjectorDescription",
    "StackDescription",
    "TextDescription",
    "VisionDescription",
    "describe_model",
    "read_data",
    "read_model",
    "read_tools",
]
