"""The planner with measured times takes an operator plan's configuration as a candidate."""

import json

import pytest
from small_profile import small_profile

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.operators.candidate import with_candidate
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.spec import Cluster, Layout

CLUSTER = Cluster(num_nodes=1, devices_per_node=4)


@pytest.fixture(scope="module")
def profile():
    return small_profile()


def test_slower_candidate_is_compared_with_the_plan_that_stays(profile):
    best = search(profile, CLUSTER, 8)
    slow = Layout(tensor_size=1, pipeline_size=4)
    assert best.layout != slow
    kept, told = with_candidate(best, slow, profile, CLUSTER, 8, SearchOptions())
    assert kept is best and told.startswith("operator candidate PP4 TP1 DP1 MBS1: ") and "% above the plan" in told


def test_faster_candidate_is_taken(profile):
    slow = search(profile, CLUSTER, 8, SearchOptions(layouts=[Layout(tensor_size=1, pipeline_size=4)]))
    best = search(profile, CLUSTER, 8)
    taken, told = with_candidate(slow, best.layout, profile, CLUSTER, 8, SearchOptions())
    assert taken.layout == best.layout and "faster than the search's plan" in told


def test_a_candidate_that_cannot_run_is_refused_with_the_reason(profile):
    best = search(profile, CLUSTER, 8)
    kept, told = with_candidate(best, Layout(tensor_size=8), profile, CLUSTER, 8, SearchOptions())
    assert kept is best and "not possible here" in told and "8 devices" in told


def test_commands_hand_the_candidate_over(profile, tmp_path, capfd):
    profile.write(tmp_path / "profile.json")
    operators = ["operators", "--layers", "1", "--devices", "4", "--batch", "8", "--mem-coeff", "1e6", "--json"]
    assert main(operators) == 0
    printed = json.loads(capfd.readouterr().out)
    printed["megatron"].update(tensor_model_parallel_size=2, data_parallel_size=2, micro_batch_size=1)
    (tmp_path / "operators.json").write_text(json.dumps(printed))
    plan = ["plan", "--profile", str(tmp_path / "profile.json"), "--nnodes", "1", "--nproc-per-node", "4"]
    assert main([*plan, "--global-batch-size", "8", "--candidate", str(tmp_path / "operators.json"), "--json"]) == 0
    output = capfd.readouterr()
    assert "operator candidate PP1 TP2 DP2 MBS1" in output.err and json.loads(output.out)["layout"]
    (tmp_path / "other.json").write_text("{}")
    assert main([*plan, "--global-batch-size", "8", "--candidate", str(tmp_path / "other.json")]) == 2
    error = capfd.readouterr().err
    assert "holds no Megatron configuration" in error
    assert "layouts to search" not in error
    assert main([*plan, "--global-batch-size", "8", "--candidate", "other.json", "--hetero-parallel"]) == 2
    assert "plan it without --hetero-parallel" in capfd.readouterr().err
