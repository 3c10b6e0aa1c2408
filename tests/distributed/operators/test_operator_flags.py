"""The flags on a Megatron script: search and end, then train with the plan with the losses of one process."""

import json
import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("megatron.training")
from ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.torch, pytest.mark.megatron]

SCRIPT = Path(__file__).parents[3] / "docs" / "examples" / "pretrain_gpt.py"
FLAGS = shlex.split(
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 128 --seq-length 16 "
    "--max-position-embeddings 16 --vocab-size 120 --tokenizer-type NullTokenizer --make-vocab-size-divisible-by 32 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --eval-interval 1000 --eval-iters 0 --log-interval 1 "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm --attention-dropout 0 "
    "--hidden-dropout 0 --transformer-impl local --seed 1 --no-bias-dropout-fusion --ckpt-format torch_dist"
)
BLOCK = """
use_parallel: true
parallel: {parallel_mode: 2, search_mode: recursive_programming, auto_pipeline: false}
parallel_config: {mem_coeff: 0.1}
"""


def losses(output):
    return [float(value) for value in re.findall(r"lm loss: (\S+) \|", output)]


def run(num_ranks, *flags, check=True):
    return run_ranks(num_ranks, SCRIPT, *FLAGS, *flags, timeout_s=300, check=check)


PINS = ";".join(f"layers.*.{part}:rows=2,columns=2" for part in ("q", "k", "v", "up"))


@pytest.mark.parametrize(
    ("batch", "options", "layout"),
    [
        ((), ("--operator-pin", PINS), "PP1 TP2 DP2 MBS2"),
        pytest.param(
            ("--micro-batch-size", "1", "--global-batch-size", "1"),
            ("--mem-coeff", "1"),
            "PP1 TP2 DP1 MBS1 CP2",
            marks=pytest.mark.long,
        ),
    ],
)
def test_search_ends_before_training_and_its_plan_trains_with_the_losses_of_one_process(
    tmp_path, batch, options, layout
):
    config = tmp_path / "auto.yaml"
    config.write_text(BLOCK)
    search = ("--operator-search", "--operator-config", str(config), "--operator-devices", "4", *batch, *options)
    (searched,) = run(1, "--train-iters", "1", *search, "--operator-output-dir", str(tmp_path))
    assert f"Megatron: {layout}, global" in searched.stdout and losses(searched.stdout) == []
    plan = json.loads((tmp_path / "operator_plan.json").read_text())
    assert plan["model"]["vocabulary"] == 120 and plan["megatron"]["tensor_model_parallel_size"] == 2
    assert "layers.0.q" in (tmp_path / "operator_plan.html").read_text()

    # Fresh weights differ between layouts: both start from one checkpoint.
    saved = ("--save", str(tmp_path / "start"), "--save-interval", "1")
    run(1, "--train-iters", "1", *saved)
    start = ("--load", str(tmp_path / "start"), "--finetune", "--no-load-optim", "--no-load-rng", "--train-iters", "3")
    (alone,) = run(1, *start, *batch)
    ranks = run(4, *start, "--operator-plan", str(tmp_path / "operator_plan.json"))
    printed = "".join(rank.stdout for rank in ranks)
    assert "training with the operator plan" in printed and "--tensor-model-parallel-size 2" in printed
    found, expected = losses(printed), losses(alone.stdout)
    assert len(expected) == 3 and found == pytest.approx(expected, rel=1e-6)


def test_plan_of_another_model_is_refused_before_training(tmp_path):
    run(1, "--train-iters", "1", "--operator-search", "--operator-output-dir", str(tmp_path))
    plan = ("--operator-plan", str(tmp_path / "operator_plan.json"))
    (output,) = run(1, "--train-iters", "1", *plan, "--num-layers", "2", check=False)
    assert output.returncode == 2
    assert "made for another model: num_layers 4 there and 2 here" in output.stderr
