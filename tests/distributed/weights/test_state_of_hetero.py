"""A hetero training goes on under other layouts of its modules, optimizer state included."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from megatron_releases import marks_of_trainings
from ranks import run_ranks

pytestmark = [*marks_of_trainings(), pytest.mark.long]
ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tests" / "helpers" / "elastic_script.py"
EXAMPLE = ROOT / "docs" / "examples" / "qwen2vl_tiny"
TRAINING = f"""--mm-data {EXAMPLE / "data.json"} --micro-batch-size 1 --global-batch-size 8 --num-layers 4 --hidden-size 64
    --num-attention-heads 4 --vocab-size 512 --tokenizer-type NullTokenizer --seq-length 128
    --max-position-embeddings 1024 --make-vocab-size-divisible-by 8 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine
    --lr-warmup-iters 2 --clip-grad 1.0 --seed 42 --variable-seq-lengths --no-gradient-accumulation-fusion
    --log-interval 1 --eval-interval 1000 --eval-iters 0 --distributed-backend nccl --hidden-dropout 0
    --attention-dropout 0"""
ONE: dict[str, Any] = {"image": {"tp": 1}, "text": {"tp": 2, "pp": 2, "pipeline_num_layers": [1, 3]}}
OTHER: dict[str, Any] = {
    "image": {"tp": 2, "pp": 2, "pipeline_num_layers": [2, 2]},
    "text": {"tp": 1, "pp": 2, "pipeline_num_layers": [2, 2]},
}
SAVED, UNTIL = 3, 13


def train(folder: Path, layout: dict[str, Any], *words: str, until: int = UNTIL) -> dict[int, float]:
    """Run four ranks to iteration ``until`` under the modules' ``layout``; the loss of every iteration."""
    model = json.loads((EXAMPLE / "model_hetero.json").read_text())
    model["image_encoder"]["vision_encoder"].update(layout["image"])
    model["text_decoder"].update(layout["text"])
    file = folder / "model.json"
    file.write_text(json.dumps(model))
    given = f"{TRAINING} --hetero-parallel --mm-model {file} {' '.join(words)}"
    given += f" --train-iters {until} --lr-decay-iters {UNTIL}"
    ranks = run_ranks(4, SCRIPT, *given.split(), environment={"EXAMPLE": "pretrain_vlm.py"}, timeout_s=500, cwd=ROOT)
    text = "\n".join(rank.stdout for rank in ranks)
    return {int(step): float(loss) for step, loss in re.findall(r"^STEP (\d+) (\S+) \d+$", text, re.MULTILINE)}


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        pytest.param(ONE, OTHER, "", id="plain"),
        pytest.param(OTHER, ONE, "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable", id="distributed"),
    ],
)
def test_the_state_of_all_modules_moves_to_other_layouts(
    before: dict[str, Any], after: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    import torch
    from dist_tensors import stored_tensors

    first, again = tmp_path / "first", tmp_path / "again"
    uninterrupted = train(tmp_path, before, kind, f"--save {first} --save-interval {SAVED}")
    step = f"--load {first} --ckpt-step {SAVED}"
    # Nothing is left to train: the state is loaded under the other layout and saved from there.
    saving = f"--save {again} --save-interval {SAVED + 1} --override-opt-param-scheduler"
    assert train(tmp_path, after, kind, step, saving, until=SAVED) == {}
    expected, found = (stored_tensors(folder / f"iter_{SAVED:07d}") for folder in (first, again))
    assert sum("exp_avg" in name and "image_encoder" in name for name in expected) > 10
    assert sorted(found) == sorted(expected)
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []
    resumed = train(tmp_path, after, kind, step)
    assert sorted(resumed) == list(range(SAVED + 1, UNTIL + 1))
    for number, loss in resumed.items():
        assert loss == pytest.approx(uninterrupted[number], rel=1e-6), number
