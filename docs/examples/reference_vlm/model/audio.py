"""The audio encoder: two convolutions over mel frames in chunks, layers within a chunk, pooling, projection."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule

from mindspeed_autoparallel.data.media import chunk_lengths, num_conv_rows
from reference_vlm.configuration import AudioDescription, ModelDescription
from reference_vlm.model.core_attention import PackedRows
from reference_vlm.model.dropout import item_rows
from reference_vlm.model.norm import Norm
from reference_vlm.model.row_shard import (
    RowShard,
    from_tensor_ranks,
    own_shape,
    shard_multiple,
    shard_rows,
    to_tensor_ranks,
)
from reference_vlm.model.stack import changed_config, encoder_block, stack_config, with_dropout


class AudioTransformer(MegatronModule):
    """``conv1``, ``conv2`` (first chunk), ``blocks``, ``ln_post`` and ``proj`` (last chunk)."""

    def __init__(self, config: Any, audio: AudioDescription, chunk: int, out_size: int) -> None:
        super().__init__(config=config)
        stages, hidden = audio.stack.stages, audio.stack.hidden_size
        self.window = audio.num_window_frames
        self.is_first, self.is_last = chunk == stages.first_chunk, chunk == stages.last_chunk
        dtype = config.params_dtype
        if self.is_first:
            self.conv1 = torch.nn.Conv1d(audio.num_mel_bins, hidden, kernel_size=3, padding=1, dtype=dtype)
            self.conv2 = torch.nn.Conv1d(hidden, hidden, kernel_size=3, stride=2, padding=1, dtype=dtype)
        self.blocks = encoder_block(config, stages, chunk)
        if self.is_last:
            # Every tensor rank has all rows here.
            self.ln_post = Norm(changed_config(config, sequence_parallel=False), hidden, audio.stack.layernorm_epsilon)
            self.proj = torch.nn.Linear(hidden, out_size, dtype=dtype)

    def forward(self, rows: torch.Tensor, num_frames: list[int], keys: torch.Tensor | None = None) -> torch.Tensor:
        """Return all rows on the last chunk, on the others those of this context rank if the audio encoder has its
        own context-parallel layout (of this tensor rank under sequence parallelism)."""
        lengths = [(length + 1) // 2 for frames in num_frames for length in chunk_lengths(frames, self.window)]
        shard = self.shard(sum(lengths))
        if self.is_first:
            rows = to_tensor_ranks(shard.own(self._convolve(rows, num_frames)), self.config)
        packed = PackedRows(list(itertools.accumulate(lengths, initial=0)), shard=shard)
        row_keys = None
        if keys is not None:
            sizes = [num_conv_rows(frames, self.window) for frames in num_frames]
            row_keys = shard.own(item_rows(keys, torch.tensor(sizes, device=keys.device)))
        hidden: torch.Tensor = self.blocks(hidden_states=rows, attention_mask=row_keys, packed_seq_params=packed)
        # Pooling joins rows of different ranks.
        return shard.gather(from_tensor_ranks(hidden, self.config)) if self.is_last else hidden

    def shard(self, num_rows: int) -> RowShard:
        """Return the runs of ``num_rows`` over the context ranks."""
        return shard_rows(num_rows, self.config.context_parallel_size, shard_multiple(self.config))

    def project(self, rows: torch.Tensor, num_frames: list[int]) -> torch.Tensor:
        """Apply the mean of neighbouring rows, norm and projection: ``[tokens, 1, out]``."""
        clips = rows.split([num_conv_rows(frames, self.window) for frames in num_frames])
        pooled = [(clip[: len(clip) // 2 * 2 : 2] + clip[1::2]) / 2 for clip in clips]
        tokens = torch.cat(pooled)
        shard = shard_rows(tokens.shape[0], self.config.context_parallel_size)
        projected: torch.Tensor = self.proj(self.ln_post(shard.own(tokens)))
        return shard.gather(projected, same_use=True)

    def _convolve(self, features: torch.Tensor, num_frames: list[int]) -> torch.Tensor:
        """Map ``features [mel bins, frames of all clips]`` to ``[rows, 1, hidden]``; every chunk on its own."""
        lengths = [length for frames in num_frames for length in chunk_lengths(frames, self.window)]
        rows = []
        for chunk in features.to(self.conv1.weight.dtype).split(lengths, dim=1):
            hidden = torch.nn.functional.gelu(self.conv1(chunk[None]))
            hidden = torch.nn.functional.gelu(self.conv2(hidden))[0].transpose(0, 1)
            rows.append(hidden + _sines(hidden.shape[0], hidden.shape[1], hidden.device).to(hidden.dtype))
        return torch.cat(rows).unsqueeze(1)


def _sines(length: int, channels: int, device: torch.device) -> torch.Tensor:
    steps = torch.arange(channels // 2, dtype=torch.float32, device=device) / max(1, channels // 2 - 1)
    angles = torch.arange(length, device=device)[:, None] * torch.exp(-math.log(10000.0) * steps)[None, :]
    return torch.cat((angles.sin(), angles.cos()), dim=1)


class AudioEncoder(MegatronModule):
    """``encoder``, with the projection on the module's last chunk.

    ``forward(audio_features, audio_num_frames)``: mel features ``[mel bins, frames of all clips]`` (on later chunks the
    rows ``[rows, 1, hidden]`` of the chunk before) and frames per clip ``[clips]`` -> ``[tokens, 1, decoder hidden]``
    on the last chunk, ``[rows, 1, hidden]`` before it.
    """

    def __init__(self, base: Any, model: ModelDescription, chunk: int) -> None:
        audio = model.audio
        assert audio is not None
        context_size = base.context_parallel_size if "audio_encoder" in model.own_layouts else 1
        sequence = base.sequence_parallel and "audio_encoder" in model.own_layouts
        config = stack_config(base, audio.stack, chunk, sequence_parallel=sequence, context_size=context_size)
        config = with_dropout(config, base, audio.stack, 2)
        super().__init__(config=config)
        self.description = audio
        self.encoder = AudioTransformer(config, audio, chunk, model.text.stack.hidden_size)
        self.encoder.requires_grad_(not audio.stack.freeze)
        if self.encoder.is_last:
            self.encoder.proj.requires_grad_(not audio.freeze_projector)

    def forward(
        self, audio_features: torch.Tensor, audio_num_frames: torch.Tensor, keys: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the tokens of clips; ``keys [clips]``: their unique keys, for dropout."""
        num_frames = audio_num_frames.tolist()
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.description.stack.freeze):
            rows: torch.Tensor = self.encoder(audio_features, num_frames, keys)
        return self.encoder.project(rows, num_frames) if self.encoder.is_last else rows

    def arriving_shape(self, num_frames: list[int]) -> tuple[int, int, int]:
        """Return the shape of this rank's input from the previous chunk for clips with these frame counts."""
        num_rows = sum(num_conv_rows(frames, self.encoder.window) for frames in num_frames)
        return own_shape(self.encoder.shard(num_rows), self.encoder.config)
