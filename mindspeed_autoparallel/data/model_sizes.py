"""The rows and tokens of pictures and audio by model.json; other keys are ignored."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_as


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
