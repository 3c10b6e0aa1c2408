"""The text decoder: Megatron's GPTModel with this chunk's layers, and the three position ids of multimodal text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from reference_vlm.configuration import TextDescription
from reference_vlm.model.core_attention import PackedAttention
from reference_vlm.model.dropout import DroppingContextAttention
from reference_vlm.model.stack import PlacedBlock, changed_config, layer_spec, stack_config, with_dropout


class TextDecoder(GPTModel):
    """``embedding`` on the module's first chunk, ``decoder``, ``output_layer`` on its last."""

    def __init__(self, base: Any, text: TextDescription, padded_vocab_size: int, chunk: int) -> None:
        stages = text.stack.stages
        config = stack_config(
            base, text.stack, chunk, sequence_parallel=base.sequence_parallel, context_size=base.context_parallel_size
        )
        config = with_dropout(config, base, text.stack, 0)
        if text.mrope_section:
            config = changed_config(config, mrope_section=list(text.mrope_section))
        core_attention = DroppingContextAttention if config.context_parallel_size > 1 else PackedAttention
        pre_process, post_process = chunk == stages.first_chunk, chunk == len(stages.flat) - 1
        super().__init__(
            config=config,
            # The layers are built below, with their places in the stack.
            transformer_layer_spec=TransformerBlockSubmodules(layer_specs=[], layer_norm=None),
            vocab_size=padded_vocab_size,
            max_sequence_length=text.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            parallel_output=True,
            share_embeddings_and_output_weights=not text.untie_embeddings,
            position_embedding_type="mrope" if text.mrope_section else "rope",
            rotary_base=text.rotary_base,
            # Embeddings of images and audio are put in before the sequence is scattered.
            scatter_embedding_sequence_parallel=False,
        )
        self.decoder = PlacedBlock(
            config,
            layer_spec(config, causal=True, core_attention=core_attention),
            num_layers=stages.flat[chunk],
            first_layer=stages.first_layer(chunk),
            pre_process=pre_process,
            post_process=post_process,
            final_norm=True,
        )
        self.requires_grad_(not text.stack.freeze)

    def setup_embeddings_and_output_layer(self) -> None:
        """Tie embedding and output layer on different stages; Megatron's own sees one stage (``stack_config``)."""
        super().setup_embeddings_and_output_layer()
        if not self.share_embeddings_and_output_weights or self.pre_process == self.post_process:
            return
        weight = self.shared_embedding_or_output_weight()
        weight.zero_out_wgrad = False
        weight.shared_embedding = True
        if self.post_process:
            # The copy starts as the embedding and counts once in the norm of the gradients.
            weight.data.fill_(0)
            weight.shared = True
        torch.distributed.all_reduce(weight.data, group=parallel_state.get_embedding_group())


def multimodal_positions(
    input_ids: Sequence[int], image_token_id: int, grids: Sequence[Sequence[int]], merge: int
) -> torch.Tensor:
    """Return position ids ``[3, tokens]`` (time, height, width) of one sample; ``grids`` of its images in patches.

    Text increments all three; an image's tokens count frames, rows and columns from the end of the text before it, and
    the text after it continues after the image's longer side.
    """
    parts, remaining = [], list(grids)
    start, index = 0, 0
    while index < len(input_ids):
        if input_ids[index] == image_token_id and remaining:
            frames, height, width = remaining.pop(0)
            height, width = height // merge, width // merge
            counts = (torch.arange(frames), torch.arange(height), torch.arange(width))
            parts.append(torch.stack([axis.flatten() for axis in torch.meshgrid(*counts, indexing="ij")]) + start)
            index += frames * height * width
            start += max(height, width)
        else:
            stop = index
            while stop < len(input_ids) and not (input_ids[stop] == image_token_id and remaining):
                stop += 1
            parts.append(torch.arange(start, start + stop - index).expand(3, -1))
            start += stop - index
            index = stop
    return torch.cat(parts, dim=1)
