"""The image generator: from the decoder's rows to the patches of the next image token, and the loss of every row."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule

from reference_vlm.configuration import ModelDescription
from reference_vlm.model.context import own_tokens
from reference_vlm.model.core_attention import PackedRows
from reference_vlm.model.dropout import item_rows
from reference_vlm.model.stack import PlacedBlock, layer_spec, stack_config, with_dropout


class ImageGenerator(MegatronModule):
    """``project_in`` on the first stage of its own pipeline, ``blocks``, with a final norm and ``head`` on the last.

    A row of the decoder is the one at the token before the image token whose patches it predicts; a row attends to the
    rows of its image up to itself, so that none sees its target.
    """

    def __init__(self, base: Any, model: ModelDescription, stage: int = 0) -> None:
        vision, generator = model.vision, model.generator
        assert vision is not None and generator is not None
        stack, stages = generator.stack, generator.stack.stages
        config = with_dropout(stack_config(base, stack, stage, sequence_parallel=False), base, stack, 3)
        super().__init__(config=config)
        self.description, self.features = generator, vision.token_features
        self.first, self.last = stage == stages.first_chunk, stage == stages.last_chunk
        if self.first:
            width = model.text.stack.hidden_size
            self.project_in = torch.nn.Linear(width, stack.hidden_size, dtype=config.params_dtype)
        self.blocks = PlacedBlock(
            config,
            layer_spec(config, causal=True),
            num_layers=stages.flat[stage],
            first_layer=stages.first_layer(stage),
            # The block starts from its input rows, on every stage.
            pre_process=True,
            post_process=self.last,
            final_norm=self.last,
        )
        if self.last:
            self.head = torch.nn.Linear(stack.hidden_size, self.features, dtype=config.params_dtype)
        self.requires_grad_(not stack.freeze)

    def forward(
        self,
        rows: torch.Tensor,
        pixel_values: torch.Tensor | None,
        tokens: torch.Tensor,
        keys: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the mean squared error of every row ``[rows]``, in fp32; before the last stage ``[rows, 1, hidden]``.

        ``rows [rows, 1, decoder hidden]``, on later stages the output of the previous stage; ``pixel_values [patches,
        patch features]`` (only the last stage needs them) of the images with ``tokens [images]`` tokens each; ``keys
        [images]``: their unique keys, for dropout. Without a row (the batch has a stand-in for an image) the
        weights still take part, with gradients of 0.
        """
        if not rows.shape[0]:
            stand_in = rows.new_zeros((1, 1, rows.shape[2]))
            return self._losses(self._run(stand_in, [1], None), stand_in.new_zeros((1, self.features)))[:0]
        hidden = self._run(rows, tokens.tolist(), keys)
        if not self.last:
            return hidden
        assert pixel_values is not None, "the last stage has the targets"
        return self._losses(hidden, pixel_values.reshape(-1, self.features))

    def _run(self, rows: torch.Tensor, sizes: list[int], keys: torch.Tensor | None) -> torch.Tensor:
        row_keys = None if keys is None else item_rows(keys, torch.tensor(sizes, device=keys.device))
        hidden: torch.Tensor = self.blocks(
            hidden_states=self.project_in(rows) if self.first else rows,
            attention_mask=row_keys,
            packed_seq_params=PackedRows(list(itertools.accumulate(sizes, initial=0))),
        )
        return hidden

    def _losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        told = self.head(hidden[:, 0]).float()
        return (told - targets.float()).square().mean(dim=1)


def rows_before(hidden: torch.Tensor, at: torch.Tensor, *, sequence_parallel: bool) -> torch.Tensor:
    """Return this rank's rows ``[rows, 1, h]`` of ``hidden [s / (cp x tp under SP), b, h]`` at the tokens before the
    True places of ``at [b, s]``, sample by sample."""
    before = torch.nn.functional.pad(at[:, 1:], (0, 1))
    own = own_tokens(before, 1)
    if sequence_parallel:
        size = parallel_state.get_tensor_model_parallel_world_size()
        own = own.chunk(size, dim=1)[parallel_state.get_tensor_model_parallel_rank()]
    return hidden.transpose(0, 1)[own].unsqueeze(1)
