"""Our checkpoints of FSDP2 trainings against those of MindSpeed-MM's own, unchanged ``mm-convert``."""

from __future__ import annotations

import importlib
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from dist_tensors import stored_tensors
from tiny_families import tiny_model

from mindspeed_autoparallel.weights import conversion
from mindspeed_autoparallel.weights.architecture import read_architecture
from mindspeed_autoparallel.weights.layouts import make_layout
from mindspeed_autoparallel.weights.rank_folders import TRACKER

CHECKOUT = os.environ.get("MINDSPEED_MM_SOURCES", "")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not CHECKOUT, reason="set MINDSPEED_MM_SOURCES (tests/hosts/README.md)"),
]
torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture(scope="module")
def converters() -> Any:
    """Import the converters alone: the package's first lines import all others, which need an NPU."""
    package = types.ModuleType("checkpoint")
    package.__path__ = [f"{CHECKOUT}/checkpoint"]
    sys.modules["checkpoint"] = package
    try:
        generic = importlib.import_module("checkpoint.fsdp.generic_dcp_converter").GenericDCPConverter
        qwen = importlib.import_module("checkpoint.vlm_model.converters.qwen3vl").Qwen3VLConverter
        merging = importlib.import_module("checkpoint.common.merge_dcp_to_hf")
        # It also copies tokenizer and image processor, which a tiny model does not have.
        merging.AutoProcessor = types.SimpleNamespace(
            from_pretrained=lambda *a, **k: types.SimpleNamespace(save_pretrained=lambda folder: None)
        )
        yield {"generic": generic(), "qwen3vl": qwen()}
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "checkpoint"]:
            del sys.modules[name]


def weights(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in folder.glob("*.safetensors"):
        found |= safetensors.load_file(path)
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert sorted(found) == sorted(expected)
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe", "qwen3_5"])
def test_both_write_the_same_and_read_one_another(family: str, converters: Any, tmp_path: Path) -> None:
    model = tmp_path / "hf"
    tiny_model(family).save_pretrained(model, max_shard_size="20KB")  # its way back needs the index of several files
    layout = make_layout(read_architecture(model), layers={}, tensor_sizes={})
    conversion.huggingface_to_checkpoint(model, tmp_path / "ours", layout, file_format="dcp")
    converters["generic"].hf_to_dcp(hf_dir=str(model), dcp_dir=str(tmp_path / "theirs"))
    assert_same(stored_tensors(tmp_path / "ours" / "release"), stored_tensors(tmp_path / "theirs" / "release"))
    trackers = [(tmp_path / name / TRACKER).read_text() for name in ("ours", "theirs")]
    assert trackers[0] == trackers[1]
    conversion.checkpoint_to_huggingface(tmp_path / "theirs", model, tmp_path / "back")
    assert_same(weights(tmp_path / "back"), weights(model))
    # Its way back makes of ours what it makes of its own.
    merged = []
    for name in ("ours", "theirs"):
        source, target = str(tmp_path / name / "release"), tmp_path / f"{name}-merged"
        converters["generic"].dcp_to_hf(load_dir=source, save_dir=target, model_assets_dir=str(model))
        merged.append(weights(target))
    assert_same(*merged)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe"])
def test_the_form_of_its_trainer_on_megatron_is_read(family: str, converters: Any, tmp_path: Path) -> None:
    model = tmp_path / "hf"
    tiny_model(family).save_pretrained(model)
    converters["qwen3vl"].hf_to_dcp(hf_dir=str(model), dcp_dir=str(tmp_path / "theirs"))
    conversion.checkpoint_to_huggingface(tmp_path / "theirs", model, tmp_path / "back")
    assert_same(weights(tmp_path / "back"), weights(model))
