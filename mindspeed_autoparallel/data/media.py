"""Pictures and audio by their headers: size, and the rows and tokens in training."""

from __future__ import annotations

import collections
import io
import math
import pickle
import wave
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from mindspeed_autoparallel.errors import ConfigError, first_line
from mindspeed_autoparallel.files import read_as

MOST_ELONGATED = 200
MEL_RATE_HZ, MEL_HOP = 16000, 160
"""Audio is resampled to 16 kHz; a mel frame every 10 ms, as in Whisper and Qwen2.5-Omni."""
_SHORTEST_SAMPLES = 640


def fitting_size(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Return the height and width nearest to the picture's, multiples of ``factor``, with a pixel count within the
    bounds."""
    if max(height, width) > MOST_ELONGATED * min(height, width):
        raise ConfigError(f"an image of {height} x {width} is longer than {MOST_ELONGATED} times its width.")
    fitted = max(factor, round(height / factor) * factor), max(factor, round(width / factor) * factor)
    pixels = fitted[0] * fitted[1]
    if pixels > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        fitted = (
            max(factor, math.floor(height / shrink / factor) * factor),
            max(factor, math.floor(width / shrink / factor) * factor),
        )
    elif pixels < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        fitted = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return fitted


def picture_size(path: Path | bytes) -> tuple[int, int]:
    """Return the height and width in pixels from the header of a file, or of its bytes; ``ConfigError`` where it cannot
    be read."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError("sizes of images need the package pillow: pip install pillow.") from error
    try:
        with Image.open(_opened(path)) as opened:
            width, height = opened.size
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ConfigError(f"cannot read the image {_named(path)}: {error}.") from error
    return int(height), int(width)


def _opened(path: Path | bytes) -> str | io.BytesIO:
    return io.BytesIO(path) if isinstance(path, bytes) else str(path)


def _named(path: Path | bytes) -> str:
    return f"of {len(path)} bytes in it" if isinstance(path, bytes) else str(path)


def num_mel_frames(path: Path | bytes) -> int:
    """Return the mel frames of a WAV file (or its bytes) from its header; ``ConfigError`` where it cannot be read or is
    too short."""
    try:
        with wave.open(_opened(path), "rb") as opened:
            rate, length = opened.getframerate(), opened.getnframes()
    except (OSError, EOFError, wave.Error) as error:
        raise ConfigError(f"cannot read the audio {_named(path)}: {error}.") from error
    samples = length if rate == MEL_RATE_HZ else int(length * MEL_RATE_HZ / rate)
    if samples < _SHORTEST_SAMPLES:
        lasts = f"{1000 * samples / MEL_RATE_HZ:.0f} ms"
        raise ConfigError(f"the audio {_named(path)} lasts {lasts}; at least 40 ms are needed.")
    return samples // MEL_HOP


def chunk_lengths(num_frames: int, window: int) -> list[int]:
    """Return the frames of the chunks of one clip: ``2 * window`` each, the last may be shorter."""
    full, rest = divmod(num_frames, 2 * window)
    return [2 * window] * full + ([rest] if rest else [])


def num_conv_rows(num_frames: int, window: int) -> int:
    """Return the number of rows after the second convolution (stride 2) of one clip of ``num_frames`` mel frames."""
    return sum((length + 1) // 2 for length in chunk_lengths(num_frames, window))


def num_audio_tokens(num_frames: int, window: int) -> int:
    """Return the number of tokens of one clip in the text: pairs of convolution rows."""
    return num_conv_rows(num_frames, window) // 2


class _Shape(tuple[int, ...]):
    """The shape of a tensor, whose content is not read."""


class _Headers(pickle.Unpickler):
    """Reads the output of torch.save without its tensors; refuses any other class."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, size, *_: _Shape(size)
        if module == "torch" and (name.endswith("Storage") or name in ("bfloat16", "float16", "float32")):
            return name
        raise ConfigError(f"it holds {module}.{name}, which is not read.")

    def persistent_load(self, pid: Any) -> Any:
        return None


def shape_in(file: Path, key: str) -> tuple[int, ...]:
    """Return the shape of tensor ``key`` of a dictionary that ``torch.save`` wrote, from its header. Raises
    ``ConfigError``."""
    try:
        with zipfile.ZipFile(file) as opened:
            name = next(entry for entry in opened.namelist() if entry.endswith("/data.pkl"))
            held = _Headers(io.BytesIO(opened.read(name))).load()
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    except Exception as error:  # zipfile and pickle raise any exception for a damaged file
        raise ConfigError(f"cannot read {file} as a file of torch.save: {first_line(error)}.") from error
    shape = held.get(key) if isinstance(held, dict) else None
    if not isinstance(shape, _Shape):
        raise ConfigError(f"{file} holds no tensor {key!r}.")
    return tuple(shape)


@dataclass(frozen=True, kw_only=True)
class MediaSizes:
    """``patch_size`` 0: no image encoder; ``audio_window`` 0: no audio encoder (frames of half a chunk)."""

    patch_size: int = 0
    spatial_merge_size: int = 1
    audio_window: int = 0
    max_tokens: int = 0
    """``max_position_embeddings`` of the text decoder; 0: unknown."""


class _Vision(msgspec.Struct):
    patch_size: int = 14
    spatial_merge_size: int = 2


class _ImageEncoder(msgspec.Struct):
    vision_encoder: _Vision | None = None


class _Audio(msgspec.Struct):
    n_window: int = 100


class _AudioEncoder(msgspec.Struct):
    audio_encoder: _Audio | None = None


class _Text(msgspec.Struct):
    max_position_embeddings: int = 0


class _Model(msgspec.Struct):
    image_encoder: _ImageEncoder | None = None
    audio_encoder: _AudioEncoder | None = None
    text_decoder: _Text | None = None


def read_media_sizes(file: Path) -> MediaSizes:
    """Read ``file``, a model.json; raises ``ConfigError`` for invalid JSON or sizes."""
    model = read_as(file, "model description (--mm-model)", _Model)
    vision = model.image_encoder.vision_encoder if model.image_encoder else None
    audio = model.audio_encoder.audio_encoder if model.audio_encoder else None
    sizes = MediaSizes(
        patch_size=vision.patch_size if vision else 0,
        spatial_merge_size=vision.spatial_merge_size if vision else 1,
        audio_window=audio.n_window if audio else 0,
        max_tokens=model.text_decoder.max_position_embeddings if model.text_decoder else 0,
    )
    if (vision and min(vision.patch_size, vision.spatial_merge_size) < 1) or (audio and audio.n_window < 2):
        raise ConfigError(
            f"{file}: patch_size and spatial_merge_size must be at least 1 and n_window at least 2, got {sizes}."
        )
    return sizes
