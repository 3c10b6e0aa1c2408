"""One pipeline chunk of the whole model: encoders, the text decoder with their embeddings at their tokens, the head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule

from mindspeed_autoparallel.data.media import num_audio_tokens, num_conv_rows
from reference_vlm.configuration import ModelDescription, StackDescription
from reference_vlm.model import stage_tensor
from reference_vlm.model.audio import AudioEncoder
from reference_vlm.model.context import own_tokens, pack_boundaries
from reference_vlm.model.core_attention import PackedRows
from reference_vlm.model.dropout import drop_embeddings, token_rows
from reference_vlm.model.generator import ImageGenerator, rows_before
from reference_vlm.model.text import TextDecoder
from reference_vlm.model.vision import ImageEncoder

try:  # newer releases read the groups of every model
    from megatron.core.process_groups_config import ProcessGroupCollection
except ImportError:
    ProcessGroupCollection = None


class VisionLanguageModel(MegatronModule):
    """``image_encoder``, ``audio_encoder``, ``text_decoder`` and ``image_generator``: each is ``None`` on chunks
    without its layers.

    A module in ``model.own_layouts`` is ``None`` until hetero parallel attaches it here.

    ``base``: Megatron's config of the whole pipeline; ``chunk``: position in the order data takes (virtual stage x
    pipeline size + pipeline rank).
    """

    def __init__(self, base: Any, model: ModelDescription, padded_vocab_size: int, chunk: int) -> None:
        super().__init__(config=base)
        self.description = model
        self.chunk = chunk
        self.model_type = ModelType.encoder_or_decoder
        if ProcessGroupCollection is not None:
            self.pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        self.received: torch.Tensor | None = None
        self.image_encoder = (
            ImageEncoder(base, model, chunk)
            if model.vision and "image_encoder" not in model.own_layouts and _lies_on(model.vision.stack, chunk)
            else None
        )
        self.audio_encoder = (
            AudioEncoder(base, model, chunk)
            if model.audio and "audio_encoder" not in model.own_layouts and _lies_on(model.audio.stack, chunk)
            else None
        )
        first_text = model.text.stack.stages.first_chunk
        self.text_decoder = TextDecoder(base, model.text, padded_vocab_size, chunk) if chunk >= first_text else None
        self.pre_process, self.post_process = (
            chunk == first_text,
            self.text_decoder is not None and (self.text_decoder.post_process),
        )
        own_generator = "image_generator" in model.own_layouts
        self.image_generator = (
            ImageGenerator(base, model) if model.generator and self.post_process and not own_generator else None
        )
        self._last_hidden: torch.Tensor | None = None
        if model.generator and self.post_process:
            assert self.text_decoder is not None
            self.text_decoder.decoder.register_forward_hook(self._keep_hidden)
        self.share_embeddings_and_output_weights = not model.text.untie_embeddings

    def shared_embedding_or_output_weight(self) -> Any:
        """Return the weight of a tied embedding, for Megatron's gradient all-reduce; ``None`` on chunks in between."""
        return self.text_decoder.shared_embedding_or_output_weight() if self.text_decoder is not None else None

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Set the tensor from the previous chunk; called by Megatron's schedules."""
        self.received = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        audio_features: torch.Tensor | None = None,
        audio_num_frames: torch.Tensor | None = None,
        sequence_lengths: torch.Tensor | None = None,
        **identities: torch.Tensor,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Run ``input_ids``, ``labels [b, s]``, ``position_ids [3, b, s]``; encoder inputs as the encoders take
        them. ``sequence_lengths [texts]``: the texts of a packed row (``b`` is 1); each attends to itself alone.

        ``identities``: ``sample_numbers [b]``, ``image_keys``, ``audio_keys``, if dropout is used.
        Returns the loss of every token ``[b, s / cp]`` (logits ``[b, s / cp, vocabulary / tp]`` without ``labels``) on
        the last chunk, the tensor for the next chunk before it. With a generator the last chunk also returns the loss
        of every row it is given on this rank, ``[rows]``.
        """
        batch = {
            "pixel_values": pixel_values,
            "image_grid_thw": image_grid_thw,
            "audio_features": audio_features,
            "audio_num_frames": audio_num_frames,
            "sequence_lengths": sequence_lengths,
        }
        output = self._run(input_ids, position_ids, labels, batch, identities)
        if self.description.generator is None or not self.post_process or labels is None:
            return output
        return output, self._generate(input_ids, pixel_values, image_grid_thw, identities)

    def _run(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        labels: torch.Tensor | None,
        batch: Mapping[str, torch.Tensor | None],
        identities: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return the output of ``forward`` without the generator's losses."""
        received, self.received = self.received, None
        numbers = identities.get("sample_numbers")
        boundaries = pack_boundaries(batch["sequence_lengths"], input_ids.shape[1])
        row_keys = None if numbers is None else token_rows(numbers, input_ids.shape[1], boundaries)
        pack = None if boundaries is None else PackedRows(boundaries)
        model, first_text = self.description, self.description.text.stack.stages.first_chunk
        if self.chunk > first_text:
            assert self.text_decoder is not None
            self.text_decoder.set_input_tensor(received)
            return self._decode(input_ids, position_ids, None, labels, row_keys, pack)
        streams: dict[str, torch.Tensor] = {}
        if received is not None:
            streams = stage_tensor.unpack(received, self._arriving(batch["image_grid_thw"], batch["audio_num_frames"]))
        if self.image_encoder is not None:
            rows = streams.get("image", batch["pixel_values"])
            streams["image"] = self.image_encoder(rows, batch["image_grid_thw"], *_given(identities.get("image_keys")))
        if self.audio_encoder is not None:
            rows = streams.get("audio", batch["audio_features"])
            streams["audio"] = self.audio_encoder(
                rows, batch["audio_num_frames"], *_given(identities.get("audio_keys"))
            )
        if self.text_decoder is None:
            if not streams:
                # No module has begun yet (leading stages without layers): pass on a tensor of the right type.
                streams["nothing"] = torch.zeros(1, 1, 1, dtype=self.config.params_dtype, device=input_ids.device)
            # Always in the same order, regardless of this chunk's modules.
            ordered: dict[str, torch.Tensor] = {
                name: streams[name] for name in ("image", "audio", "nothing") if name in streams
            }
            return stage_tensor.keep_backward_alive(stage_tensor.pack(ordered), received)
        embeddings = self.text_decoder.embedding(input_ids=input_ids, position_ids=position_ids)
        if self.training:
            rates = getattr(self.text_decoder.config, "reproducible_dropout", None)
            embeddings = drop_embeddings(embeddings, rates, row_keys)
        if received is not None:
            embeddings = stage_tensor.keep_backward_alive(embeddings, received)
        for name, token_id in (("image", model.image_token_id), ("audio", model.audio_token_id)):
            if name in streams:
                embeddings = put_at_tokens(embeddings, streams[name], input_ids == token_id)
        embeddings = own_tokens(embeddings, 0)
        if self.config.sequence_parallel:
            embeddings = scatter_to_sequence_parallel_region(embeddings)
        return self._decode(input_ids, position_ids, embeddings, labels, row_keys, pack)

    def _decode(
        self,
        input_ids: Any,
        position_ids: Any,
        embeddings: Any,
        labels: Any,
        row_keys: torch.Tensor | None,
        pack: PackedRows | None,
    ) -> torch.Tensor:
        assert self.text_decoder is not None
        if labels is not None:
            labels = own_tokens(labels, 1)
        if not self.description.text.mrope_section:
            position_ids = position_ids[0]
        output: torch.Tensor = self.text_decoder(
            input_ids=input_ids,
            position_ids=position_ids,
            # Causal attention needs no mask: the layers find the rows' keys here (``dropout``).
            attention_mask=None if row_keys is None else own_tokens(row_keys, 0),
            decoder_input=embeddings,
            labels=labels,
            packed_seq_params=pack,
        )
        return output

    def _keep_hidden(self, module: Any, inputs: Any, output: torch.Tensor) -> None:
        self._last_hidden = output

    def _generate(
        self, input_ids: torch.Tensor, pixel_values: Any, grid: Any, identities: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return the generator's losses of this rank's rows; under its own layout, hetero parallel serves the call."""
        hidden, self._last_hidden = self._last_hidden, None
        assert hidden is not None and self.image_generator is not None and self.description.vision is not None
        at = input_ids == self.description.image_token_id
        rows = rows_before(hidden, at, sequence_parallel=self.config.sequence_parallel)
        tokens = grid.prod(dim=1) // self.description.vision.spatial_merge_size**2
        losses: torch.Tensor = self.image_generator(rows, pixel_values, tokens, *_given(identities.get("image_keys")))
        return losses

    def _arriving(self, grid: torch.Tensor | None, num_frames: torch.Tensor | None) -> dict[str, tuple[int, int]]:
        """Return (rows, width) of the streams that the chunk before this one sends."""
        model, shapes = self.description, {}
        width = model.text.stack.hidden_size
        if model.vision is not None and model.vision.stack.stages.first_chunk < self.chunk:
            assert grid is not None
            rows, merge = int(grid.prod(dim=1).sum()), model.vision.spatial_merge_size**2
            done = model.vision.stack.stages.last_chunk < self.chunk
            shapes["image"] = (rows // merge, width) if done else (rows, model.vision.stack.hidden_size)
        if model.audio is not None and model.audio.stack.stages.first_chunk < self.chunk:
            assert num_frames is not None
            done, window = model.audio.stack.stages.last_chunk < self.chunk, model.audio.num_window_frames
            count = num_audio_tokens if done else num_conv_rows
            rows = sum(count(frames, window) for frames in num_frames.tolist())
            shapes["audio"] = (rows, width if done else model.audio.stack.hidden_size)
        return shapes or {"nothing": (1, 1)}


def put_at_tokens(embeddings: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Return ``embeddings [s, b, h]`` with ``rows [n, 1, h]`` at the True places of ``at [b, s]``, sample by sample.

    Without such tokens the rows are those of a stand-in input: they are added with weight zero, so that the encoder's
    backward and its collectives run on every rank.
    """
    places = at.transpose(0, 1)
    if not bool(at.any()):
        return embeddings + 0.0 * rows.sum().to(embeddings.dtype)
    # The n-th True of [b, s] in row order gets row n.
    order = (at.flatten().long().cumsum(0) - 1).view_as(at).transpose(0, 1)
    picked = rows[:, 0][order[places]]
    return embeddings.masked_scatter(places.unsqueeze(-1), picked.to(embeddings.dtype))


def _given(keys: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    return () if keys is None else (keys,)


def _lies_on(stack: StackDescription, chunk: int) -> bool:
    return stack.stages.first_chunk <= chunk <= stack.stages.last_chunk


def current_chunk(virtual_stage: int | None) -> int:
    """Return the chunk built on this rank for ``virtual_stage``."""
    rank: int = parallel_state.get_pipeline_model_parallel_rank()
    size: int = parallel_state.get_pipeline_model_parallel_world_size()
    return (virtual_stage or 0) * size + rank
