"""`replan`: the plan for what is left, the cost of the move, the orders that are printed, and bad input."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from language_profile import language_profile
from small_profile import small_profile

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.planner.layouts import search as layout_search
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions
from mindspeed_autoparallel.planner.replan.choose import MoveRates, Window, replan
from mindspeed_autoparallel.planner.replan.sources import cluster_of_nodes
from mindspeed_autoparallel.planner.results import PROFILE_FILE
from mindspeed_autoparallel.spec import Cluster, Plan

BATCH = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("planned")
    small_profile().write(made / "profile.json")
    words = ["--nnodes", "4", "--nproc-per-node", "2", "--global-batch-size", str(BATCH), "--out", str(made)]
    assert main(["plan", "--profile", str(made / "profile.json"), "--json", *words]) == 0
    return made


def replanned(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["replan", "--plan", str(folder / "plan.json"), "--json", *words]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def refused(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["replan", "--plan", str(folder / "plan.json"), *words]) == 2
    line = capsys.readouterr().err.strip()
    assert "\n" not in line
    return line


def test_the_plan_for_what_is_left_is_the_searched_optimum_and_keeps_the_batch(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = replanned(folder, capsys, "--lost-node", "3")
    plan = Plan.parse(result["plan"])
    # Computed profiles are planned with overlapped reductions, and so is what is left.
    options = SearchOptions(space=SpaceOptions(overlap_gradient_reduce=True), with_relaxations=False)
    best = min(
        search(small_profile(), Cluster(num_nodes=nodes, devices_per_node=2), BATCH, options).step.total_us
        for nodes in (3, 2, 1)
    )
    assert plan.global_batch_size == BATCH
    assert plan.layout.num_devices == plan.cluster.num_devices <= 6
    assert plan.step.total_us == pytest.approx(best, rel=1e-9)
    assert plan.search.status == "optimal"


def test_nodes_without_a_good_layout_stay_unused() -> None:
    # A batch of 16 has no data parallel size of 7, and six layers no seven stages: the best of 7 nodes uses 4 of them.
    old = search(small_profile(), Cluster(num_nodes=8, devices_per_node=1), 16)
    found = replan(old, small_profile(), cluster_of_nodes(old, 7), MoveRates(), Window())
    each = {
        nodes: search(
            small_profile(), Cluster(num_nodes=nodes, devices_per_node=1), 16, SearchOptions(with_relaxations=False)
        ).step.total_us
        for nodes in (4, 5, 6)
    }
    assert found.chosen.plan.step.total_us == pytest.approx(min(each.values()))
    assert found.cluster.num_nodes == 7 > found.chosen.plan.cluster.num_nodes


def test_a_known_plan_is_kept_or_beaten_however_short_the_time() -> None:
    profile, cluster = small_profile(), Cluster(num_nodes=1, devices_per_node=6)
    options = SearchOptions(with_relaxations=False)
    # 10 microbatches: the smallest group that Megatron runs on three stages is not three.
    known = search(profile, cluster, 20, replace(options, space=SpaceOptions(held={"pipeline_size": 3})))
    in_no_time = search(profile, cluster, 20, replace(options, known=known, time_limit_s=1e-6))
    whole = search(profile, cluster, 20, replace(options, known=known))
    assert in_no_time.step.total_us <= known.step.total_us
    assert whole.step.total_us == pytest.approx(search(profile, cluster, 20, options).step.total_us, rel=1e-9)
    assert whole.search.status == "optimal"


def each_search(monkeypatch: pytest.MonkeyPatch, do: Callable[[SearchOptions, Plan], None]) -> None:
    """Call ``do`` with the options and the plan of every search that ends."""
    searched = layout_search._searched

    def recorded(workers: Any, candidates: Any, verdicts: Any, options: SearchOptions, *rest: Any) -> Plan:
        plan = searched(workers, candidates, verdicts, options, *rest)
        do(options, plan)
        return plan

    monkeypatch.setattr(layout_search, "_searched", recorded)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a plan of 24 nodes: after the loss of 3 nodes 16, 20 and 18 are searched, by two searches
    each, then its shape."""
    made = tmp_path_factory.mktemp("large")
    search(small_profile(), Cluster(num_nodes=24, devices_per_node=1), BATCH).write(made / "plan.json")
    small_profile().write(made / PROFILE_FILE)
    return made


def test_all_searches_share_the_time_limit_and_the_most_promising_come_first(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Plan.read(large / "plan.json")
    clock, limit_s = time.monotonic, 100.0
    spent, nodes, lines = list[float](), list[int](), list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: clock() + sum(spent))

    def spend_all(options: SearchOptions, plan: Plan) -> None:
        spent.append(options.time_limit_s)
        nodes.append(plan.cluster.num_nodes)

    each_search(monkeypatch, spend_all)
    found = replan(
        old,
        small_profile(),
        cluster_of_nodes(old, 21),
        MoveRates(),
        Window(),
        time_limit_s=limit_s,
        progress=lines.append,
    )
    assert 0.5 * limit_s < sum(spent) < 1.3 * limit_s
    assert nodes[0] == found.chosen.plan.cluster.num_nodes == 16
    assert {line.split(": ")[0] for line in lines if "layouts to search" in line} >= {"16 nodes", "20 nodes"}


@pytest.mark.parametrize("number", [1, 4, 7])
def test_ctrl_c_prints_the_best_plan_so_far(
    number: int, large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = list[Plan]()

    def interrupt(_: SearchOptions, plan: Plan) -> None:
        ended.append(plan)
        if len(ended) == number:
            raise KeyboardInterrupt

    each_search(monkeypatch, interrupt)
    capsys.readouterr()
    words = ["replan", "--plan", str(large / "plan.json"), "--nnodes", "21", "--out", str(tmp_path)]
    assert main(words) == 130
    printed = capsys.readouterr()
    if number == 1:
        assert printed.err.endswith("interrupted\n") and not printed.out
        return
    assert "interrupted: the best plan so far" in printed.err and "best  " in printed.out
    assert Plan.read(tmp_path / "plan.json").mean_us == min(plan.mean_us for plan in ended[: number - 1])


@pytest.mark.parametrize("before", [1, 2])
def test_a_plan_of_experts_gets_any_expert_size(before: int) -> None:
    profile = language_profile(num_layers=4, tensor=(1,), batches=(1,), experts=(1, 2, 4))
    modules = tuple(replace(module, num_experts=4) for module in profile.model.modules)
    profile = replace(profile, model=replace(profile.model, modules=modules))
    cluster, options = Cluster(num_nodes=4, devices_per_node=1), SearchOptions(with_relaxations=False)
    old = search(profile, cluster, 16, replace(options, space=SpaceOptions(held={"expert_size": before})))
    found = replan(old, profile, cluster_of_nodes(old, 4), MoveRates(), Window()).options
    best = next(option.plan for option in found if option.name == "best")
    assert best.step.total_us == pytest.approx(search(profile, cluster, 16, options).step.total_us)


def test_a_grown_cluster_moves_only_where_the_gain_pays_for_the_move(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for_long = replanned(folder, capsys, "--nnodes", "6", "--remaining-hours", "24")
    for_a_moment = replanned(folder, capsys, "--nnodes", "6", "--remaining-hours", "0.02")
    assert for_long["options"][0]["name"] != "stay" and for_long["run"]
    assert for_a_moment["options"][0]["name"] == "stay" and not for_a_moment["run"]
    for option in (*for_long["options"], *for_a_moment["options"]):
        assert (option["move_s"] == 0) == (option["name"] == "stay")


def test_the_cost_of_a_move_counts_what_the_new_plan_holds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fast, slow = (
        replanned(folder, capsys, "--lost-node", "0", "--storage-gib-per-s", rate, "--restart-s", "0")["options"][0]
        for rate in ("4", "1")
    )
    mib = 2**20
    # Every block of the profile has 2 MiB of weights and 12 MiB of state a rank, 10 blocks; TP 2 holds twice as much.
    plan = Plan.parse(replanned(folder, capsys, "--lost-node", "0")["plan"])
    assert fast["read_bytes"] == pytest.approx(10 * (2 + 12) * mib * plan.layout.tensor_size, rel=0.01)
    assert fast["sent_bytes"] == pytest.approx(
        10 * 2 * mib * plan.layout.tensor_size * (plan.layout.data_size - 1), rel=0.01
    )
    read_s = fast["read_bytes"] / (2**30 * plan.cluster.num_nodes)
    assert slow["move_s"] - fast["move_s"] == pytest.approx(read_s * (1 - 1 / 4))


def test_files_are_written_and_the_plan_holds_without_its_profile(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = replanned(folder, capsys, "--lost-node", "1", "--out", str(tmp_path / "new"))
    assert Plan.read(tmp_path / "new" / "plan.json").text() == Plan.parse(result["plan"]).text()
    assert (tmp_path / "new" / "relaunch.sh").read_text().startswith("#!")
    assert result["run"] == [f"bash {tmp_path / 'new' / 'relaunch.sh'}"]
    # The second loss starts from the files of the first.
    second = replanned(tmp_path / "new", capsys, "--lost-node", "0")
    assert second["options"]
    (tmp_path / "new" / PROFILE_FILE).unlink()
    assert main(["replan", "--plan", str(tmp_path / "new" / "plan.json"), "--lost-node", "0"]) == 0
    assert PROFILE_FILE in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--lost-node", "4"], "nodes 0 to 3"),
        (["--lost-node", "-1"], "nodes 0 to 3"),
        ([f"--lost-node={node}" for node in range(4)], "all 4 nodes"),
        ([], "--lost-node"),
        (["--lost-node", "1", "--nnodes", "3"], "--nnodes"),
        (["--nnodes", "0"], "at least 1"),
        (["--nnodes", "3", "--storage-gib-per-s", "0"], "--storage-gib-per-s"),
        (["--nnodes", "3", "--remaining-hours", "nan"], "--remaining-hours"),
        (["--lost-node", "1", "--nproc-per-node", "1"], "--nproc-per-node"),
    ],
)
def test_bad_input_is_one_line(words: list[str], line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert line in refused(folder, capsys, *words)


def test_the_plan_that_training_runs_by_is_not_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "another folder" in refused(folder, capsys, "--lost-node", "0", "--out", str(folder))


def test_a_profile_of_another_model_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = json.loads((folder / "profile.json").read_text())
    other["model"]["modules"][1]["num_layers"] = 5
    (tmp_path / "other.json").write_text(json.dumps(other))
    assert "another model" in refused(folder, capsys, "--lost-node", "0", "--profile", str(tmp_path / "other.json"))
