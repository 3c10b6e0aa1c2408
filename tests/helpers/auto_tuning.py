"""Starts ``--auto-tuning`` on the example training as a user would: plain python, tiny models, gloo."""

import json
import os
import subprocess
from pathlib import Path

from forked_python import forked_python

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs/examples/pretrain_gpt.py"
GPT = [
    "--use-mcore-models",
    "--num-layers",
    "2",
    "--hidden-size",
    "32",
    "--ffn-hidden-size",
    "64",
    "--num-attention-heads",
    "2",
    "--seq-length",
    "64",
    "--max-position-embeddings",
    "64",
    "--micro-batch-size",
    "1",
    "--global-batch-size",
    "2",
    "--tokenizer-type",
    "NullTokenizer",
    "--vocab-size",
    "128",
    "--make-vocab-size-divisible-by",
    "8",
    "--lr",
    "1e-3",
    "--train-iters",
    "4",
    "--eval-interval",
    "1000",
    "--eval-iters",
    "0",
    "--log-interval",
    "1",
    "--transformer-impl",
    "local",
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-persist-layer-norm",
    "--no-rope-fusion",
    "--num-workers",
    "0",
    "--normalization",
    "RMSNorm",
    "--swiglu",
    "--disable-bias-linear",
    "--untie-embeddings-and-output-weights",
    "--position-embedding-type",
    "rope",
    "--bf16",
    "--use-distributed-optimizer",
    "--auto-tuning",
    "--auto-tuning-ranks",
    "2",
    "--nproc-per-node",
    "2",
    "--auto-tuning-launch-timeout-s",
    "900",
]
DEEP_GPT = [*GPT, "--num-layers", "4"]
"""Of as many layers as an interleaved pipeline needs."""
MOE = [
    *GPT,
    *[
        "--num-experts",
        "2",
        "--moe-router-topk",
        "1",
        "--moe-router-pre-softmax",
        "--moe-token-dispatcher-type",
        "alltoall",
    ],
]
SECRET_TOKEN = ("--hub-token", "hunter3")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu", "SECRET_TOKEN": "hunter2"}


def start(work, *words, script=SCRIPT, model=GPT):
    """The process; words come last, so that of a flag given twice they count."""
    command = [forked_python(), str(script), *model, "--auto-tuning-work-dir", str(work), *map(str, words)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(process, timeout=1100):
    """Exit code and output."""
    try:
        text, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, text


def tune(work, *words, **options):
    """Exit code and output of a whole run."""
    return finish(start(work, *words, **options))


def result_of(work):
    """The JSON that a run left."""
    return json.loads((work / "auto_tuning_result.json").read_text())


def points_of(folder):
    """File name to content of all traces or measurements of a work dir."""
    return {path.name: json.loads(path.read_text()) for path in folder.glob("*/TP*.json")}
