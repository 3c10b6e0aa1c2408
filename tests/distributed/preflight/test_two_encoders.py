"""Ranks of hetero layouts, played alone beside real ones: encoders with pipelines of their own, and images and clips of
several sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from script_ranks import MARKS, ROOT, played, real_peaks

pytestmark = [*MARKS, pytest.mark.long]

EXAMPLE = ROOT / "docs/examples/qwen2vl_tiny"
FLAGS = """--use-mcore-models --num-layers 4 --hidden-size 64 --ffn-hidden-size 160 --num-attention-heads 4
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --micro-batch-size 1 --global-batch-size 8
    --tokenizer-type NullTokenizer --vocab-size 512 --seq-length 128 --max-position-embeddings 1024
    --make-vocab-size-divisible-by 1 --normalization RMSNorm --swiglu --lr 1.0e-3 --train-iters 4 --seed 42
    --use-distributed-optimizer --no-gradient-accumulation-fusion --no-masked-softmax-fusion --log-interval 1
    --eval-interval 10000 --eval-iters 0 --hetero-parallel"""
CASES: dict[str, tuple[dict[str, int], dict[str, int], dict[str, int], str]] = {
    "image TP2 PP2, audio TP2, text PP2": ({"tp": 2, "pp": 2}, {"tp": 2}, {"pp": 2}, ""),
    "image PP2, audio TP2 PP2 SP, text TP2 SP, recompute": (
        {"pp": 2},
        {"tp": 2, "pp": 2, "sp": True},
        {"tp": 2},
        "--hetero-memory recompute --sequence-parallel",
    ),
    "image TP2 PP2, audio PP2, text PP2, window": ({"tp": 2, "pp": 2}, {"pp": 2}, {"pp": 2}, "--hetero-memory window"),
    "image CP2 PP2, audio CP2 PP2, text TP2 CP2": ({"cp": 2, "pp": 2}, {"cp": 2, "pp": 2}, {"tp": 2, "cp": 2}, ""),
}


def write_model(file: Path, image: dict[str, int], audio: dict[str, int], text: dict[str, int]) -> None:
    """Write the example's model.json with these sizes of its modules."""
    model = json.loads((EXAMPLE / "model_audio.json").read_text())
    for block, sizes in (
        (model["image_encoder"]["vision_encoder"], image),
        (model["audio_encoder"]["audio_encoder"], audio),
        (model["text_decoder"], text),
    ):
        stages = sizes.get("pp", 1)
        block.update({"tp": 1, **sizes}, pipeline_num_layers=[block["num_layers"] // stages] * stages)
    file.write_text(json.dumps(model))


def write_data(folder: Path) -> Path:
    """Write data of four pairs of equal samples: two replicas then have items of the same sizes in every microbatch."""
    records = []
    for number in range(4):
        contents = "<image><audio>What is there?" if number != 3 else "<image>What is there?"
        record = {
            "messages": [{"role": "user", "content": contents}, {"role": "assistant", "content": "a box."}],
            "images": [f"picture_{number}.png"],
            "audios": [f"tone_{number}.wav"] if number != 3 else [],
        }
        records += [record, record]
    (folder / "records.json").write_text(json.dumps(records))
    data: dict[str, Any] = json.loads((EXAMPLE / "data_audio.json").read_text())
    basic = {"dataset_dir": str(EXAMPLE / "data"), "dataset": str(folder / "records.json")}
    data["dataset_param"]["basic_parameters"] = basic
    (folder / "data.json").write_text(json.dumps(data))
    return folder / "data.json"


@pytest.mark.parametrize("name", CASES)
def test_two_encoders_with_layouts_of_their_own_beside_real_ranks(name: str, tmp_path: Path) -> None:
    image, audio, text, more = CASES[name]
    write_model(tmp_path / "model.json", image, audio, text)
    files = {"--mm-data": write_data(tmp_path), "--mm-model": tmp_path / "model.json"}
    files["--mm-tool"] = EXAMPLE / "tools.json"
    flags = [*FLAGS.split(), *more.split(), *(str(word) for pair in files.items() for word in pair)]
    script = ROOT / "docs/examples/pretrain_vlm.py"
    result = played(tmp_path, script, flags, 4)
    peaks = real_peaks(tmp_path / "real", script, flags, 4)
    found = {
        (report["run"]["rank"], rank): (report["run"]["peak_bytes"], peaks[rank])
        for report in result["ranks"]
        for rank in report["stands_for"]
    }
    print(name, found)
    assert sorted(rank for _, rank in found) == [0, 1, 2, 3]
    assert all(abs(alone / real - 1) <= 0.01 for alone, real in found.values()), found
