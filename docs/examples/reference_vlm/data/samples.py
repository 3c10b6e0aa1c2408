"""A record -> one training sample: tokens, labels, position ids, patches and mel frames."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from mindspeed_autoparallel.data.media import num_audio_tokens
from mindspeed_autoparallel.errors import ConfigError
from reference_vlm.configuration import DataDescription, ModelDescription
from reference_vlm.data.audio import load_audio
from reference_vlm.data.images import load_picture
from reference_vlm.data.records import AUDIO_MARK, IMAGE_MARK, Record
from reference_vlm.data.tokens import Tokenizer
from reference_vlm.model.text import multimodal_positions

IGNORED = -100
_MARKS = re.compile(f"({IMAGE_MARK}|{AUDIO_MARK})")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """``labels[i]`` is the token to predict at ``i`` (``IGNORED`` where none); ``positions [3, tokens]``.

    Arrays, not tensors: kept samples are host memory on every device, also if the CPU stands in for the accelerator.
    """

    name: str
    input_ids: list[int]
    labels: list[int]
    positions: NDArray[Any]
    patches: tuple[NDArray[Any], ...]
    grids: tuple[tuple[int, int, int], ...]
    clips: tuple[NDArray[Any], ...]


def make_sample(
    record: Record, model: ModelDescription, data: DataDescription, tokenizer: Tokenizer, max_tokens: int
) -> Sample:
    """Make a sample. Text beyond ``max_tokens`` is cut off; an image or audio that would be cut is ``ConfigError``."""
    pictures, clips = _load(record, model, data)
    spans = _media_spans(model, [grid for _, grid in pictures], clips)
    ids: list[int] = []
    wanted: list[bool] = []
    for role, text in record.turns:
        learn = role == data.assistant_tag or data.train_on_prompt
        _extend(ids, wanted, [tokenizer.turn_start, *tokenizer.encode(f"{role}\n")], False)
        for piece in _MARKS.split(text):
            media = piece in (IMAGE_MARK, AUDIO_MARK)
            tokens = spans[piece].pop(0) if media else tokenizer.encode(piece)
            _extend(ids, wanted, tokens, learn and not media)
        _extend(ids, wanted, [tokenizer.turn_end], learn)
        _extend(ids, wanted, tokenizer.encode("\n"), False)
    media_ids = {model.image_token_id, model.audio_token_id}
    if any(token in media_ids for token in ids[max_tokens:]):
        raise ConfigError(
            f"{record.name}: {len(ids)} tokens, of which images or audio reach beyond --seq-length {max_tokens}. Raise "
            "--seq-length or lower image_max_pixels."
        )
    ids, wanted = ids[:max_tokens], wanted[:max_tokens]
    grids = tuple(grid for _, grid in pictures)
    return Sample(
        name=record.name,
        input_ids=ids,
        labels=[token if learn else IGNORED for token, learn in zip(ids[1:], wanted[1:], strict=True)] + [IGNORED],
        positions=_array(
            multimodal_positions(
                ids, model.image_token_id, grids, model.vision.spatial_merge_size if model.vision else 1
            )
        ),
        patches=tuple(_array(patches) for patches, _ in pictures),
        grids=grids,
        clips=tuple(_array(clip) for clip in clips),
    )


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a copy: an array that shares the tensor's storage would keep it alive."""
    array: NDArray[Any] = tensor.numpy().copy()
    return array


def _load(
    record: Record, model: ModelDescription, data: DataDescription
) -> tuple[list[tuple[torch.Tensor, tuple[int, int, int]]], list[torch.Tensor]]:
    if record.images and model.vision is None:
        raise ConfigError(f"{record.name} has images, but {model.file} has no image_encoder.")
    if record.audios and model.audio is None:
        raise ConfigError(f"{record.name} has audio, but {model.file} has no audio_encoder.")
    try:
        pictures = [
            load_picture(path, model.vision, data.min_pixels, data.max_pixels) for path in record.images if model.vision
        ]
        clips = [load_audio(path, model.audio.num_mel_bins) for path in record.audios if model.audio]
    except ConfigError as error:
        raise ConfigError(f"{record.name}: {error}") from error
    return pictures, clips


def _media_spans(
    model: ModelDescription, grids: list[tuple[int, int, int]], clips: list[torch.Tensor]
) -> dict[str, list[list[int]]]:
    """Return the placeholder tokens of every image and every clip, in order."""
    merge = model.vision.spatial_merge_size**2 if model.vision else 1
    images = [
        [
            model.vision_start_token_id,
            *[model.image_token_id] * (frames * height * width // merge),
            model.vision_end_token_id,
        ]
        for frames, height, width in grids
    ]
    window = model.audio.num_window_frames if model.audio else 1
    audios = [
        [
            model.audio_start_token_id,
            *[model.audio_token_id] * num_audio_tokens(clip.shape[1], window),
            model.audio_end_token_id,
        ]
        for clip in clips
    ]
    return {IMAGE_MARK: images, AUDIO_MARK: audios}


def _extend(ids: list[int], wanted: list[bool], tokens: list[int], learn: bool) -> None:
    ids += tokens
    wanted += [learn] * len(tokens)
