"""The image encoder: patches of images of any size, attention within each image, 2x2 merge, projector."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule

from reference_vlm.configuration import ModelDescription, ProjectorDescription, VisionDescription
from reference_vlm.model.core_attention import PackedAttention, PackedRows
from reference_vlm.model.dropout import item_rows
from reference_vlm.model.grid import GridRows, lay_out_rows
from reference_vlm.model.norm import Norm
from reference_vlm.model.row_shard import (
    RowShard,
    from_tensor_ranks,
    own_shape,
    shard_multiple,
    shard_rows,
    to_tensor_ranks,
)
from reference_vlm.model.stack import ACTIVATIONS, changed_config, encoder_block, stack_config, with_dropout


class PatchEmbedding(torch.nn.Module):
    """A 3-D convolution whose kernel is a patch: ``[patches, channels * time * patch * patch]`` -> ``[patches, h]``."""

    def __init__(self, vision: VisionDescription, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = (vision.num_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
        self.proj = torch.nn.Conv3d(
            vision.num_channels,
            vision.stack.hidden_size,
            self.shape[1:],
            stride=self.shape[1:],
            bias=False,
            dtype=dtype,
        )

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        # The kernel covers the whole patch, so the convolution is one matrix product.
        weight = self.proj.weight.flatten(1)
        return torch.nn.functional.linear(pixel_values.to(weight.dtype).view(-1, weight.shape[1]), weight)


class VisionTransformer(MegatronModule):
    """``patch_embed`` (first chunk only) and ``blocks``; rows are ``[patches, 1, hidden]`` on every chunk."""

    def __init__(self, config: Any, vision: VisionDescription, chunk: int) -> None:
        super().__init__(config=config)
        stages = vision.stack.stages
        if chunk == stages.first_chunk:
            self.patch_embed = PatchEmbedding(vision, config.params_dtype)
        self.has_patch_embed = chunk == stages.first_chunk
        self.blocks = encoder_block(config, stages, chunk)
        if vision.window_size:
            for layer in self.blocks.layers:
                attention = layer.self_attention.core_attention
                if isinstance(attention, PackedAttention):
                    attention.windowed = layer.layer_number - 1 not in vision.full_attention_layers

    def forward(
        self, rows: torch.Tensor, layout: GridRows, shard: RowShard, row_keys: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run ``rows``, pixel values ``[patches, features]`` on the first chunk, ``[patches, 1, hidden]`` after it;
        the result has the rows of ``shard``."""
        if self.has_patch_embed:
            rows = to_tensor_ranks(self.patch_embed(rows[shard.own(layout.order)]).unsqueeze(1), self.config)
        packed = PackedRows(layout.boundaries, layout.windows, shard)
        hidden: torch.Tensor = self.blocks(
            hidden_states=rows,
            attention_mask=None if row_keys is None else shard.own(row_keys[layout.order]),
            rotary_pos_emb=shard.own(layout.angles),
            packed_seq_params=packed,
        )
        return hidden


class Projector(MegatronModule):
    """``layernorm``, 2x2 merge, ``encoder`` (two linear layers): ``[patches, 1, h]`` -> ``[patches / 4, 1, out]``."""

    def __init__(self, config: Any, vision: VisionDescription, projector: ProjectorDescription, out_size: int) -> None:
        merged_size = vision.stack.hidden_size * vision.spatial_merge_size**2
        own = changed_config(
            config,
            num_layers=1,
            hidden_size=out_size,
            ffn_hidden_size=projector.ffn_hidden_size,
            activation_func=ACTIVATIONS[projector.activation],
            gated_linear_unit=False,
            add_bias_linear=True,
            recompute_granularity=None,
            recompute_method=None,
            recompute_num_layers=None,
            output_layer_init_method=None,
            sequence_parallel=False,
        )
        super().__init__(config=own)
        self.merged_size = merged_size
        # Every tensor rank has all rows here.
        self.layernorm = Norm(own, vision.stack.hidden_size, vision.stack.layernorm_epsilon)
        self.encoder = MLP(
            own,
            MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
            input_size=merged_size,
            ffn_hidden_size=projector.ffn_hidden_size,
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        merged = self.layernorm(rows).reshape(-1, 1, self.merged_size)
        output, bias = self.encoder(merged)
        return output if bias is None else output + bias


class ImageEncoder(MegatronModule):
    """``encoder`` and, on the module's last chunk, ``projector``. Under its own context-parallel layout each rank
    computes a run of the rows, from pixels to the projector's output, which is gathered; under sequence parallelism of
    its own a tensor rank keeps a run of these between its layers' matrix products.

    ``forward(pixel_values, image_grid_thw)``: pixel values ``[patches, channels * 2 * 14 * 14]`` (on later chunks the
    rows ``[patches, 1, hidden]`` of the chunk before) and the grid ``[images, 3]`` in patches -> ``[patches / 4, 1,
    decoder hidden]`` on the last chunk, ``[patches, 1, hidden]`` before it.
    """

    def __init__(self, base: Any, model: ModelDescription, chunk: int) -> None:
        vision, projector = model.vision, model.projector
        assert vision is not None and projector is not None
        own_layout = "image_encoder" in model.own_layouts
        context_size = base.context_parallel_size if own_layout else 1
        sequence = base.sequence_parallel and own_layout
        config = stack_config(base, vision.stack, chunk, sequence_parallel=sequence, context_size=context_size)
        config = with_dropout(config, base, vision.stack, 1)
        super().__init__(config=config)
        self.description = vision
        self.encoder = VisionTransformer(config, vision, chunk)
        self.has_projector = chunk == vision.stack.stages.last_chunk
        if self.has_projector:
            self.projector = Projector(config, vision, projector, model.text.stack.hidden_size)
            self.projector.requires_grad_(not projector.freeze)
        self.encoder.requires_grad_(not vision.stack.freeze)

    def forward(
        self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor, keys: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the rows of images; ``keys [images]``: their unique keys, for dropout."""
        row_keys = None if keys is None else item_rows(keys, image_grid_thw.prod(dim=1).to(keys.device))
        layout = lay_out_rows(image_grid_thw.tolist(), self.description, pixel_values.device)
        merged = self.description.spatial_merge_size**2
        shard = self._shard(layout.boundaries[-1])
        # No module before a frozen encoder is trained: it keeps no activations.
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.description.stack.freeze):
            rows: torch.Tensor = self.encoder(pixel_values, layout, shard, row_keys)
        if self.has_projector:
            rows = from_tensor_ranks(rows, self.config)
            rows = shard.merged(merged).gather(self.projector(rows), same_use=True)[layout.merged_order]
        return rows

    def arriving_shape(self, num_patches: list[int]) -> tuple[int, int, int]:
        """Return the shape of this rank's input from the previous chunk for images with these patch counts."""
        return own_shape(self._shard(sum(num_patches)), self.config)

    def _shard(self, num_rows: int) -> RowShard:
        multiple = shard_multiple(self.config, self.description.spatial_merge_size**2)
        return shard_rows(num_rows, self.config.context_parallel_size, multiple)
