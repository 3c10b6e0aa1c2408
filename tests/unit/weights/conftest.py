"""Small random models, and Megatron in the test process."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

CONFIG: dict[str, Any] = {
    "model_type": "qwen2_vl",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 30,
    "tie_word_embeddings": False,
    "vision_config": {"depth": 3, "embed_dim": 16, "hidden_size": 16, "num_heads": 4, "patch_size": 2},
}


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    def make(name: str = "hf", max_shard_bytes: int = 1 << 20, **changes: Any) -> Path:
        from random_model import write_random_model

        write_random_model(tmp_path / name, {**CONFIG, **changes}, max_shard_bytes=max_shard_bytes)
        return tmp_path / name

    return make


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    """Megatron's groups of one rank, on the CPU."""
    import torch
    from megatron.core import parallel_state

    patch = pytest.MonkeyPatch()
    if not torch.cuda.is_available():
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    # Nothing here drops out, so the generators of a GPU that attention forks are not needed.
    generators = types.SimpleNamespace(fork=nullcontext)
    # Modules that another test has loaded hold the function by name.
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("megatron.") and hasattr(module, "get_cuda_rng_tracker"):
            patch.setattr(module, "get_cuda_rng_tracker", lambda *args, **kwargs: generators)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    patch.undo()
