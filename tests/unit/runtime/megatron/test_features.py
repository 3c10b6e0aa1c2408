"""Flags that are different jobs are refused together, before any of them starts."""

import argparse
import json
import os
import subprocess
import sys

import pytest

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.megatron import features


@pytest.mark.parametrize("other", ["auto_parallel_plan", "auto_tuning"])
def test_searching_and_training_by_a_plan_are_two_runs(monkeypatch, other):
    started = []
    monkeypatch.setattr(features, "_load", started.append)
    with pytest.raises(ConfigError, match=r"--auto-parallel-mm and --auto-.* were given together"):
        features.after_parsing(argparse.Namespace(auto_parallel_mm=True, **{other: "plan.json"}))
    assert started == []


ALWAYS = {"parse_args", "set_global_variables"}
ARMED = """
import json, sys
flags = json.loads(sys.argv[1])
sys.argv = ["script.py"]
import mindspeed_autoparallel
from mindspeed_autoparallel.patching import ENGINE
ENGINE.enable(flags)
print(json.dumps([entry.patch.attribute for entry in ENGINE.patches if ENGINE.is_wanted(entry)]))
"""


def armed(words, **environment):
    command = [sys.executable, "-c", ARMED, json.dumps(words)]
    kept = {name: value for name, value in os.environ.items() if name != features.TASK_VARIABLE}
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**kept, **environment}, check=True)
    return set(json.loads(run.stdout))


def test_a_training_by_a_plan_is_watched_and_nothing_measures_it():
    assert armed(["--auto-parallel-plan"]) == {*ALWAYS, "train_step"}


def test_a_measuring_process_takes_over_whatever_flags_its_script_was_given():
    taken_over = {"train", "setup_model_and_optimizer", "initialize_model_parallel"}
    assert taken_over <= armed([], **{features.TASK_VARIABLE: "task.json"})
    assert armed(["--lr"]) == ALWAYS
