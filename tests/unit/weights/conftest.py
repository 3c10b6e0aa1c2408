"""Small random models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CONFIG: dict[str, Any] = {
    "model_type": "qwen2_vl", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 30, "tie_word_embeddings": False,
    "vision_config": {"depth": 3, "embed_dim": 16, "hidden_size": 16, "num_heads": 4, "patch_size": 2},
}  # fmt: skip


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    def make(name: str = "hf", max_shard_bytes: int = 1 << 20, **changes: Any) -> Path:
        from mindspeed_autoparallel.weights.example import write_random_model

        write_random_model(tmp_path / name, {**CONFIG, **changes}, max_shard_bytes=max_shard_bytes)
        return tmp_path / name

    return make
