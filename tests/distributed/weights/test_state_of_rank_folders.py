"""Rank folders with optimizer state become torch_dist without Megatron, to the bit what its own conversion writes."""

from __future__ import annotations

import itertools
import json
import random
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
LAYOUTS = {
    f"{SHARD} {TENSOR}": ["--tp-size", "2"],
    PIPELINE: ["--llm-pp-layers", "4,4"],
    f"{SHARD} {EXPERTS} {TENSOR} --expert-tensor-parallel-size 1 --sequence-parallel": (
        ["--tp-size", "2", "--ep-size", "2", "--etp-size", "1"]
    ),
}
"""Flags of a training -> those of ``convert`` for its layout."""
SAVED, UNTIL = 2, 5


def train(folder: Path, *words: str, until: int = UNTIL, tied: bool = False) -> dict[int, float]:
    """Run two ranks to iteration ``until``; the loss of every iteration."""
    model = MODEL.replace("--ckpt-format torch_dist", "")
    if tied:
        model = model.replace("--untie-embeddings-and-output-weights", "")
    given = f"{model} {LLAMA} --global-batch-size 4 {' '.join(words)} --train-iters {until} --lr-decay-iters {UNTIL}"
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
    recut = tmp_path / "recut"
    words = ["convert", "resplit", tmp_path / "ranks", recut, "--hf-dir", tmp_path / "hf", *LAYOUTS[new]]
    assert main([*map(str, words), "--make-vocab-size-divisible-by", "8"]) == 0
    back = ["convert", "resplit", recut, tmp_path / "back", "--hf-dir", tmp_path / "hf", "--format", "torch_dist"]
    assert main([*map(str, back), "--transformer-impl", "local"]) == 0
    again = stored_tensors(tmp_path / "back" / step)
    assert sorted(again) == sorted(expected)
    assert [name for name, tensor in expected.items() if not torch.equal(again[name], tensor)] == []
    resumed = train(tmp_path, new, f"--load {recut} --ckpt-format torch --no-load-rng")
    assert sorted(resumed) == list(range(SAVED + 1, UNTIL + 1))
    assert resumed == {number: pytest.approx(uninterrupted[number], rel=1e-6) for number in resumed}
    resumed = train(tmp_path, new, f"--load {ours} --ckpt-format torch_dist {whole}")
    assert sorted(resumed) == list(range(SAVED + 1, UNTIL + 1))
    for number, loss in resumed.items():
        assert loss == pytest.approx(uninterrupted[number], rel=1e-6), number


DRAWN = {
    "": [],
    TENSOR: ["--tp-size", "2"],
    PIPELINE: ["--llm-pp-layers", "4,4"],
    f"{PIPELINE} --decoder-first-pipeline-num-layers 3": ["--llm-pp-layers", "3,5"],
    CHUNKS: ["--llm-pp-layers", "[[2,2],[2,2]]"],
}
ODD = "--hidden-size 40 --ffn-hidden-size 100"
"""No multiple of 64 values in most parameters: gaps in buffers, and buckets decide places."""


MISPLACED = {f"optimizer.state.{kind}.embedding.word_embeddings.weight" for kind in ("param", "exp_avg", "exp_avg_sq")}
"""What Megatron 0.19.2 itself reads 64 values too far on, where two stages share an embedding and parameters leave gaps:
what it converts is not the weight that lies beside it."""


def drawn(count: int, seed: int) -> list[tuple[bool, bool, bool, bool, str, str]]:
    """Return distributed optimizer, bf16, tied, odd sizes, and two layouts, by turns."""
    generator = random.Random(seed)
    kinds = list(itertools.product((True, False), repeat=4))
    generator.shuffle(kinds)
    return [(*kinds[number % len(kinds)], *generator.sample(list(DRAWN), 2)) for number in range(count)]


@pytest.mark.parametrize(("count", "seed"), [(2, 0), pytest.param(24, 1, marks=pytest.mark.long)])
def test_megatron_loads_the_state_of_other_rank_folders(count: int, seed: int, tmp_path: Path) -> None:
    """Both ways end in torch_dist: Megatron from the old layout, and Megatron from our files of the new one."""
    import torch

    from mindspeed_autoparallel.cli.main import main

    for number, (distributed, bf16, tied, odd, old, new) in enumerate(drawn(count, seed)):
        folder = tmp_path / str(number)
        (folder / "hf").mkdir(parents=True)
        sizes = {"hidden_size": 40, "intermediate_size": 100} if odd else {}
        (folder / "hf" / "config.json").write_text(json.dumps({**CONFIG, **sizes, "tie_word_embeddings": tied}))
        kind = " ".join([SHARD] * distributed + ["--bf16"] * bf16 + [ODD] * odd)
        saved = f"--save {folder / 'ranks'} --save-interval {SAVED} --ckpt-format torch"
        train(folder, kind, old, saved, until=SAVED, tied=tied)
        words = ["convert", "resplit", folder / "ranks", folder / "recut", "--hf-dir", folder / "hf", *DRAWN[new]]
        assert main([*map(str, words), "--make-vocab-size-divisible-by", "8"]) == 0
        whole = []
        for name, layout in (("ranks", old), ("recut", new)):
            target = folder / f"{name}-whole"
            converting = f"--load {folder / name} --ckpt-format torch --ckpt-convert-format torch_dist --no-load-rng"
            given = f"{converting} --ckpt-convert-save {target} {'--dist-ckpt-optim-fully-reshardable' * distributed}"
            assert train(folder, kind, layout, given, until=SAVED, tied=tied) == {}
            whole.append(stored_tensors(target / "torch_dist" / f"iter_{SAVED:07d}"))
        case = (kind, tied, old, new)
        assert sum("exp_avg" in name for name in whole[0]) > 10 and sorted(whole[0]) == sorted(whole[1]), case
        different = {name for name, tensor in whole[0].items() if not torch.equal(whole[1][name], tensor)}
        assert different <= (MISPLACED if tied and odd and PIPELINE in old + new else set()), case
