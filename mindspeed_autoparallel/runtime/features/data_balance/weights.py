"""The work of a microbatch: operations of every module, by the sizes of its tensors.

Only the ratios between microbatches matter. Rows of text are the padded ids; rows of pictures are patches. Attention of
text grows with the sum of squared sequence lengths (of each text in a packed row), that of pictures with the sum of
their squared numbers of patches.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.megatron.description import Description

if TYPE_CHECKING:
    import torch

_TEXTS = ("input_ids", "tokens", "text")
_PICTURES = ("pixel_values", "images", "image")
_PACKED_LENGTHS, _PACKED_ENDS = "sequence_lengths", "cu_seqlens"
"""Keys of the boundaries of texts in packed rows: the reference training's, and Megatron's."""
_GRIDS = "image_grid_thw"
_SOUNDS = ("audio_features", "input_features")
_SOUND_ROWS = "audio_num_frames"
_PATCH_PIXELS = 14 * 14
"""Pixels of a patch, for pictures given as pixels."""
_DEFAULT_GROWTH = 4
"""Megatron's default ratio of feed-forward width to hidden size."""


@dataclass(frozen=True, kw_only=True)
class StackWork:
    """Operations of a stack for a row, and for a pair of rows that attend to one another."""

    linear: float
    quadratic: float


@dataclass(frozen=True, kw_only=True)
class BatchWork:
    """Operations of the modules by their input; zero for a module that the model lacks."""

    text: StackWork
    pictures: StackWork
    sounds: StackWork

    def of(self, batch: object) -> float:
        """Return the work of a microbatch of the host's loader.

        Raises ``ConfigError`` if it is not a dict or has no ids.
        """
        if not isinstance(batch, Mapping):
            raise ConfigError(
                f"--data-balance and --order-microbatches read the sizes of a microbatch from its tensors, but the "
                f"loader gives {type(batch).__name__}, not a dict. Train without them."
            )
        ids = _first_tensor(batch, _TEXTS)
        if ids is None:
            raise ConfigError(
                f"--data-balance and --order-microbatches find the texts of a microbatch as {', '.join(_TEXTS)}, but "
                f"the loader gives {', '.join(map(str, batch))}. Train without them."
            )
        work = self.text.linear * ids.numel() + self.text.quadratic * _text_pairs(batch, ids)
        for rows, stack in ((_picture_rows(batch), self.pictures), (_sound_rows(batch), self.sounds)):
            work += stack.linear * sum(rows) + stack.quadratic * sum(row * row for row in rows)
        return float(work)


def batch_work(description: Description, arguments: argparse.Namespace) -> BatchWork:
    """Return the work of the described modules; sizes missing in model.json come from the flags."""
    works = {"text": StackWork(linear=0.0, quadratic=0.0)}
    works |= {"pictures": works["text"], "sounds": works["text"]}
    for module in description.modules:
        block = description.block_of(module)
        kind = _kind(module.name)
        more = _stack_work(module.num_layers, block, arguments, kind, 1 if module.frozen and kind != "text" else 3)
        before = works[kind]
        works[kind] = StackWork(linear=before.linear + more.linear, quadratic=before.quadratic + more.quadratic)
    if not works["text"].linear:
        # The text model is unknown: count rows only.
        works["text"] = StackWork(linear=1.0, quadratic=0.0)
    return BatchWork(**works)


def _kind(name: str) -> str:
    if "audio" in name or "sound" in name:
        return "sounds"
    return "pictures" if "image" in name or "vision" in name or "vit" in name else "text"


def _stack_work(
    num_layers: int, block: Mapping[str, object], arguments: argparse.Namespace, kind: str, passes: int
) -> StackWork:
    """Count 2 operations per weight and row, and 4 x hidden size per pair of rows (causal text: half), in each of
    ``passes``; a backward is two passes."""

    def size(name: str) -> int:
        found = block.get(name) or getattr(arguments, name, 0)
        return found if isinstance(found, int) else 0

    hidden = size("hidden_size")
    feed_forward = size("ffn_hidden_size") or _DEFAULT_GROWTH * hidden
    gated = bool(block.get("gated_linear_unit") or (not block and getattr(arguments, "swiglu", False)))
    weights = hidden * (4 * hidden + (3 if gated else 2) * feed_forward)
    pairs = 2 * hidden if kind == "text" else 4 * hidden
    return StackWork(linear=float(passes * num_layers * 2 * weights), quadratic=float(passes * num_layers * pairs))


def _text_pairs(batch: Mapping[str, object], ids: torch.Tensor) -> int:
    """Return the number of token pairs within a text: packed rows are split at the ends of their texts."""
    lengths, ends = batch.get(_PACKED_LENGTHS), batch.get(_PACKED_ENDS)
    if not _is_tensor(lengths) and _is_tensor(ends):
        # Padded with the last boundary, so that all rows have the same number.
        lengths = ends.diff(dim=-1)
    if not _is_tensor(lengths):
        return int(ids.numel()) * int(ids.shape[-1])
    return sum(length * length for length in lengths.reshape(-1).tolist())


def _picture_rows(batch: Mapping[str, object]) -> list[int]:
    """Return the patches of every picture."""
    grids = batch.get(_GRIDS)
    if _is_tensor(grids):
        return [frames * height * width for frames, height, width in grids.reshape(-1, 3).tolist()]
    pixels = _first_tensor(batch, _PICTURES)
    if pixels is None or pixels.dim() < 2:
        return []
    if pixels.dim() == 2:
        return [int(pixels.shape[0])]
    number = pixels.numel() // (pixels.shape[-3] * pixels.shape[-2] * pixels.shape[-1]) if pixels.dim() > 3 else 1
    return [int(pixels.shape[-2] * pixels.shape[-1]) // _PATCH_PIXELS] * int(number)


def _sound_rows(batch: Mapping[str, object]) -> list[int]:
    """Return the frames of every clip."""
    rows = batch.get(_SOUND_ROWS)
    if _is_tensor(rows):
        return [int(frames) for frames in rows.reshape(-1).tolist()]
    sounds = _first_tensor(batch, _SOUNDS)
    return [] if sounds is None else [int(sounds.shape[-1])] * int(sounds.shape[0] if sounds.dim() > 2 else 1)


def _first_tensor(batch: Mapping[str, object], names: tuple[str, ...]) -> torch.Tensor | None:
    return next((value for value in map(batch.get, names) if _is_tensor(value)), None)


def _is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    return hasattr(value, "shape") and hasattr(value, "numel")
