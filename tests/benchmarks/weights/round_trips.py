"""Random models through two random layouts and formats and back: counts round trips that are not exact to the bit.

python tests/benchmarks/weights/round_trips.py [number of layouts]
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from mindspeed_autoparallel.weights import conversion
from mindspeed_autoparallel.weights.architecture import AUDIO, SUPPORTED, TEXT, VISION, Architecture, read_architecture
from mindspeed_autoparallel.weights.layouts import CheckpointLayout, make_layout

sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))
from random_model import write_random_model


def random_config(choose: random.Random) -> dict[str, Any]:
    groups = choose.choice((4, 8))
    config: dict[str, Any] = {
        "model_type": choose.choice(SUPPORTED),
        "hidden_size": 16,
        "intermediate_size": 24,
        "head_dim": 2,
        "num_hidden_layers": choose.randint(1, 12),
        "num_attention_heads": groups * choose.choice((1, 3)),
        "num_key_value_heads": groups,
        "vocab_size": choose.randint(9, 99),
        "tie_word_embeddings": choose.random() < 0.5,
    }
    if config["model_type"] not in ("llama", "qwen2"):
        config["vision_config"] = {
            "depth": choose.randint(1, 8),
            "embed_dim": 16,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 4,
            "patch_size": 2,
        }
    if config["model_type"] == "qwen2_5_omni":
        config["audio_config"] = {
            "encoder_layers": choose.randint(1, 6),
            "d_model": 16,
            "encoder_ffn_dim": 24,
            "encoder_attention_heads": 4,
            "num_mel_bins": 4,
        }
    return config


def random_layout(choose: random.Random, architecture: Architecture) -> CheckpointLayout:
    num_stages, num_virtual = choose.randint(1, 8), choose.randint(1, 3)
    layers = {}
    for module, shape in architecture.modules.items():
        cuts = sorted(choose.randint(0, shape.num_layers) for _ in range(num_stages * num_virtual - 1))
        flat = [end - begin for begin, end in zip([0, *cuts], [*cuts, shape.num_layers], strict=True)]
        layers[module] = tuple(tuple(flat[v * num_stages : (v + 1) * num_stages]) for v in range(num_virtual))
    return make_layout(
        architecture,
        layers=layers,
        tensor_sizes={module: choose.choice((1, 2, 4)) for module in (VISION, AUDIO, TEXT)},
        vocab_multiple=choose.choice((1, 8, 64)),
        hetero=choose.random() < 0.3,
        expert_size=choose.choice((1, 1, 2)),
    )


def main(num_layouts: int) -> int:
    choose, families, different, num_tensors = random.Random(0), Counter[str](), 0, 0
    for number in range(0, num_layouts, 2):
        config = random_config(choose)
        families[config["model_type"]] += 2
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            dtype = choose.choice(("float32", "bfloat16", "float16"))
            write_random_model(folder / "hf", config, seed=number, dtype=dtype, max_shard_bytes=8192)
            architecture = read_architecture(folder / "hf")
            first, second = (random_layout(choose, architecture) for _ in range(2))
            formats = [choose.choice(("mm", "mm", "torch_dist")) for _ in range(2)]
            conversion.huggingface_to_checkpoint(folder / "hf", folder / "a", first, file_format=formats[0])
            conversion.resplit(folder / "a", folder / "hf", folder / "b", second, file_format=formats[1])
            conversion.checkpoint_to_huggingface(folder / "b", folder / "hf", folder / "back")
            before, after = (
                {key: value for path in (folder / end).glob("*.safetensors") for key, value in load_file(path).items()}
                for end in ("hf", "back")
            )
            num_tensors += len(before)
            exact = before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
            different += not exact
    print(f"{num_layouts} layouts ({', '.join(f'{count} {name}' for name, count in sorted(families.items()))})")
    print(f"{num_tensors} tensors compared; round trips that are not exact: {different}")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 200))
