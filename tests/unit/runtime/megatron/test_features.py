"""Flags that are different jobs are refused together, before any of them starts."""

import argparse
import json
import os
import subprocess

import pytest
from forked_python import forked_python

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime import state
from mindspeed_autoparallel.runtime.flags.switches import SWITCHES
from mindspeed_autoparallel.runtime.megatron import features


@pytest.fixture(autouse=True)
def first_parse(monkeypatch):
    monkeypatch.setitem(state._INSTANCES, features.Parses, features.Parses())


@pytest.mark.parametrize("other", ["auto_parallel_plan", "auto_tuning"])
def test_searching_and_training_by_a_plan_are_two_runs(monkeypatch, other):
    started = []
    monkeypatch.setattr(features, "_load", started.append)
    with pytest.raises(ConfigError, match=r"--auto-parallel-mm and --auto-.* were given together"):
        features.after_parsing(argparse.Namespace(auto_parallel_mm=True, **{other: "plan.json"}))
    assert started == []


ALWAYS = {"parse_args", "set_global_variables", "import_plugin", "fsdp2_parse_args"}
ARMED = """
import json, sys
flags = json.loads(sys.argv[1])
sys.argv = ["script.py"]
import mindspeed_autoparallel
from mindspeed_autoparallel.patching import ENGINE
ENGINE.enable(flags)
print(json.dumps([entry.patch.attribute for entry in ENGINE.patches if ENGINE.is_wanted(entry)]))
"""


def installed(words, **environment):
    command = [forked_python(), "-c", ARMED, json.dumps(words)]
    kept = {name: value for name, value in os.environ.items() if name != features.TASK_VARIABLE}
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**kept, **environment}, check=True)
    return set(json.loads(run.stdout))


@pytest.mark.slow
def test_a_training_by_a_plan_is_watched_and_nothing_measures_it():
    tied = {"initialize_model_parallel", "LanguageModule.setup_embeddings_and_output_layer"}
    stated = {"ChainedOptimizer.load_state_dict"}
    assert installed(["--auto-parallel-plan"]) == {*ALWAYS, "train", "train_step", *tied, *stated}


@pytest.mark.slow
def test_a_measuring_process_takes_over_whatever_flags_its_script_was_given():
    taken_over = {"train", "setup_model_and_optimizer", "initialize_model_parallel"}
    assert taken_over <= installed([], **{features.TASK_VARIABLE: "task.json"})
    assert installed(["--lr"]) == ALWAYS


@pytest.fixture
def started(monkeypatch):
    """Names of the handlers that were called; each sets an argument, as applying a plan does."""
    calls = []

    def load(path):
        def handler(arguments, *task):
            calls.append(path.rpartition(":")[2])
            arguments.tensor_model_parallel_size = 2

        return handler

    monkeypatch.setattr(features, "_load", load)
    monkeypatch.setattr(features, "_enable", lambda *flags: None)
    return calls


def test_a_second_parse_starts_nothing_and_gives_the_same_arguments(started):
    """MindSpeed-MM parses twice: a plan was applied twice, and task processes would be prepared twice."""
    given = {"auto_parallel_plan": "plan.json", "tensor_model_parallel_size": 1, "lr": 0.1}
    first, second = argparse.Namespace(**given), argparse.Namespace(**given)
    features.after_parsing(first)
    features.after_parsing(second)
    assert started == ["prepare"]
    assert vars(second) == vars(first)
    assert second.tensor_model_parallel_size == 2


@pytest.mark.parametrize("switch", [one for one in SWITCHES if one.is_job], ids=lambda one: one.flag)
def test_a_launcher_above_a_feature_that_starts_its_own_processes_is_refused(started, monkeypatch, switch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    arguments = argparse.Namespace(**{switch.destination: "given"})
    if not switch.is_own_launcher:
        features.after_parsing(arguments)
        assert len(started) == 1
        return
    with pytest.raises(ConfigError, match=f"{switch.flag} starts its own processes: .* plain python"):
        features.after_parsing(arguments)
    assert started == []


def test_kept_arguments_are_those_of_the_last_parse(started):
    from mindspeed_autoparallel.runtime.hetero.job import current_job

    job = current_job()
    before = job.arguments
    second = argparse.Namespace(hetero_parallel=True)
    try:
        features.after_parsing(argparse.Namespace(hetero_parallel=True))
        features.after_parsing(second)
        assert job.arguments is second
    finally:
        job.arguments = before


@pytest.mark.parametrize(
    ("given", "of_host", "expected"),
    [
        ({"hetero_parallel": True, "auto_parallel_hetero": False}, (), ["prepare"]),
        ({"hetero_parallel": False, "auto_parallel_hetero": True}, (), ["prepare"]),
        ({"hetero_parallel": True, "auto_parallel_hetero": False}, ("--hetero-parallel",), []),
        ({"hetero_parallel": False, "auto_parallel_hetero": True}, ("--hetero-parallel",), ["prepare"]),
    ],
)
def test_a_hosts_own_hetero_parallel_stays_the_hosts(started, given, of_host, expected):
    arguments = argparse.Namespace(**given)
    features.after_parsing(arguments, of_host)
    assert started == expected
    assert arguments.hetero_parallel is given["hetero_parallel"]


@pytest.mark.parametrize("other", ["auto_parallel_hetero", "auto_parallel_mm"])
def test_a_hosts_own_hetero_parallel_does_not_go_with_ours(started, other):
    arguments = argparse.Namespace(**{"hetero_parallel": True, "auto_parallel_hetero": False, other: True})
    with pytest.raises(ConfigError, match="--hetero-parallel is this host's own flag and cannot be combined with"):
        features.after_parsing(arguments, ("--hetero-parallel",))
    assert started == []
