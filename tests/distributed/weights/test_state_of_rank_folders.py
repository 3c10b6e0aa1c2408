"""Rank folders with optimizer state become torch_dist without Megatron, to the bit what its own conversion writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from dist_tensors import stored_tensors
from elastic_job import MODEL
from megatron_releases import marks_of_trainings
from ranks import run_ranks

pytestmark = marks_of_trainings()
SCRIPT = Path(__file__).parents[2] / "helpers" / "elastic_script.py"
LLAMA = """--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --group-query-attention
    --num-query-groups 2 --norm-epsilon 1e-6 --no-rope-fusion --no-bias-swiglu-fusion"""
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
}
EXPERTS = """--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none --moe-ffn-hidden-size 256
    --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"""
MIXTRAL = {**CONFIG, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
SHARD, PIPELINE = "--use-distributed-optimizer", "--pipeline-model-parallel-size 2"
CHUNKS = f"{PIPELINE} --num-virtual-stages-per-pipeline-rank 2"
TENSOR = "--tensor-model-parallel-size 2"
SAVED, UNTIL = 3, 13


def train(folder: Path, *words: str, until: int = UNTIL) -> dict[int, float]:
    """Run two ranks to iteration ``until``; the loss of every iteration."""
    model = MODEL.replace("--ckpt-format torch_dist", "")
    given = f"{model} {LLAMA} --global-batch-size 8 {' '.join(words)} --train-iters {until} --lr-decay-iters {UNTIL}"
    ranks = run_ranks(2, SCRIPT, *given.split(), timeout_s=500, cwd=folder)
    text = "\n".join(rank.stdout for rank in ranks)
    return {int(step): float(loss) for step, loss in re.findall(r"^STEP (\d+) (\S+) \d+$", text, re.MULTILINE)}


@pytest.mark.parametrize(
    ("old", "new", "config"),
    [
        pytest.param(f"{SHARD} {CHUNKS}", f"{SHARD} {TENSOR}", CONFIG, id="distributed PP2 VPP2 to TP2"),
        pytest.param(TENSOR, PIPELINE, CONFIG, id="plain TP2 to PP2", marks=pytest.mark.long),
        pytest.param(f"{SHARD} --bf16", None, CONFIG, id="distributed bf16 DP2", marks=pytest.mark.long),
        pytest.param(f"--bf16 {PIPELINE}", None, CONFIG, id="plain bf16 PP2", marks=pytest.mark.long),
        pytest.param(
            f"{SHARD} {EXPERTS}",
            f"{SHARD} {EXPERTS} {TENSOR} --expert-tensor-parallel-size 1 --sequence-parallel",
            MIXTRAL,
            id="distributed EP2 to TP2 EP2",
            marks=pytest.mark.long,
        ),
    ],
)
def test_state_of_rank_folders_goes_to_another_layout(
    old: str, new: str | None, config: dict[str, Any], tmp_path: Path
) -> None:
    import torch

    from mindspeed_autoparallel.cli.main import main

    uninterrupted = train(tmp_path, old, f"--save {tmp_path / 'ranks'} --save-interval {SAVED} --ckpt-format torch")
    (tmp_path / "ranks" / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    ours = tmp_path / "ours"
    words = ["convert", "resplit", tmp_path / "ranks", ours, "--hf-dir", tmp_path / "hf", "--format", "torch_dist"]
    assert main([*map(str, words), "--transformer-impl", "local"]) == 0

    whole = "--dist-ckpt-optim-fully-reshardable" if SHARD in old else ""
    converting = f"--load {tmp_path / 'ranks'} --ckpt-format torch --ckpt-convert-format torch_dist"
    assert train(tmp_path, old, f"{converting} --ckpt-convert-save {tmp_path / 'whole'} {whole}") == {}
    step = f"iter_{SAVED:07d}"
    found, expected = stored_tensors(ours / step), stored_tensors(tmp_path / "whole" / "torch_dist" / step)
    assert sum("exp_avg" in name for name in expected) > 10
    assert sorted(found) == sorted(expected)
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []
    if new is None:
        return
    resumed = train(tmp_path, new, f"--load {ours} --ckpt-format torch_dist {whole}")
    assert sorted(resumed) == list(range(SAVED + 1, UNTIL + 1))
    for number, loss in resumed.items():
        assert loss == pytest.approx(uninterrupted[number], rel=1e-6), number
