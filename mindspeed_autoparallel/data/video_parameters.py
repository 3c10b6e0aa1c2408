"""Keys of a video generator's data.json that determine sizes, and their types."""

from __future__ import annotations

from typing import Annotated

import msgspec

_Count = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
_Positive = Annotated[float, msgspec.Meta(ge=1e-6, le=1e6)]


class _Step(msgspec.Struct):
    trans_type: str = ""
    param: dict[str, object] | None = None


class Steps(msgspec.Struct):
    """Transforms of ``train_pipeline``, in order."""

    video: list[_Step] | None = None
    video_only: list[_Step] | None = None


class FixedSize(msgspec.Struct):
    """A ``transform_size`` for all videos."""

    max_height: _Count
    max_width: _Count


class Video(msgspec.Struct):
    """The keys of ``preprocess_parameters`` that determine sizes, with the defaults of the host's processor."""

    video_processor_type: str = ""
    num_frames: _Count = 16
    frame_interval: _Count = 1
    min_num_frames: Annotated[int, msgspec.Meta(ge=0, le=2**20)] = 29
    train_fps: _Positive = 24
    auto_interval: bool = True
    speed_factor: _Positive = 1.0
    drop_short_ratio: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    force_resolution: bool = True
    max_height: _Count = 480
    max_width: _Count = 640
    max_hxw: Annotated[int, msgspec.Meta(ge=1, le=2**40)] | None = None
    min_hxw: Annotated[int, msgspec.Meta(ge=0, le=2**40)] | None = None
    hw_stride: _Count = 32
    hw_aspect_thr: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 1.5
    vae_scale_factor: list[_Count] | None = None
    train_pipeline: Steps | None = None
