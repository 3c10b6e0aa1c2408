"""Peak memory of one FSDP2 rank of 128, Llama 3.1 8B, beside the figure that torchtitan publishes (67.0 GiB).

The figure is of two samples of 8,192 tokens per GPU, selective checkpointing, without torch.compile (torchtitan,
benchmarks/llama3_h100_202412_torchtitan.md, table 3). Parameters are sharded by torch's ``fully_shard`` over 128 ranks of
a fake process group; this process is rank 0. Selective checkpointing keeps attention and every second matrix product of a
layer, as torchtitan's option "op" does. What is not torchtitan's: the model is transformers' implementation.
"""

from __future__ import annotations

from typing import Any

PUBLISHED_GIB = 67.0
LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192}  # fmt: skip
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 64}  # fmt: skip
ITEMS = [
    {"batch": batch, "sequence": 8192, "checkpointed": checkpointed}
    for batch, checkpointed in ((2, "selective"), (1, "selective"), (2, "full"), (1, "full"), (1, "none"))
]


def run(figures: Any) -> None:
    """Train three steps of each."""
    import torch

    on_gpu = torch.cuda.is_available() and not figures.small
    items = [dict(item, batch=1, sequence=32) for item in ITEMS[::2]] if figures.small else ITEMS
    world = 8 if figures.small else 128
    figures.each(items, lambda item: _train(item, world, "cuda" if on_gpu else "cpu", small=figures.small))


def checkpointed(forward: Any, *, selective: bool) -> Any:
    """Return a layer's ``forward`` that is recomputed in backward; ``selective``: less attention and every second matrix
    product."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def contexts() -> Any:
        seen = {True: 0, False: 0}

        def choose(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
            name = str(operator)
            if name == "aten.mm.default":
                seen[context.is_recompute] += 1
                kept = seen[context.is_recompute] % 2 == 1
            else:
                kept = "scaled_dot_product" in name or name.startswith("_c10d_functional.reduce_scatter")
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(choose)

    more = {"context_fn": contexts} if selective else {}
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **more, **kwargs)


def _train(item: dict[str, Any], world: int, device: str, *, small: bool) -> dict[str, Any]:
    import torch
    import torch.distributed as distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import LlamaConfig, LlamaForCausalLM

    if not distributed.is_initialized():
        distributed.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    mesh = init_device_mesh(device, (world,))
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    config = LlamaConfig(**(SMALL if small else LLAMA), attn_implementation="sdpa", use_cache=False)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        if item["checkpointed"] != "none":
            layer.forward = checkpointed(layer.forward, selective=item["checkpointed"] == "selective")
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().normal_(0.0, 0.02)
        for module in model.modules():
            if hasattr(module, "original_inv_freq") or hasattr(module, "inv_freq"):
                size = module.inv_freq.numel()
                module.inv_freq = 1.0 / (10000.0 ** (torch.arange(size, device=device).float() / size))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    tokens = torch.randint(0, config.vocab_size, (item["batch"], item["sequence"]), device=device)
    for _ in range(3):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    sharded = sum(parameter.to_local().numel() for parameter in model.parameters())
    total = sum(parameter.numel() for parameter in model.parameters())
    result: dict[str, Any] = {"world": world, "parameters": total, "parameters_here": sharded}
    if device == "cuda":
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        result["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        result["published_gib"] = PUBLISHED_GIB
    return result
