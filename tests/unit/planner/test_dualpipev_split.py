"""``split --schedule dualpipev``: the even split in a V, its memory, and what MindSpeed refuses."""

import json
from dataclasses import replace

import pytest
from language_profile import language_profile

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.planner.split.dualpipev import dualpipev_split
from mindspeed_autoparallel.schedule import StepTimes, simulate
from mindspeed_autoparallel.schedule.dualpipev import DUALPIPEV, dualpipev_program
from mindspeed_autoparallel.units import MIB


def profile_of(**changes):
    return language_profile(**{"num_layers": 16, "tensor": (1,), "batches": (1,), **changes})


def split(profile, limit_mib=10**6, size=2, count=8):
    return dualpipev_split(profile, num_stages=size, num_microbatches=count, memory_limit_mib=limit_mib)


def test_both_ends_are_on_the_first_rank_and_time_is_that_of_its_chunks():
    profile = profile_of()
    found = split(profile)
    (cost,) = profile.measurements[0].modules.values()
    pre, layer, post = ((block.forward_us, block.backward_us) for block in (cost.pre, cost.layer, cost.post))
    # By chunk and rank: chain stages 0, 1, 3, 2.
    rows = [[4 * layer[k] + pre[k], 4 * layer[k], 4 * layer[k] + post[k], 4 * layer[k]] for k in range(2)]
    forward, backward = ([round(1000 * value) for value in row] for row in rows)
    times = StepTimes(forward=forward, backward=backward, link=found.problem.link)
    assert found.step_time == simulate(dualpipev_program(2, 8), times, sends=DUALPIPEV).step_time
    assert found.recompute == "none"


def test_memory_is_what_is_in_flight_and_recompute_comes_where_it_must():
    plain = split(profile_of())
    most = max(plain.stage_memory)
    tight = split(profile_of(), limit_mib=most / MIB - 100)
    assert tight.recompute == "selective"
    assert tight.step_time > plain.step_time
    assert max(tight.stage_memory) < most
    with pytest.raises(InfeasiblePlan, match="Layers cannot be moved in this schedule"):
        split(profile_of(), limit_mib=100)


def test_sizes_that_mindspeed_refuses_or_leaves_out_are_refused():
    with pytest.raises(ConfigError, match="would drop 2"):
        split(profile_of(num_layers=18), size=4)
    with pytest.raises(ConfigError, match="at least 7 microbatches"):
        split(profile_of(), size=4, count=4)
    with pytest.raises(ConfigError, match="untie"):
        profile = profile_of()
        split(replace(profile, model=replace(profile.model, tied_embeddings=True)))


def test_the_command_compares_with_the_best_plain_split(tmp_path, capsys):
    profile_of().write(tmp_path / "profile.json")
    words = ["split", "--profile", str(tmp_path / "profile.json"), "--pipeline-size", "2", "--num-microbatches", "8"]
    words += ["--memory-limit-mib", "100000", "--schedule", "dualpipev"]
    assert main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["chunks"] == [[0, 3], [1, 2]]
    assert result["flags"] == ["--schedules-method", "dualpipev"]
    assert 0 < result["step_time_ms"] < result["without_dualpipev"]["step_time_ms"]
    assert main(words) == 0
    assert "1F1B, best split" in capsys.readouterr().out
    assert main([*words, "--virtual-pipeline-size", "2"]) == 2
