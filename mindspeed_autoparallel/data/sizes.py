"""A conversation and its files -> the sizes of its sample in the reference training."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.data.media import (
    MediaSizes,
    chunk_lengths,
    fitting_size,
    num_audio_tokens,
    num_mel_frames,
    picture_size,
)
from mindspeed_autoparallel.data.work import SampleSize
from mindspeed_autoparallel.errors import ConfigError, first_line

_MARKS = re.compile("(<image>|<audio>)")
_OPENS = _CLOSES = 1
"""Tokens that mark a turn's start, and its end, in addition to the role's line and the line end."""
_AROUND_MEDIA = 2
"""Tokens that mark a picture's or clip's start and end."""
Counter = Callable[[str], int]
"""Text to its number of tokens."""
Media = Path | bytes
"""A file, or its contents."""


def text_counter(folder: str | None, bytes_per_token: float) -> tuple[Counter, str]:
    """Return the token counter and its description: the tokenizer in ``folder``, without one a byte count like the
    reference training's, or an estimate (``bytes_per_token`` above 0)."""
    if bytes_per_token:
        words = f"an estimate: {bytes_per_token:g} bytes of UTF-8 per token"
        return (lambda text: math.ceil(len(text.encode()) / bytes_per_token)), words
    if folder is None:
        return (lambda text: len(text.encode())), "bytes"
    try:
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except ImportError as error:
        raise ConfigError(
            f"the tokenizer {folder} needs the package transformers: pip install transformers, or give "
            "--bytes-per-token 4 for an estimate."
        ) from error
    except (OSError, ValueError) as error:
        reason = first_line(error)
        raise ConfigError(
            f"cannot load the tokenizer {folder}: {reason} Give --bytes-per-token 4 for an estimate."
        ) from error
    return (lambda text: len(tokenizer.encode(text, add_special_tokens=False))), folder


class SampleSizes:
    """Computes sizes of samples. Pictures and audio are opened for their headers only, each file once."""

    def __init__(self, model: MediaSizes, pixels: tuple[int, int], count: Counter, seq_length: int = 0) -> None:
        """Take the least and most ``pixels`` of a picture, and the length of texts (``seq_length``, 0: unlimited)."""
        self._model, self._pixels, self._count, self._seq_length = model, pixels, count, seq_length
        self._known: dict[tuple[Callable[[Media], int], Path], int] = {}

    def of(self, turns: Sequence[tuple[str, str]], images: Sequence[Media], audios: Sequence[Media]) -> SampleSize:
        """Return the sizes of one conversation, texts not cut; raises ``ConfigError``."""
        patches = [self._once(path, self._num_patches) for path in images]
        frames = [self._once(path, self._num_frames) for path in audios]
        window = self._model.audio_window
        return SampleSize(
            tokens=self._num_tokens(turns, patches, frames),
            images=len(patches),
            patches=sum(patches),
            squared_patches=sum(number**2 for number in patches),
            clips=len(frames),
            frames=sum(frames),
            squared_frames=sum(chunk**2 for number in frames for chunk in chunk_lengths(number, window)),
        )

    def _num_tokens(self, turns: Sequence[tuple[str, str]], patches: Sequence[int], frames: Sequence[int]) -> int:
        merge, window = self._model.spatial_merge_size**2, self._model.audio_window
        media = {
            "<image>": iter([number // merge for number in patches]),
            "<audio>": iter([num_audio_tokens(number, window) for number in frames]),
        }
        total = last_of_media = 0
        for role, text in turns:
            total += _OPENS + self._count(f"{role}\n")
            for piece in _MARKS.split(text):
                if piece in media:
                    total += _AROUND_MEDIA + next(media[piece])
                    last_of_media = total - 1
                elif piece:
                    total += self._count(piece)
            total += _CLOSES + self._count("\n")
        if 0 < self._seq_length < last_of_media:
            raise ConfigError(
                f"{total} tokens, with images or audio beyond --seq-length {self._seq_length}. "
                "Raise it, or lower image_max_pixels."
            )
        return total

    def _once(self, media: Media, count: Callable[[Media], int]) -> int:
        """Return ``count`` of a picture or clip; a file is opened once."""
        if not isinstance(media, Path):
            return count(media)
        if (count, media) not in self._known:
            self._known[count, media] = count(media)
        return self._known[count, media]

    def _num_patches(self, media: Media) -> int:
        model = self._model
        if not model.patch_size:
            raise ConfigError("it has images; their patches need a model.json with an image_encoder (--mm-model).")
        height, width = fitting_size(*picture_size(media), model.patch_size * model.spatial_merge_size, *self._pixels)
        return (height // model.patch_size) * (width // model.patch_size)

    def _num_frames(self, media: Media) -> int:
        if not self._model.audio_window:
            raise ConfigError("it has audio; its tokens need a model.json with an audio_encoder (--mm-model).")
        return num_mel_frames(media)
