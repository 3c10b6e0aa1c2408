"""MindSpeed-MM's json files as frozen descriptions; every wrong value names its file, key and allowed range."""

from reference_vlm.configuration.data import DataDescription, read_data
from reference_vlm.configuration.descriptions import (
    AudioDescription,
    ModelDescription,
    ProjectorDescription,
    StackDescription,
    TextDescription,
    VisionDescription,
)
from reference_vlm.configuration.model import describe_model, read_model
from reference_vlm.configuration.tools import read_tools

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
