"""Launch scripts of drawn plans: what bash hands to torchrun is accepted by Megatron's own parser and checks."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from forked_python import forked_python
from launch_scripts import MEGATRON_CASES, drawn_launches

pytest.importorskip("megatron.training")
pytestmark = [pytest.mark.torch, pytest.mark.megatron]

_PARSE = """
import json, os, sys
import mindspeed_autoparallel
from megatron.training.arguments import parse_args, validate_args

failed = {}
for name, (words, devices) in json.loads(sys.argv[1]).items():
    sys.argv = ["pretrain_gpt.py", *words]
    os.environ.update(WORLD_SIZE=str(devices), RANK="0")
    try:
        validate_args(parse_args(), {"tokenizer_type": "NullTokenizer"})
    except (Exception, SystemExit) as error:
        failed[name] = repr(error)
print("FAILED", json.dumps(failed))
"""


def test_megatron_accepts_the_flags_of_drawn_plans(tmp_path: Path) -> None:
    drawn = {name: (words, devices) for name, words, devices in drawn_launches(tmp_path, "H100", MEGATRON_CASES)}
    environment = {**os.environ, "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu"}
    parsed = subprocess.run(
        [forked_python(), "-c", _PARSE, json.dumps(drawn)], env=environment, capture_output=True, text=True
    )
    assert parsed.returncode == 0, parsed.stderr[-3000:]
    failed = json.loads(parsed.stdout.splitlines()[-1].removeprefix("FAILED "))
    assert list(failed) == ["illegal"], failed
