"""Data of MindSpeed-MM's video generators (``t2v``, ``feature``) -> the rows of latents at the transformer's input.

Text has the same length in every sample (padded to ``model_max_length``) and is not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec

from mindspeed_autoparallel.data.media import shape_in
from mindspeed_autoparallel.data.records import DataFile, SizeOf, read_data_file, read_records
from mindspeed_autoparallel.data.video_parameters import FixedSize, Steps, Video
from mindspeed_autoparallel.data.work import SampleSize
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_as, read_bytes, read_text, shown

KINDS = ("t2v", "feature")
PROCESSOR = "OpensoraplanVideoProcessor"
_VIDEOS, _PICTURES = (
    (".mp4", ".avi", ".mov", ".mkv"),
    (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".webp", ".tif", ".tiff"),
)
_LEAST = 1e-6
"""Least number other than 0."""
_SHARED_STRIDE, _WIDE_STRIDE, _WIDE_CHANNELS = 8, 16, 48
"""Pixels of a latent's side: Wan's autoencoders of 16 and of 48 channels."""


class LeftOut(ConfigError):
    """A record that training skips as well."""


class _Basic(msgspec.Struct):
    data_path: str = ""
    data_folder: str = ""
    data_storage_mode: str = "standard"


class _Parameters(msgspec.Struct):
    dataset_type: str = ""
    basic_parameters: _Basic = msgspec.field(default_factory=_Basic)
    preprocess_parameters: Video = msgspec.field(default_factory=Video)


class _Kind(msgspec.Struct):
    dataset_type: str = ""


class _Predictor(msgspec.Struct):
    patch_size: list[int] = msgspec.field(default_factory=list)
    out_dim: int = 0


class _Autoencoder(msgspec.Struct):
    ffactor_spatial: int = 0
    ffactor_temporal: int = 4


class _Model(msgspec.Struct):
    predictor: _Predictor | None = None
    ae: _Autoencoder | None = None


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """The frames and pixels of one row of the transformer."""

    patch: tuple[int, int, int]
    """Latents of one row: frames, height, width."""
    stride: tuple[int, int]
    """Frames and pixels of one latent."""

    def rows(self, latents: tuple[int, int, int]) -> int:
        """Return the rows of latents [frames, height, width]; ``ConfigError`` if they do not fill one."""
        found = math.prod(size // part for size, part in zip(latents, self.patch, strict=True))
        if not found:
            raise ConfigError(f"latents {list(latents)} are smaller than one row of the transformer, {[*self.patch]}.")
        return found

    def rows_of_video(self, frames: int, height: int, width: int) -> int:
        """Return the rows of a video in pixels."""
        return self.rows(((frames - 1) // self.stride[0] + 1, height // self.stride[1], width // self.stride[1]))


def read_latent_sizes(file: Path) -> LatentSizes:
    """Read ``file``, a model.json with a ``predictor``; raises ``ConfigError`` if it has no sizes."""
    model = read_as(file, "model description (--mm-model)", _Model)
    predictor = model.predictor or _Predictor()
    if len(predictor.patch_size) != 3 or min(predictor.patch_size) < 1:
        raise ConfigError(
            f"{file}: rows of latents need predictor.patch_size, three numbers of at least 1, got "
            f"{shown(predictor.patch_size)}. Give the model.json of the training."
        )
    given = model.ae or _Autoencoder()
    wide = predictor.out_dim == _WIDE_CHANNELS
    spatial = given.ffactor_spatial or (_WIDE_STRIDE if wide else _SHARED_STRIDE)
    if spatial < 1 or given.ffactor_temporal < 1:
        raise ConfigError(f"{file}: ffactor_spatial and ffactor_temporal must be at least 1.")
    patch = cast("tuple[int, int, int]", tuple(predictor.patch_size))
    return LatentSizes(patch=patch, stride=(given.ffactor_temporal, spatial))


class VideoRecords:
    """The records of one data.json of these kinds, and the size of each."""

    def __init__(self, file: Path, model: LatentSizes) -> None:
        """Read data.json and its records; raises ``ConfigError`` for unsupported values."""
        found = read_data_file(file, _Parameters)
        self._kind, self._video, self._model = found.dataset_type, found.preprocess_parameters, model
        self.settings = (repr(model), repr(found))
        """The values of data.json and model.json that affect sizes."""
        basic = found.basic_parameters
        mode = "combine" if self._kind == "t2v" else "standard"
        if basic.data_storage_mode != mode:
            raise ConfigError(
                f"{file}: data_storage_mode {shown(basic.data_storage_mode)} of {self._kind} data is not read, only "
                f"{mode}. Give the lengths: --lengths FILE."
            )
        if self._kind == "t2v":
            self._height, self._width = _final_size(file, self._video)
        folder, data = Path(basic.data_folder), Path(basic.data_path)
        if self._kind == "feature":
            self.files: tuple[Path, ...] = (data,)
            self._folder = folder
        else:
            lines = [line.split(",") for line in read_text(data, "list of data sets").splitlines() if line.strip()]
            if not lines or any(len(line) < 2 for line in lines):
                raise ConfigError(f"{data}: each line names a folder and a JSON file, separated by a comma.")
            self.files = tuple(Path(line[1].strip()) for line in lines)
        self.records = read_records(self.files)

    def counting(self, bytes_per_token: float, seq_length: int) -> tuple[SizeOf, str]:
        """Return the function for the size of a record, and a description of the token count."""
        return self._size_of, "latents"

    def _size_of(self, name: str, record: dict[str, object]) -> SampleSize:
        if self._kind == "feature":
            return SampleSize(tokens=self._model.rows(self._latents(record)))
        frames = frames_of(record, self._video)
        check_resolution(record, self._video)
        return SampleSize(tokens=self._model.rows_of_video(frames, self._height, self._width))

    def _latents(self, record: dict[str, object]) -> tuple[int, int, int]:
        file = record.get("file")
        if not isinstance(file, str):
            raise ConfigError("a record of features needs a string 'file'.")
        shape = shape_in(self._folder / file, "video")
        if len(shape) != 4 or min(shape) < 1:
            raise ConfigError(f"{file}: its video has the shape {shape}; channels, frames, height, width are needed.")
        return shape[1], shape[2], shape[3]


def _final_size(file: Path, video: Video) -> tuple[int, int]:
    """Return the height and width to which every video is cropped."""
    if video.video_processor_type != PROCESSOR:
        raise ConfigError(
            f"{file}: video_processor_type {shown(video.video_processor_type)} is not read, only {PROCESSOR}. Give the "
            "lengths: --lengths FILE."
        )
    if video.speed_factor != 1 or video.frame_interval != 1:
        raise ConfigError(f"{file}: speed_factor and frame_interval other than 1 are not read. Give --lengths FILE.")
    given = video.train_pipeline or Steps()
    steps = [*(given.video or ()), *(given.video_only or ())]
    crop = next((step for step in reversed(steps) if step.trans_type == "CenterCropResizeVideo"), None)
    size = (crop.param or {}).get("transform_size") if crop else None
    if size == "auto":
        return video.max_height, video.max_width
    if isinstance(size, dict) and {"max_height", "max_width"} <= set(size):
        try:
            fixed = msgspec.convert(size, FixedSize)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{file}: transform_size {shown(str(size), 80)} is not a size: {error}.") from error
        return fixed.max_height, fixed.max_width
    raise ConfigError(f"{file}: train_pipeline needs a CenterCropResizeVideo, which gives all videos one size.")


def frames_of(record: dict[str, object], video: Video) -> int:
    """Return the frames of one record that training uses, as selected by the host's processor without context
    parallelism. Raises ``LeftOut`` and ``ConfigError``."""
    if record.get("cap") is None:
        raise LeftOut("no cap.")
    path = record.get("path")
    if not isinstance(path, str):
        raise ConfigError("a record needs a string 'path'.")
    kind = Path(path).suffix.lower()
    if kind in _PICTURES:
        raise ConfigError(f"{path} is an image, for which the training's train_pipeline has no size.")
    if kind not in _VIDEOS:
        raise ConfigError(f"{path} is not a video: {', '.join(_VIDEOS)} are read.")
    fps, seconds, count = (_number(record, key) for key in ("fps", "duration", "num_frames"))
    if not fps or (seconds is None and count is None):
        raise LeftOut("no fps, or neither duration nor num_frames.")
    number = round(fps * cast(float, seconds)) if count is None else count
    interval = fps / video.train_fps if video.auto_interval and abs(fps - video.train_fps) >= 0.1 else 1.0
    found = math.ceil(number / interval)
    if found < video.num_frames and video.drop_short_ratio >= 1:
        raise LeftOut(f"{found} frames, below num_frames {video.num_frames}.")
    stride = (video.vae_scale_factor or [4])[0]
    found = (min(found, video.num_frames) - 1) // stride * stride + 1
    if found < max(1, video.min_num_frames):
        raise LeftOut(f"{found} frames, below min_num_frames {video.min_num_frames}.")
    return found


def _number(record: dict[str, object], key: str) -> float | None:
    value = record.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not (value == 0 or _LEAST <= value < 2**40):
        raise ConfigError(f"{key} is {shown(str(value), 40)}; it must be 0 or {_LEAST:g} to 2^40.")
    return float(value)


def check_resolution(record: dict[str, object], video: Video) -> None:
    """Raise ``LeftOut`` if training skips the record for its size or shape, ``ConfigError`` if it is broken."""
    given = record.get("resolution")
    height, width = (_number(given, key) if isinstance(given, dict) else None for key in ("height", "width"))
    if not height or not width:
        raise LeftOut("no resolution.")
    limit = video.hw_aspect_thr or 1.5
    if video.force_resolution:
        aspect = video.max_height / video.max_width
        if not aspect / limit <= height / width <= limit * aspect or not 8 / 16 <= height / width <= 17 / 16:
            raise LeftOut(f"{height:g} x {width:g} pixels are of another shape.")
        return
    most = video.max_hxw
    if most is None:
        raise ConfigError("force_resolution false needs max_hxw in data.json.")
    if height * width > most:
        shrink = math.sqrt(most / (height * width))
        height, width = int(height * shrink), int(width * shrink)
    height, width = (side // video.hw_stride * video.hw_stride for side in (height, width))
    if not height or not width or height * width < (most // 4 if video.min_hxw is None else video.min_hxw):
        raise LeftOut("its resolution is too small.")
    if not 1 / limit <= height / width <= limit:
        raise LeftOut(f"{height:g} x {width:g} pixels are of another shape.")


def kind_of(file: Path) -> str:
    """Return ``dataset_type`` of a data.json, empty if it is missing or broken."""
    try:
        read = msgspec.json.decode(read_bytes(file, "data description (--mm-data)"), type=DataFile[_Kind])
        return read.dataset_param.dataset_type
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
