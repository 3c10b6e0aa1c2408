"""Every family through any layout, with expert ranks and expert tensor ranks, in any spelling, and back: the same to the bit."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from how_many import how_many
from hypothesis import given, settings
from hypothesis import strategies as st
from random_model import write_random_model
from tiny_families import FAMILIES, TEXT, tiny_config

from mindspeed_autoparallel.weights import conversion, spelling
from mindspeed_autoparallel.weights.architecture import HOSTS, Architecture, read_architecture
from mindspeed_autoparallel.weights.layouts import CheckpointLayout, make_layout
from mindspeed_autoparallel.weights.names import MODULES

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")


@st.composite
def layouts(draw: st.DrawFn, architecture: Architecture) -> CheckpointLayout:
    num_stages, num_virtual = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2)]))

    def rows(num_layers: int) -> tuple[tuple[int, ...], ...]:
        """Draw uneven counts; the ends of a language model have at least one layer."""
        counts = [1] + [0] * (num_stages * num_virtual - 2) + [1] if num_stages * num_virtual > 1 else [0]
        for _ in range(num_layers - sum(counts)):
            counts[draw(st.integers(0, len(counts) - 1))] += 1
        return tuple(tuple(counts[v * num_stages : (v + 1) * num_stages]) for v in range(num_virtual))

    tensor_size = draw(st.sampled_from([1, 2]))
    has_experts = any(shape.num_experts for shape in architecture.modules.values())
    return make_layout(
        architecture,
        layers={
            module: rows(architecture.modules[module].num_layers) if module in architecture.modules else None
            for module in MODULES
        },
        tensor_sizes={"text": tensor_size},
        vocab_multiple=draw(st.sampled_from([1, 48])),
        expert_size=draw(st.sampled_from([1, 2, 4])) if has_experts else 1,
        expert_tensor_size=draw(st.sampled_from([None, 1])),
    )


def all_tensors(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = {}
    for path in folder.glob("*.safetensors"):
        loaded |= safetensors.load_file(path)
    return loaded


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=how_many(1, 2), deadline=None)
@given(data=st.data())
def test_a_family_comes_back_exactly_after_two_random_layouts(family: str, data: st.DataObject) -> None:
    changes = {"tie_word_embeddings": data.draw(st.booleans())}
    if family in ("llama", "qwen3"):
        changes |= {"attention_bias": data.draw(st.booleans()), "mlp_bias": data.draw(st.booleans())}
    if family.startswith("deepseek"):
        changes["q_lora_rank"] = data.draw(st.sampled_from([None, 12]))
    host = data.draw(st.sampled_from(HOSTS if family in TEXT else HOSTS[:1]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_random_model(
            folder / "hf",
            tiny_config(family, **changes),
            dtype=data.draw(st.sampled_from(["float32", "bfloat16"])),
            nested=family not in TEXT,
            max_shard_bytes=1 << 14,
        )
        architecture = read_architecture(folder / "hf", host)

        def choice() -> dict[str, Any]:
            return {
                "file_format": data.draw(st.sampled_from(conversion.FORMATS)),
                "spelling": spelling.Spelling(
                    data.draw(st.sampled_from(spelling.IMPLEMENTATIONS)),
                    data.draw(st.sampled_from(spelling.EXPERT_FORMS)),
                    host,
                    data.draw(st.sampled_from(spelling.LAYER_FORMS)),
                ),
            }

        first, second = data.draw(layouts(architecture)), data.draw(layouts(architecture))
        conversion.huggingface_to_checkpoint(folder / "hf", folder / "a", first, **choice())
        conversion.resplit(folder / "a", folder / "hf", folder / "b", second, **choice())
        conversion.checkpoint_to_huggingface(folder / "b", folder / "hf", folder / "back", host=host)
        before, after = all_tensors(folder / "hf"), all_tensors(folder / "back")
        assert before.keys() == after.keys()
        for tensor_name, tensor in before.items():
            assert tensor.dtype == after[tensor_name].dtype, tensor_name
            assert torch.equal(tensor, after[tensor_name]), tensor_name
        json.loads((folder / "back" / "config.json").read_text())
