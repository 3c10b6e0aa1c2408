"""The reference model's encoders and generator for hetero parallel: how they are built, and how they read batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.parallel_state import get_pipeline_model_parallel_rank

from mindspeed_autoparallel.data.media import num_audio_tokens
from mindspeed_autoparallel.runtime.hetero.adapters.protocol import (
    EncoderAdapter,
    GeneratorAdapter,
    HostModule,
    LocalItem,
    Place,
    places_of,
)
from reference_vlm.arguments import drops
from reference_vlm.configuration import ModelDescription
from reference_vlm.data.batches import STAND_IN_FRAMES
from reference_vlm.model.audio import AudioEncoder
from reference_vlm.model.generator import ImageGenerator
from reference_vlm.model.vision import ImageEncoder


def hosts(model: ModelDescription) -> dict[str, HostModule]:
    """Return the builders of the reference training by block name."""
    return {
        "image_encoder": ImageHost(model),
        "audio_encoder": AudioHost(model),
        "image_generator": GeneratorHost(model),
    }


def _config(arguments: Any) -> Any:
    from megatron.training.arguments import core_transformer_config_from_args

    config = core_transformer_config_from_args(arguments)
    config.dropout_seed = arguments.seed
    return config


def _keys(batch: Mapping[str, torch.Tensor], name: str, wanted: bool, count: int) -> list[tuple[int, ...]]:
    """Return the key of each item of a batch, as the last part of its ``meta``."""
    return [(key,) for key in batch[name].tolist()] if wanted else [()] * count


def _keys_of(items: Sequence[Any], place: int, wanted: bool, device: Any) -> tuple[torch.Tensor, ...]:
    """Return the keys in the items' ``meta``, as the encoder's last argument."""
    return (torch.tensor([item.meta[place] for item in items], device=device),) if wanted else ()


class ImageHost:
    """``image_encoder`` with its projector."""

    def __init__(self, model: ModelDescription) -> None:
        self._model = model

    def build(self, arguments: Any) -> Any:
        return ImageEncoder(_config(arguments), self._model, get_pipeline_model_parallel_rank())

    def adapter(self, module: Any, arguments: Any) -> EncoderAdapter:
        return ImageAdapter(self._model, arguments.params_dtype, drops(arguments, self._model))


class AudioHost:
    """``audio_encoder`` with its projection."""

    def __init__(self, model: ModelDescription) -> None:
        self._model = model

    def build(self, arguments: Any) -> Any:
        return AudioEncoder(_config(arguments), self._model, get_pipeline_model_parallel_rank())

    def adapter(self, module: Any, arguments: Any) -> EncoderAdapter:
        return AudioAdapter(self._model, arguments.params_dtype, drops(arguments, self._model))


class GeneratorHost:
    """``image_generator``."""

    def __init__(self, model: ModelDescription) -> None:
        self._model = model

    def build(self, arguments: Any) -> Any:
        return ImageGenerator(_config(arguments), self._model, get_pipeline_model_parallel_rank())

    def adapter(self, module: Any, arguments: Any) -> GeneratorAdapter:
        return ImageGeneratorAdapter(self._model, arguments.params_dtype, drops(arguments, self._model))


class ImageAdapter:
    """Items are images; rows are patches in, merged rows out; ``meta`` is (frames, height, width) in patches, then with
    dropout (``with_keys``) the image's key."""

    runs_sequence_parallel = True

    def __init__(self, model: ModelDescription, dtype: torch.dtype, with_keys: bool = False) -> None:
        self._with_keys = with_keys
        self.meta_size = 3 + with_keys
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
        places = places_of(batch["input_ids"] == self._token, sizes, "image")
        length = batch["input_ids"].shape[1]
        keys = _keys(batch, "image_keys", self._with_keys, len(grids))
        return [self._item(place, length, grid, key) for place, grid, key in zip(places, grids, keys, strict=False)]

    def rows(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return batch["pixel_values"].cuda(non_blocking=True)

    def encode(self, module: Any, rows: torch.Tensor, items: Sequence[Any]) -> torch.Tensor:
        grids = torch.tensor([item.meta[:3] for item in items])
        output: torch.Tensor = module(rows, grids, *_keys_of(items, 3, self._with_keys, rows.device))
        return output

    def encode_later_stage(self, module: Any, hidden: torch.Tensor, items: Sequence[Any]) -> torch.Tensor:
        return self.encode(module, hidden, items)

    def arriving_shape(self, module: Any, items: Sequence[Any]) -> tuple[int, int, int]:
        return module.arriving_shape([item.input_rows for item in items])  # type: ignore[no-any-return]

    def dummy(self) -> tuple[torch.Tensor, list[LocalItem]]:
        item = self._item(Place(0, None), 0, [1, self._merge, self._merge], (0,) * self._with_keys)
        return torch.zeros((item.input_rows, *self.input_shape)).cuda(), [item]

    def embeddings(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def _item(self, place: Place, length: int, grid: Sequence[int], key: tuple[int, ...]) -> LocalItem:
        frames, height, width = grid
        patches = frames * height * width
        # A layer's products (24 h^2 n with its MLP) against its attention (4 h n m), rows of one frame together.
        cost = patches * (6.0 * self._hidden + height * width)
        meta = (frames, height, width, *key)
        return LocalItem(place.sample, patches, patches // self._merge**2, cost, meta, place.first_token, length)


class ImageGeneratorAdapter:
    """Items are images; target rows are patches, the decoder's rows are those before the image's tokens; ``meta`` is
    (number of tokens, then with dropout the image's key)."""

    def __init__(self, model: ModelDescription, dtype: torch.dtype, with_keys: bool = False) -> None:
        vision = model.vision
        assert vision is not None
        self._images = ImageAdapter(model, dtype, with_keys)
        self._with_keys, self._per_token = with_keys, vision.spatial_merge_size**2
        self.meta_size = 1 + with_keys
        self.input_shape, self.input_dtype = self._images.input_shape, self._images.input_dtype
        self.output_shape, self.output_dtype = self._images.output_shape, dtype

    def items(self, batch: Mapping[str, torch.Tensor]) -> list[LocalItem]:
        return [self._before(image) for image in self._images.items(batch)]

    def rows(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._images.rows(batch)

    def generate(
        self, module: Any, hidden: torch.Tensor, targets: torch.Tensor | None, items: Sequence[Any]
    ) -> torch.Tensor:
        tokens = torch.tensor([item.meta[0] for item in items], device=hidden.device)
        output: torch.Tensor = module(hidden, targets, tokens, *_keys_of(items, 1, self._with_keys, hidden.device))
        return output

    def generate_later_stage(
        self, module: Any, hidden: torch.Tensor, targets: torch.Tensor | None, items: Sequence[Any]
    ) -> torch.Tensor:
        return self.generate(module, hidden, targets, items)

    def arriving_shape(self, module: Any, items: Sequence[Any]) -> tuple[int, int, int]:
        return sum(item.output_rows for item in items), 1, module.config.hidden_size

    def dummy(self) -> tuple[torch.Tensor, torch.Tensor, list[LocalItem]]:
        item = LocalItem(0, self._per_token, 1, 1.0, (1,) + (0,) * self._with_keys)
        hidden = torch.zeros((1, *self.output_shape), dtype=self.output_dtype).cuda()
        return hidden, torch.zeros((self._per_token, *self.input_shape)).cuda(), [item]

    def _before(self, image: LocalItem) -> LocalItem:
        first = None if image.first_token is None else image.first_token - 1
        meta = (image.output_rows, *image.meta[3:])
        return replace(image, cost=float(image.output_rows), meta=meta, first_token=first)


class AudioAdapter:
    """Items are clips; rows are mel frames in, audio tokens out; ``meta`` is the clip's key with dropout."""

    runs_sequence_parallel = True

    def __init__(self, model: ModelDescription, dtype: torch.dtype, with_keys: bool = False) -> None:
        self._with_keys = with_keys
        self.meta_size = int(with_keys)
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
        places = places_of(batch["input_ids"] == self._token, sizes, "audio")
        num_tokens = batch["input_ids"].shape[1]
        keys = _keys(batch, "audio_keys", self._with_keys, len(lengths))
        return [
            self._item(place, num_tokens, length, key)
            for place, length, key in zip(places, lengths, keys, strict=False)
        ]

    def rows(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return batch["audio_features"].transpose(0, 1).cuda(non_blocking=True)

    def encode(self, module: Any, rows: torch.Tensor, items: Sequence[Any]) -> torch.Tensor:
        return self.encode_later_stage(module, rows.transpose(0, 1), items)

    def encode_later_stage(self, module: Any, hidden: torch.Tensor, items: Sequence[Any]) -> torch.Tensor:
        frames = torch.tensor([item.input_rows for item in items])
        output: torch.Tensor = module(hidden, frames, *_keys_of(items, 0, self._with_keys, hidden.device))
        return output

    def arriving_shape(self, module: Any, items: Sequence[Any]) -> tuple[int, int, int]:
        return module.arriving_shape([item.input_rows for item in items])  # type: ignore[no-any-return]

    def dummy(self) -> tuple[torch.Tensor, list[LocalItem]]:
        return torch.zeros((STAND_IN_FRAMES, *self.input_shape)).cuda(), [
            self._item(Place(0, None), 0, STAND_IN_FRAMES, (0,) * self._with_keys)
        ]

    def embeddings(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def _item(self, place: Place, num_tokens: int, length: int, key: tuple[int, ...]) -> LocalItem:
        # Attention stays within chunks of a fixed length: the work grows with the frames.
        rows = num_audio_tokens(length, self._window)
        return LocalItem(place.sample, length, rows, float(length), key, place.first_token, num_tokens)
