"""Rank folders in MindSpeed-LLM's spelling beside those of its own ``convert_ckpt_v2.py``, which runs unchanged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_families import tiny_model

from mindspeed_autoparallel.weights import conversion
from mindspeed_autoparallel.weights.architecture import MINDSPEED_LLM, TEXT, read_architecture
from mindspeed_autoparallel.weights.layouts import make_layout
from mindspeed_autoparallel.weights.rank_files import FILE
from mindspeed_autoparallel.weights.spelling import EACH, GROUPED, LOCAL, Spelling

CHECKOUT = os.environ.get("MINDSPEED_LLM_SOURCES", "")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not CHECKOUT, reason="set MINDSPEED_LLM_SOURCES (tests/hosts/README.md)"),
]
torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

# The package's first lines import all of MindSpeed, which needs an NPU; the converter needs none of it.
STARTED = """
import runpy, sys, types
def package(name, **contents):
    module = sys.modules[name] = types.ModuleType(name)
    module.__dict__.update(contents)
root = sys.argv.pop(1)
for name in ("mindspeed_llm", "mindspeed_llm.tasks", "mindspeed_llm.tasks.checkpoint"):
    package(name, __path__=[root + "/" + name.replace(".", "/")])
package("mindspeed_llm.training", __path__=[])
package("mindspeed_llm.training.utils", auto_coverage=lambda one: one)
sys.argv[0] = root + "/convert_ckpt_v2.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def convert(*words: object) -> None:
    """Run the host's script."""
    command = [sys.executable, "-c", STARTED, CHECKOUT, *map(str, words)]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def files(folder: Path) -> dict[str, Any]:
    (iteration,) = (path for path in folder.iterdir() if path.is_dir())
    return {path.parent.name: torch.load(path, weights_only=False) for path in sorted(iteration.rglob(FILE))}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert sorted(found) == sorted(expected)
    for rank, content in expected.items():
        for key in [key for key in content if key.startswith("model")]:
            ours = {name: one for name, one in found[rank][key].items() if torch.is_tensor(one)}
            theirs = {name: one for name, one in content[key].items() if torch.is_tensor(one)}
            assert sorted(ours) == sorted(theirs), rank
            assert [name for name, one in theirs.items() if not torch.equal(ours[name], one)] == [], rank


# Family -> (its name there, changes of the tiny model to what the host takes for granted).
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3-moe", {"mlp_only_layers": []}),
    "glm4_moe": ("glm45", {"first_k_dense_replace": 3}),
    "deepseek_v3": ("deepseek3", {}),
}


def tiny_folder(folder: Path, family: str) -> Path:
    tiny_model(family, **CASES[family][1]).save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    # Published files have the names that transformers 4 wrote; the host reads no others.
    config |= {"torch_dtype": "float32", "rope_theta": 10000.0, "moe_layer_freq": 1}
    config |= {"num_experts": config["num_local_experts"]} if "num_local_experts" in config else {}
    path.write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("family", "expert_size", "experts"),
    [
        ("qwen3", 1, EACH),
        ("qwen3_moe", 1, EACH),
        ("qwen3_moe", 2, EACH),
        ("qwen3_moe", 2, GROUPED),
        ("glm4_moe", 1, EACH),
        ("glm4_moe", 2, GROUPED),
        ("deepseek_v3", 1, EACH),
        ("deepseek_v3", 2, EACH),
        ("deepseek_v3", 2, GROUPED),
    ],
)
def test_both_write_the_same_ranks_and_ours_reads_theirs(
    family: str, expert_size: int, experts: str, tmp_path: Path
) -> None:
    if f"'{CASES[family][0]}'" not in Path(CHECKOUT, "convert_ckpt_v2.py").read_text():
        pytest.skip(f"this release of MindSpeed-LLM does not convert {CASES[family][0]}")
    model = tiny_folder(tmp_path / "hf", family)
    layout = make_layout(
        read_architecture(model, MINDSPEED_LLM),
        layers={TEXT: ((2, 2),)},
        tensor_sizes={TEXT: 2},
        expert_size=expert_size,
        expert_tensor_size=1 if expert_size > 1 else None,
    )
    spelling = Spelling(LOCAL, experts=experts, host=MINDSPEED_LLM)
    conversion.huggingface_to_checkpoint(model, tmp_path / "ours", layout, spelling=spelling)
    words: list[object] = ["--model-type-hf", CASES[family][0]]
    words += ["--target-tensor-parallel-size", 2, "--target-pipeline-parallel-size", 2]
    words += ["--target-expert-parallel-size", expert_size, "--transformer-impl", "local"]
    words += ["--expert-tensor-parallel-size", 1] if expert_size > 1 else []
    words += ["--moe-grouped-gemm"] if experts == GROUPED else []
    convert(*words, "--load-dir", model, "--save-dir", tmp_path / "theirs", "--load-model-type", "hf")
    assert_same(files(tmp_path / "ours"), files(tmp_path / "theirs"))
    conversion.checkpoint_to_huggingface(tmp_path / "theirs", model, tmp_path / "back", host=MINDSPEED_LLM)
    expected = safetensors.load_file(model / "model.safetensors")
    found = safetensors.load_file(tmp_path / "back" / "model.safetensors")
    assert [name for name, one in expected.items() if not torch.equal(found[name], one)] == []
