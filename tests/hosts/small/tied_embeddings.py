"""One rank of three stages as MindSpeed-MM has them: images alone on the first, the language model on the others.

Prints the sum of the embedding's weights on every rank that holds them, once Megatron has set them up.
"""

import os
from datetime import timedelta
from pathlib import Path

import torch

import mindspeed_autoparallel  # noqa: F401  # before megatron
from mindspeed_autoparallel.patching import ENGINE
from mindspeed_autoparallel.runtime.megatron.shared_embedding import place_embedding

ENGINE.enable({"--auto-parallel-plan"})

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.common.language_module.language_module import LanguageModule  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402


class Decoder(LanguageModule):
    """The ends of a language model: an embedding, and an output layer with the same weights."""

    def __init__(self, pre_process, post_process):
        sizes = {"num_layers": 3, "hidden_size": 4, "num_attention_heads": 1}
        staged = {"pipeline_model_parallel_size": 3, "pipeline_dtype": torch.float32}
        super().__init__(TransformerConfig(**sizes, **staged))
        self.pre_process, self.post_process = pre_process, post_process
        self.share_embeddings_and_output_weights = True
        self.table = torch.nn.Parameter(torch.full((8, 4), 1.0 + torch.distributed.get_rank()))
        self.setup_embeddings_and_output_layer()

    def shared_embedding_or_output_weight(self):
        """Return the one matrix that either end has."""
        return self.table


torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=30))
layers = [int(count) for count in os.environ["SMALL_HOST_LAYERS"].split(",")]
place_embedding(layers, len(layers), Path("plan.json"))
parallel_state.initialize_model_parallel(pipeline_model_parallel_size=len(layers))
rank, first = torch.distributed.get_rank(), next(stage for stage, count in enumerate(layers) if count)
if layers[rank]:
    decoder = Decoder(rank == first, rank == len(layers) - 1)
    print(f"rank {rank}: {decoder.table.sum().item():.0f}", flush=True)
# The first rank has nothing to do, and must not close groups that others are still connecting.
torch.distributed.barrier()
torch.distributed.destroy_process_group()
