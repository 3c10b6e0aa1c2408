"""Flags of drawn plans, twenty models on every accelerator, before the parsers and checks of Megatron's releases."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from flag_sets import MODELS, drawn_flag_sets, drawn_plan
from forked_python import forked_python
from launch_scripts import FURTHER

from mindspeed_autoparallel.cli._launch import MEGATRON, NEWEST, launch_flags, release_of
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.spec import Plan

pytest.importorskip("megatron.training")
pytestmark = [pytest.mark.torch, pytest.mark.megatron]

_PARSE = """
import contextlib, io, json, logging, os, re, sys, warnings
import mindspeed_autoparallel
from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args

logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")
failed = {}
for name, (words, devices) in json.loads(sys.stdin.read()).items():
    sys.argv = ["pretrain_gpt.py", *words]
    os.environ.update(WORLD_SIZE=str(devices), RANK="0")
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            found = parse_args()
            found = validate_args(found, {"tokenizer_type": "NullTokenizer"}) or found
            core_transformer_config_from_args(found)
    except (Exception, SystemExit) as error:
        # Kernels of an accelerator are not installed where the flags are checked.
        missing = re.search("install|not available|Transformer.Engine|apex|NoneType' and 'Version", str(error), re.I)
        if not missing or "disabled" in str(error):
            failed[name] = repr(error) + printed.getvalue()[-300:] * isinstance(error, SystemExit)
print("FAILED", json.dumps(failed))
"""


def _refused(seed: int, release: tuple[int, int], sources: str, every: int = 1) -> dict[str, str]:
    """Return which flag sets the release in folder ``sources`` (nothing: the installed one) refuses, and why."""
    sets = [one for one in drawn_flag_sets(seed, release=release, every=every) if one.host == MEGATRON]
    cases = {one.name: ([*one.words, *FURTHER], one.num_devices) for one in sets}
    words, devices = next(iter(cases.values()))
    cases["illegal"] = [*words, "--tensor-model-parallel-size", "3"], devices
    path = [folder for folder in (sources, os.environ.get("PYTHONPATH", "")) if folder]
    environment = {
        **os.environ,
        "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONPATH": os.pathsep.join(path),
    }
    python = sys.executable if sources else forked_python()
    parsed = subprocess.run(
        [python, "-c", _PARSE], input=json.dumps(cases), env=environment, capture_output=True, text=True
    )
    assert parsed.returncode == 0, parsed.stderr[-3000:]
    failed: dict[str, str] = json.loads(parsed.stdout.splitlines()[-1].removeprefix("FAILED "))
    assert failed.pop("illegal", ""), "the parser accepts anything"
    return failed


def test_megatron_accepts_the_flags_of_drawn_plans_of_many_models_and_devices() -> None:
    assert _refused(1, NEWEST, "", every=11) == {}


def test_tensor_parallelism_above_the_key_value_groups_is_left_to_hosts_that_take_it() -> None:
    def plans(device: str) -> list[Plan]:
        drawn = (drawn_plan(MODELS["prime 13 layers"], device, random.Random(seed)) for seed in range(12))
        return [plan for plan in drawn if plan is not None]

    assert max(plan.layout.tensor_size for plan in plans("910B")) <= 4
    wide = next(plan for plan in plans("H100") if plan.layout.tensor_size == 8)
    assert launch_flags(wide, MEGATRON)
    with pytest.raises(
        ConfigError, match=r"TP 8 beside 4 key/value groups needs Megatron-LM 0.16 or newer, got .*0.12"
    ):
        launch_flags(wide, MEGATRON, release=(0, 12))


@pytest.mark.long
def test_every_release_accepts_the_flags_of_twenty_models_on_thirteen_devices() -> None:
    """``MEGATRON_LM_SOURCES``: checkouts of Megatron-LM, separated by colons, beside the installed release."""
    assert _refused(1, NEWEST, "") == {}
    for sources in filter(None, os.environ.get("MEGATRON_LM_SOURCES", "").split(os.pathsep)):
        text = (Path(sources) / "megatron" / "core" / "package_info.py").read_text()
        numbers = dict(line.split(" = ") for line in text.splitlines() if line.startswith(("MAJOR", "MINOR")))
        release = release_of(f"{numbers['MAJOR']}.{numbers['MINOR']}")
        assert _refused(1, release, sources) == {}, sources
