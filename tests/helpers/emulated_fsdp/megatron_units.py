"""What Megatron's own TorchFullyShardedDataParallel wraps of a small GPT model, and its backward lists, as JSON.

``units``: names in the order of ``named_modules``, and of each the names that it gathers ahead in backward.
"""

import json

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import TorchFullyShardedDataParallel
from megatron.core.distributed import torch_fully_sharded_data_parallel as wrapper
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig


def units(recomputed):
    again = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}
    config = TransformerConfig(
        num_layers=3,
        hidden_size=16,
        num_attention_heads=2,
        use_cpu_initialization=True,
        transformer_impl="local",
        bf16=True,
        params_dtype=torch.bfloat16,
        **(again if recomputed else {}),
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=32,
        max_sequence_length=8,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    wrapped = TorchFullyShardedDataParallel(config, DistributedDataParallelConfig(), model)
    states = {
        module._get_fsdp_state(): name
        for name, module in wrapped.module.named_modules()
        if hasattr(module, "_get_fsdp_state")
    }
    return {name: [states[one] for one in state._states_to_backward_prefetch] for state, name in states.items()}


def main():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    parallel_state.initialize_model_parallel()
    from_group = wrapper.DeviceMesh.from_group
    wrapper.DeviceMesh.from_group = staticmethod(lambda group, _: from_group(group, "cpu"))
    print(json.dumps({"recomputed": units(True), "kept": units(False)}))


if __name__ == "__main__":
    main()
