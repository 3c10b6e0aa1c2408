"""Every failure seen inside MindSpeed-MM, on a small hand-written host of the same structure (`small/`)."""

import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest
from forked_python import forked_python

from mindspeed_autoparallel.runtime.launch.outcome import LaunchSpec, LaunchStatus
from mindspeed_autoparallel.runtime.launch.processes import LocalRanks, run_local_processes

# Asked without importing it here: this process must not have Megatron before the plugin.
HAS_TRAINING = importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.training")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.megatron,
    pytest.mark.skipif(not HAS_TRAINING, reason="no megatron.training: install megatron-core 0.17 or newer"),
]

SMALL = Path(__file__).parent / "small"
MODEL = ["--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "1"]


def environment(**more):
    path = os.pathsep.join([str(SMALL), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu", **more}


def run(*words, **more):
    command = [forked_python(), "-W", "ignore", str(SMALL / "train.py"), *MODEL, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment(**more))


def test_a_plan_is_applied_once_to_both_parses_and_the_hosts_own_step_is_watched():
    done = run("--auto-parallel-plan", "plan.json")
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["handlers"] == ["apply_plan.entry:prepare", "watched step"]
    assert said["seeds"] == [77, 77]
    assert said["calls"][-2:] == ["train", "train_step"]


def test_a_function_that_a_feature_replaced_after_the_parse_is_named_before_the_first_step():
    replaced = {"SMALL_HOST_REPLACES": "train_step", "SMALL_HOST_REPLACES_BY": "mindspeed"}
    done = run("--auto-parallel-plan", "plan.json", **replaced)
    assert done.returncode == 2
    assert "--auto-parallel-plan wraps mindspeed_mm.training:train_step" in done.stderr
    assert "mindspeed.core.dualpipev.replacing_feature replaces it" in done.stderr
    assert "train_step" not in done.stdout


def test_a_users_own_step_trains_by_a_plan_and_a_line_notes_that_nothing_is_compared():
    done = run("--auto-parallel-plan", "plan.json", SMALL_HOST_REPLACES="train_step")
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["handlers"] == ["apply_plan.entry:prepare"]
    assert done.stderr.count("__main__.replacing_feature replaces mindspeed_mm.training:train_step") == 1


def test_the_hosts_own_hetero_parallel_stays_its_own():
    done = run("--hetero-parallel")
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["handlers"], said["theirs"]) == ([], True)
    assert "--hetero-parallel is this host's own flag and keeps its meaning" in done.stderr


def test_our_hetero_flag_leaves_the_hosts_own_off():
    done = run("--auto-parallel-hetero")
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["handlers"], said["theirs"]) == (["hetero_parallel.entry:prepare"], False)


@pytest.mark.usefixtures("forked_starts")
def test_a_measuring_process_gets_the_users_environment_and_no_switch_of_ours(tmp_path):
    """The child needs the variables that the user's script reads; `mindspeed.core.auto_parallel` breaks it."""
    words = ["--auto-parallel-mm", "--simulated-nnodes", "1"]
    spec = LaunchSpec(launch_id="small", argv=(str(SMALL / "train.py"), *MODEL, *words), task={"kind": "measure"})
    parent = environment(A_VARIABLE_OF_THE_SCRIPT="here")
    outcome = run_local_processes(spec, LocalRanks(), log_dir=tmp_path, parent_environment=parent)
    assert outcome.status is LaunchStatus.OK, outcome.describe()
    text = next(tmp_path.glob("*.log")).read_text()
    said = json.loads(next(line for line in text.splitlines() if line.startswith("{")))
    assert said["handlers"][0] == "measure.worker:prepare"
    assert said["argv"] == [*MODEL, "--simulated-nnodes", "1"]
    assert (said["search"], said["variable"]) == (False, "here")


@pytest.mark.usefixtures("forked_starts")
def test_tied_embeddings_of_a_language_model_behind_a_stage_of_images_alone_are_one(tmp_path):
    """MindSpeed-MM: a first rank in the embeddings' group that never calls its collective hangs the job."""
    spec = LaunchSpec(launch_id="tied", argv=(str(SMALL / "tied_embeddings.py"),), timeout_s=200)
    parent = environment(SMALL_HOST_LAYERS="0,2,1", OMP_NUM_THREADS="1")
    outcome = run_local_processes(spec, LocalRanks(num_processes=3), log_dir=tmp_path, parent_environment=parent)
    assert outcome.status is LaunchStatus.OK, outcome.describe()
    texts = [log.read_text() for log in sorted(tmp_path.glob("*.log"))]
    assert [line for text in texts for line in text.splitlines() if line.startswith("rank ")] == [
        "rank 1: 64",
        "rank 2: 64",
    ]


def test_the_fsdp2_trainer_of_mindspeed_llm_refuses_a_flag_that_it_would_leave_out(tmp_path):
    """Its parser drops words that it does not know: a training began as if the flag were not there."""
    package = tmp_path / "mindspeed_llm" / "fsdp2" / "utils"
    package.mkdir(parents=True)
    (package / "arguments.py").write_text("def fsdp2_parse_args(rootclass):\n    return rootclass()\n")
    lines = (
        "import mindspeed_autoparallel",
        "from mindspeed_llm.fsdp2.utils.arguments import fsdp2_parse_args as parse",
    )
    (tmp_path / "train_fsdp2.py").write_text("\n".join([*lines, "print(parse(dict), 'trains')"]))
    command = [forked_python(), str(tmp_path / "train_fsdp2.py"), "a.yaml", "--parallel.fsdp_size", "2"]
    plain = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment())
    assert plain.stdout == "{} trains\n", plain.stderr[-2000:]
    done = subprocess.run([*command, "--auto-tuning"], capture_output=True, text=True, timeout=100, env=environment())
    assert (done.returncode, done.stdout) == (2, "")
    assert "ConfigError: --auto-tuning works through Megatron" in done.stderr and "Traceback" not in done.stderr
