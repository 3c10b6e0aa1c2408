"""A search trains a few iterations of any script: Megatron's own checks accept every schedule that it is given."""

import itertools
import json
import os
import subprocess

import pytest
from forked_python import forked_python

pytest.importorskip("megatron.training")
pytestmark = [pytest.mark.torch, pytest.mark.megatron]

SAMPLES = ["--train-samples", "4096", "--lr-decay-samples", "4000"]
ITERATIONS = ["--train-iters", "512", "--lr-decay-iters", "500"]
SCHEDULES = [
    [*SAMPLES, "--lr-warmup-samples", "400"],
    [*SAMPLES, "--lr-warmup-samples", "400", "--rampup-batch-size", "2", "2", "64"],
    [*ITERATIONS, "--lr-warmup-iters", "50"],
    *([*length, "--lr-warmup-fraction", "0.1"] for length in (SAMPLES, ITERATIONS)),
]
STYLES = [["--lr-decay-style", "cosine"], ["--lr-decay-style", "linear"], ["--lr-decay-style", "WSD"]]
TAILS = {"--train-samples": ["--lr-wsd-decay-samples", "100"], "--train-iters": ["--lr-wsd-decay-iters", "100"]}

SCRIPT = """
import json, sys
import mindspeed_autoparallel
from megatron.training import training
from megatron.training.arguments import parse_args, validate_args
from megatron.training.global_vars import set_args
from mindspeed_autoparallel.runtime.megatron.short_training import train_for

class Optimizer:
    param_groups = []

failed = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["script.py", *words]
    arguments = parse_args()
    train_for(arguments, 50)
    try:
        validate_args(arguments, {"tokenizer_type": "NullTokenizer"})
        set_args(arguments)
        training.get_optimizer_param_scheduler(Optimizer())
        assert arguments.train_iters == 50 and arguments.global_batch_size == 8
    except (AssertionError, ValueError) as error:
        failed.append((words, repr(error)))
print("FAILED", json.dumps(failed))
"""
MODEL = [
    "--num-layers",
    "2",
    "--hidden-size",
    "64",
    "--num-attention-heads",
    "4",
    "--seq-length",
    "32",
    "--max-position-embeddings",
    "32",
    "--lr",
    "1e-3",
    "--micro-batch-size",
    "1",
    "--global-batch-size",
    "8",
    "--transformer-impl",
    "local",
    "--no-gradient-accumulation-fusion",
]


def test_every_schedule_of_a_script_is_shortened():
    drawn = [
        MODEL + schedule + style + (TAILS[schedule[0]] if style[1] == "WSD" else [])
        for schedule, style in itertools.product(SCHEDULES, STYLES)
    ]
    environment = {**os.environ, "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu", "WORLD_SIZE": "1", "RANK": "0"}
    done = subprocess.run(
        [forked_python(), "-c", SCRIPT, json.dumps(drawn)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "FAILED []"
