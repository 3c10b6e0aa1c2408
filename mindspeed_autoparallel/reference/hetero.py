"""The reference model's encoders for hetero parallel: how they are built, and how they meet batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.reference.configuration import ModelDescription
from mindspeed_autoparallel.reference.data.batches import STAND_IN_FRAMES
from mindspeed_autoparallel.reference.model.audio import AudioEncoder, num_audio_tokens
from mindspeed_autoparallel.reference.model.vision import ImageEncoder
from mindspeed_autoparallel.runtime.hetero.adapters.protocol import EncoderAdapter, LocalItem
from mindspeed_autoparallel.runtime.hetero.layouts import HeteroLayout


def hosts(model: ModelDescription) -> dict[str, Any]:
    """What the reference training offers (``HostModule`` by block name)."""
    return {"image_encoder": ImageHost(model), "audio_encoder": AudioHost(model)}


def check(layout: HeteroLayout) -> None:
    """``ConfigError`` for layouts that hetero parallel knows and the reference model does not."""
    for module in (*layout.encoders, layout.backbone):
        if module.context > 1:
            raise ConfigError(
                f"{module.name}: cp {module.context}: the reference model has no context parallelism under "
                "--hetero-parallel yet; use cp 1 (tp instead)."
            )


def _config(arguments: Any) -> Any:
    from megatron.training.arguments import core_transformer_config_from_args

    return core_transformer_config_from_args(arguments)


class ImageHost:
    """``image_encoder`` with its projector."""

    def __init__(self, model: ModelDescription) -> None:
        self._model = model

    def build(self, arguments: Any) -> Any:
        return ImageEncoder(_config(arguments), self._model, 0)

    def adapter(self, module: Any, arguments: Any) -> EncoderAdapter:
        return ImageAdapter(self._model, arguments.params_dtype)


class AudioHost:
    """``audio_encoder`` with its projection."""

    def __init__(self, model: ModelDescription) -> None:
        self._model = model

    def build(self, arguments: Any) -> Any:
        return AudioEncoder(_config(arguments), self._model, 0)

    def adapter(self, module: Any, arguments: Any) -> EncoderAdapter:
        return AudioAdapter(self._model, arguments.params_dtype)


class ImageAdapter:
    """Items are images; rows are patches in, merged rows out; ``meta`` is (frames, height, width) in patches."""

    meta_size = 3

    def __init__(self, model: ModelDescription, dtype: torch.dtype) -> None:
        vision = model.vision
        assert vision is not None
        self._token, self._merge = model.image_token_id, vision.spatial_merge_size
        self._hidden = vision.stack.hidden_size
        self.input_shape: tuple[int, ...] = (vision.num_channels * vision.temporal_patch_size * vision.patch_size**2,)
        self.input_dtype = torch.float32
        self.output_shape: tuple[int, ...] = (1, model.text.stack.hidden_size)
        self.output_dtype = dtype

    def items(self, batch: Mapping[str, torch.Tensor]) -> list[LocalItem]:
        grids = batch["image_grid_thw"].tolist()
        sizes = [frames * height * width // self._merge**2 for frames, height, width in grids]
        owners = samples_of(batch["input_ids"] == self._token, sizes, "image")
        return [self._item(sample, grid) for sample, grid in zip(owners, grids, strict=False)]

    def rows(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return batch["pixel_values"].cuda(non_blocking=True)

    def encode(self, module: Any, rows: torch.Tensor, items: Sequence[Any]) -> torch.Tensor:
        output: torch.Tensor = module(rows, torch.tensor([item.meta for item in items]))
        return output

    def dummy(self) -> tuple[torch.Tensor, list[LocalItem]]:
        item = self._item(0, [1, self._merge, self._merge])
        return torch.zeros((item.input_rows, *self.input_shape)).cuda(), [item]

    def embeddings(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def _item(self, sample: int, grid: Sequence[int]) -> LocalItem:
        frames, height, width = grid
        patches = frames * height * width
        # A layer's products (24 h^2 n with its MLP) against its attention (4 h n m), rows of one frame together.
        cost = patches * (6.0 * self._hidden + height * width)
        return LocalItem(sample, patches, patches // self._merge**2, cost, (frames, height, width))


class AudioAdapter:
    """Items are clips; rows are mel frames in, audio tokens out."""

    meta_size = 0

    def __init__(self, model: ModelDescription, dtype: torch.dtype) -> None:
        audio = model.audio
        assert audio is not None
        self._token, self._window = model.audio_token_id, audio.num_window_frames
        self.input_shape: tuple[int, ...] = (audio.num_mel_bins,)
        self.input_dtype = torch.float32
        self.output_shape: tuple[int, ...] = (1, model.text.stack.hidden_size)
        self.output_dtype = dtype

    def items(self, batch: Mapping[str, torch.Tensor]) -> list[LocalItem]:
        lengths = batch["audio_num_frames"].tolist()
        sizes = [num_audio_tokens(length, self._window) for length in lengths]
        owners = samples_of(batch["input_ids"] == self._token, sizes, "audio")
        return [self._item(sample, length) for sample, length in zip(owners, lengths, strict=False)]

    def rows(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return batch["audio_features"].transpose(0, 1).cuda(non_blocking=True)

    def encode(self, module: Any, rows: torch.Tensor, items: Sequence[Any]) -> torch.Tensor:
        output: torch.Tensor = module(rows.transpose(0, 1), torch.tensor([item.input_rows for item in items]))
        return output

    def dummy(self) -> tuple[torch.Tensor, list[LocalItem]]:
        return torch.zeros((STAND_IN_FRAMES, *self.input_shape)).cuda(), [self._item(0, STAND_IN_FRAMES)]

    def embeddings(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def _item(self, sample: int, length: int) -> LocalItem:
        # Attention stays within chunks of a fixed length: the work grows with the frames.
        return LocalItem(sample, length, num_audio_tokens(length, self._window), float(length))


def samples_of(marked: torch.Tensor, sizes: Sequence[int], kind: str) -> list[int]:
    """The sample that each item belongs to. ``marked [b, s]``: the places of their tokens; ``sizes``: tokens per item.

    A batch without such tokens carries a stand-in input, which is nobody's item: the list is empty then.
    ``ConfigError`` names the first sample whose tokens are not those of whole items.
    """
    counts = marked.sum(dim=1).tolist()
    if not any(counts):
        return []
    owners: list[int] = []
    for sample, count in enumerate(counts):
        found = 0
        while found < count and len(owners) < len(sizes):
            found += sizes[len(owners)]
            owners.append(sample)
        if found != count:
            raise ConfigError(
                f"sample {sample} of the microbatch has {count} {kind} tokens, but its {kind} inputs make {found}. "
                "Check the sample's placeholders against its files."
            )
    if len(owners) < len(sizes):
        raise ConfigError(
            f"the microbatch has {len(sizes)} {kind} inputs, but tokens for {len(owners)} of them (the last in sample "
            f"{owners[-1]})."
        )
    return owners
