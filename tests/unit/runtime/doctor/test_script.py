"""A launch script is read without running it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.doctor.script import parse_script, read_script

SCRIPT = r"""#!/bin/bash
export TASK_QUEUE_ENABLE=2
export PYTORCH_NPU_ALLOC_CONF="expandable_segments:True"
NPUS_PER_NODE=8
MASTER_PORT=6010 # free
NNODES=2
export NNODES
WORLD_SIZE=$(($NPUS_PER_NODE*$NNODES))
TP=4
PP=2
DP=$(($WORLD_SIZE/$TP/$PP))
# TP=16
GPT_ARGS="
    --tensor-model-parallel-size ${TP} \
    --pipeline-model-parallel-size ${PP} \
    --sequence-parallel \
    --clip-grad -1.0 \
    --global-batch-size $(($DP*32)) \
"
python -u pretrain_vlm.py \
    $GPT_ARGS --auto-parallel-mm \
    --nproc-per-node $NPUS_PER_NODE --save=out \
    | tee logs/train.log 2>&1
chmod 440 logs/train.log
"""


def test_variables_are_followed_into_flags() -> None:
    script = parse_script(SCRIPT)
    assert script.exports == {
        "TASK_QUEUE_ENABLE": "2",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
        "NNODES": "2",
    }
    assert script.variables["DP"] == "2"
    assert script.variables["MASTER_PORT"] == "6010"
    assert script.flags["--tensor-model-parallel-size"] == "4"
    assert script.flags["--sequence-parallel"] == ""
    assert script.flags["--clip-grad"] == "-1.0"
    assert script.flags["--global-batch-size"] == "64"
    assert script.flags["--save"] == "out"
    assert script.number("--nproc-per-node") == 8
    assert script.launcher == "python"


def test_what_cannot_be_read_without_running_is_none() -> None:
    script = parse_script("python t.py --nnodes $(hostname | wc -l)")
    assert script.number("--nnodes") is None
    assert script.number("--master-port", 3) == 3


def test_both_spellings_of_a_flag_count() -> None:
    script = parse_script("torchrun --nproc_per_node 4 t.py")
    assert script.number("--nproc-per-node") == 4
    assert script.launcher == "torchrun"


def test_a_missing_script_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.sh"):
        read_script(tmp_path / "none.sh")
