"""MindSpeed-MM's VLMModel: ``image_encoder(pixel_values, image_grid_thw)``, ``audio_encoder(input_features,
feature_attention_mask)``, ``text_decoder``.

In model.json, inside the block: ``"hetero": {"adapter":
"mindspeed_autoparallel.runtime.hetero.adapters.mindspeed_mm:ImageEncoder"}`` (or ``:AudioEncoder``). The training
script's own ``model_provider(..., modules=[...])`` builds each encoder alone under its own parallel state, and the text
decoder without encoders.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.hetero.adapters.protocol import EncoderAdapter, LocalItem, places_of

AUDIO_TOKEN = 151646
"""The constant in VLMModel."""


class _Module:
    """An encoder of VLMModel: built by the script's provider, called on the text decoder's first stage only."""

    name: str

    def build(self, arguments: Any) -> Any:
        return getattr(_script_provider()(modules=[self.name]), self.name)

    def without_encoders(self, provider: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(provider, modules=["text_decoder"])

    def attached(self, chunk: Any) -> None:
        """Disable the encoder on later stages, which hold it only for checkpoints."""
        setattr(chunk, f"add_{self.name}", bool(chunk.pre_process))


class ImageEncoder(_Module):
    """``"image_encoder"``; images and videos."""

    name = "image_encoder"
    attributes = ("image_encoder",)

    def adapter(self, module: Any, arguments: Any) -> EncoderAdapter:
        return ImageAdapter(module, arguments)


class AudioEncoder(_Module):
    """``"audio_encoder"``."""

    name = "audio_encoder"
    attributes = ("audio_encoder",)

    def adapter(self, module: Any, arguments: Any) -> EncoderAdapter:
        return AudioAdapter(arguments)


class ImageAdapter:
    """Items are images; input rows are patches, output rows are merged patches; ``meta`` is (frames, height, width).

    With deepstack, the features of the listed deeper layers follow on the last dimension of the output row.
    """

    meta_size = 3

    def __init__(self, module: Any, arguments: Any) -> None:
        model = arguments.mm.model
        vision = model.image_encoder.vision_encoder
        self._token, self._merge = model.img_context_token_id, getattr(vision, "spatial_merge_size", 2)
        self._hidden, self._out = vision.hidden_size, model.text_decoder.hidden_size
        self._num_outputs = 1 + len(getattr(vision, "deepstack_visual_indexes", None) or ())
        patch = next(part for part in module.modules() if isinstance(part, torch.nn.Conv3d))
        self.input_shape: tuple[int, ...] = (patch.weight[0].numel(),)
        self.output_shape: tuple[int, ...] = (self._out * self._num_outputs,)
        self.input_dtype = self.output_dtype = arguments.params_dtype

    def items(self, batch: Mapping[str, torch.Tensor]) -> list[LocalItem]:
        found = _inputs(batch, "image_grid_thw", "video_grid_thw")
        grids = found.tolist() if found is not None else []
        sizes = [frames * height * width // self._merge**2 for frames, height, width in grids]
        places = places_of(batch["input_ids"] == self._token, sizes, "image")
        return [self._item(place.sample, grid) for place, grid in zip(places, grids, strict=False)]

    def rows(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        pixels = _inputs(batch, "pixel_values", "pixel_values_videos")
        return pixels.cuda(non_blocking=True).to(self.input_dtype).flatten(0, -2)

    def encode(self, module: Any, rows: torch.Tensor, items: Sequence[Any]) -> torch.Tensor:
        grids = torch.tensor([item.meta for item in items], device=rows.device)
        output = module(rows, grids)
        parts = [output] if torch.is_tensor(output) else [output[0], *output[1]]
        return torch.cat([part.reshape(-1, self._out) for part in parts], dim=-1)

    def dummy(self) -> tuple[torch.Tensor, list[LocalItem]]:
        item = self._item(0, (1, self._merge, self._merge))
        return torch.zeros((item.input_rows, *self.input_shape), dtype=self.input_dtype).cuda(), [item]

    def embeddings(self, rows: torch.Tensor) -> Any:
        if self._num_outputs == 1:
            return rows
        first, *deeper = rows.split(self._out, dim=-1)
        return first, deeper

    def _item(self, sample: int, grid: Sequence[int]) -> LocalItem:
        frames, height, width = grid
        patches = frames * height * width
        cost = patches * (6.0 * self._hidden + height * width)
        return LocalItem(sample, patches, patches // self._merge**2, cost, (frames, height, width))


class AudioAdapter:
    """Items are clips; input rows are unpadded mel frames, output rows are audio tokens."""

    meta_size = 0

    def __init__(self, arguments: Any) -> None:
        model = arguments.mm.model
        self.input_shape: tuple[int, ...] = (model.audio_encoder.audio_encoder.num_mel_bins,)
        self.output_shape: tuple[int, ...] = (model.text_decoder.hidden_size,)
        self.input_dtype = self.output_dtype = arguments.params_dtype

    def items(self, batch: Mapping[str, torch.Tensor]) -> list[LocalItem]:
        if batch.get("input_features") is None:
            return []
        lengths = batch["feature_attention_mask"].sum(dim=1).tolist()
        places = places_of(batch["input_ids"] == AUDIO_TOKEN, [_num_tokens(length) for length in lengths], "audio")
        return [
            LocalItem(place.sample, length, _num_tokens(length), float(length))
            for place, length in zip(places, lengths, strict=False)
        ]

    def rows(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        frames = batch["input_features"].permute(0, 2, 1)[batch["feature_attention_mask"].bool()]
        return frames.cuda(non_blocking=True).to(self.input_dtype)

    def encode(self, module: Any, rows: torch.Tensor, items: Sequence[Any]) -> torch.Tensor:
        lengths = [item.input_rows for item in items]
        padded = torch.nn.utils.rnn.pad_sequence(list(rows.split(lengths)), batch_first=True)
        mask = (
            torch.arange(max(lengths), device=rows.device)[None, :] < torch.tensor(lengths, device=rows.device)[:, None]
        )
        output: torch.Tensor = module(padded.permute(0, 2, 1), mask.to(torch.int32))
        return output.reshape(-1, *self.output_shape)

    def dummy(self) -> tuple[torch.Tensor, list[LocalItem]]:
        num_frames = 4
        rows = torch.zeros((num_frames, *self.input_shape), dtype=self.input_dtype).cuda()
        return rows, [LocalItem(0, num_frames, _num_tokens(num_frames), 1.0)]

    def embeddings(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


def _num_tokens(num_frames: int) -> int:
    """Return the number of tokens of a clip: a convolution of stride 2, then a mean over pairs of frames."""
    return ((num_frames - 1) // 2 + 1) // 2


def _inputs(batch: Mapping[str, torch.Tensor], name: str, video_name: str) -> Any:
    """Return the tensor that the script's ``get_batch`` selects: videos take precedence over images."""
    video = batch.get(video_name)
    return batch.get(name) if video is None else video


def _script_provider() -> Callable[..., Any]:
    """Return ``model_provider`` of the running training script."""
    script = sys.modules["__main__"]
    if not hasattr(script, "model_provider"):
        raise ConfigError(
            f"{getattr(script, '__file__', 'the script')} has no model_provider(pre_process, post_process, modules) "
            "that could build an encoder alone; start MindSpeed-MM's pretrain_vlm.py."
        )
    provider: Callable[..., Any] = script.model_provider
    return provider
