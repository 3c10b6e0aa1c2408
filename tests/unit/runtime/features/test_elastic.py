"""`--auto-parallel-elastic` before anything starts: its requirements, the chosen plan, and spare processes."""

from __future__ import annotations

import argparse
import builtins
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from elastic_job import planned

from mindspeed_autoparallel.errors import AutoParallelError, ConfigError, PlanError
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions
from mindspeed_autoparallel.runtime.features.elastic import entry, neighbour, plans, request
from mindspeed_autoparallel.runtime.features.elastic.neighbour import Neighbour
from mindspeed_autoparallel.runtime.features.elastic.request import ElasticRequest, World
from mindspeed_autoparallel.runtime.megatron.description import Description
from mindspeed_autoparallel.spec import Plan

SCRIPT = argparse.Namespace()


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planned(tmp_path_factory.mktemp("plan"), nodes=4, per_node=1)


def request_of(plan_file: Path, folder: Path, *, rank: int = 0, size: int = 3) -> ElasticRequest:
    return ElasticRequest(
        world=World(rank=rank, size=size, per_node=1, start=f"run-{size}"),
        plan_file=plan_file,
        plan=Plan.read(plan_file),
        folder=folder,
        time_limit_s=10.0,
        description=Description(modules=(), content={}, model_hash="", model_file=None),
        splits=None,
        host=SpaceOptions(),
    )


def test_all_ranks_get_one_plan_for_the_processes_there_are(plan_file: Path, tmp_path: Path) -> None:
    found: dict[int, Path] = {}

    def run(rank: int) -> None:
        found[rank], _ = plans.plan_for_world(request_of(plan_file, tmp_path, rank=rank), SCRIPT)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found.values())) == 1 and len(found) == 3
    plan = Plan.read(found[0])
    assert plan.layout.num_devices <= 3 and plan.global_batch_size == 24
    written = found[0].stat().st_mtime_ns
    assert (
        plans.plan_for_world(request_of(plan_file, tmp_path), SCRIPT)[0].stat().st_mtime_ns == written
    )  # not planned twice
    assert plans.plan_for_world(request_of(plan_file, tmp_path, size=4), SCRIPT)[0] == plan_file


def test_a_plan_for_fewer_processes_has_the_expert_ranks_that_the_host_needs(plan_file: Path, tmp_path: Path) -> None:
    host = SpaceOptions(least_expert_sizes={"group_limited_greedy": 2})
    with pytest.raises(AutoParallelError, match="EP 1 is below 2, the least for group_limited_greedy"):
        plans.plan_for_world(replace(request_of(plan_file, tmp_path), host=host), SCRIPT)


def test_a_plan_for_fewer_processes_runs_every_batch_of_a_ramp(plan_file: Path, tmp_path: Path) -> None:
    ramp = replace(request_of(plan_file, tmp_path), host=SpaceOptions(ramp=range(4, 24, 20)))
    layout = Plan.read(plans.plan_for_world(ramp, SCRIPT)[0]).layout
    assert 4 % (layout.data_size * layout.micro_batch_size) == 0


def test_why_there_is_no_plan_reaches_every_rank(plan_file: Path, tmp_path: Path) -> None:
    whole = request_of(plan_file, tmp_path)
    cluster = replace(whole.plan.cluster, memory_limit_bytes=1000)
    tight = replace(whole, plan=replace(whole.plan, cluster=cluster))
    said = []
    for rank in (0, 1):
        with pytest.raises(AutoParallelError) as refused:
            plans.plan_for_world(replace(tight, world=replace(whole.world, rank=rank)), SCRIPT)
        said.append(str(refused.value))
    assert said[0] == said[1] != ""


def test_a_plan_that_no_training_takes_is_not_written(plan_file: Path, tmp_path: Path) -> None:
    """It lay there for every later start to end at."""
    asked = request_of(plan_file, tmp_path)
    grid = argparse.Namespace(tp_2d=True, tp_x=4, tp_y=2)
    with pytest.raises(PlanError, match="--tp-2d runs on --tp-x 4"):
        plans.plan_for_world(asked, grid)
    assert not list(tmp_path.glob("*.json"))


def test_a_plan_for_fewer_processes_has_the_sizes_that_flags_of_the_script_demand(tmp_path: Path) -> None:
    """The fastest plan has TP 1, which MindSpeed's fused layers do not run: the restart ended there."""
    file = planned(tmp_path / "plan", nodes=2, per_node=2)
    whole = request_of(file, tmp_path)
    world = replace(whole.world, size=2, per_node=2)
    asked = replace(whole, world=world, host=SpaceOptions(group_sizes=False))
    assert Plan.read(plans.plan_for_world(asked, SCRIPT)[0]).layout.tensor_size == 1
    fused = replace(asked, folder=tmp_path / "fused")
    assert Plan.read(plans.plan_for_world(fused, argparse.Namespace(use_ascend_mc2=True))[0]).layout.tensor_size == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"auto_parallel_plan": None}, "--auto-parallel-plan"),
        ({"save": None}, "--save"),
        ({"save_interval": None}, "--save-interval"),
        ({"ckpt_format": "torch"}, "torch_dist"),
    ],
)
def test_missing_flags_are_named(changes: dict[str, Any], words: str, plan_file: Path, tmp_path: Path) -> None:
    given = {
        "auto_parallel_plan": str(plan_file),
        "save": str(tmp_path),
        "save_interval": 5,
        "ckpt_format": "torch_dist",
    }
    with pytest.raises(ConfigError, match=words):
        request.read_request(argparse.Namespace(**{**given, **changes}))


def test_a_release_that_saves_for_one_layout_only_is_refused(plan_file: Path, tmp_path: Path) -> None:
    arguments = argparse.Namespace(auto_parallel_plan=str(plan_file), save=str(tmp_path), save_interval=5)
    with pytest.raises(ConfigError, match="one layout only"):
        request.read_request(arguments)


def test_a_padding_that_a_later_plan_may_not_keep_is_refused_at_the_start(plan_file: Path) -> None:
    world = World(rank=0, size=8, per_node=8, start="run")
    request._check_padding(argparse.Namespace(make_vocab_size_divisible_by=128), Plan.read(plan_file), world)
    with pytest.raises(ConfigError, match="multiple of 8"):
        request._check_padding(argparse.Namespace(make_vocab_size_divisible_by=4), Plan.read(plan_file), world)


@pytest.mark.parametrize(
    ("environment", "words"),
    [({}, "torchrun"), ({"RANK": "0", "WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "2"}, "same --nproc-per-node")],
)
def test_processes_of_no_torchrun_and_of_unequal_nodes_are_refused(environment: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        request.read_world(environment)


def test_the_newest_checkpoint_is_loaded_completely_and_the_first_start_follows_the_script(
    tmp_path: Path, plan_file: Path
) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    plan = Plan.read(plan_file)
    arguments = argparse.Namespace(save=str(tmp_path), load="start", finetune=True, no_load_optim=True, ckpt_step=3)
    assert entry.resume_from_newest(arguments, plan) == ""
    assert (arguments.load, arguments.finetune) == ("start", True)
    for step in (2, 4):
        dcp.save({"decoder.weight": torch.zeros(64)}, checkpoint_id=tmp_path / f"iter_{step:07d}", no_dist=True)
        (tmp_path / f"iter_{step:07d}" / "common.pt").write_bytes(b"")
    (tmp_path / entry.TRACKER).write_text("4")
    assert entry.resume_from_newest(arguments, plan) == ""
    assert (arguments.load, arguments.finetune) == (str(tmp_path), False)
    assert arguments.no_load_optim is None and arguments.ckpt_step is None
    # A shard of the newest step went with its node: the older one is loaded, and with that gone, too, none.
    for step, wanted in ((4, 2), (2, None)):
        next((tmp_path / f"iter_{step:07d}").glob("*.distcp")).unlink()
        if wanted is None:
            with pytest.raises(ConfigError, match="No older step"):
                entry.resume_from_newest(arguments, plan)
        else:
            assert f"Step {wanted} is whole" in entry.resume_from_newest(arguments, plan)
            assert arguments.ckpt_step == wanted


def test_every_plan_keeps_the_padding_of_the_vocabulary(plan_file: Path) -> None:
    plan = Plan.read(plan_file)
    layout = replace(plan.layout, pipeline_size=1, tensor_size=4, data_size=1)
    wide = replace(plan, layout=layout)
    arguments = argparse.Namespace(make_vocab_size_divisible_by=128)
    entry.take_part(arguments, plan, wide)
    assert (arguments.make_vocab_size_divisible_by, arguments.world_size) == (32, 4)
    entry.take_part(arguments, wide, plan)
    assert arguments.make_vocab_size_divisible_by == 128
    with pytest.raises(ConfigError, match="change the loss"):
        entry.take_part(argparse.Namespace(make_vocab_size_divisible_by=1), plan, wide)


def test_a_silent_neighbour_is_lost_and_one_that_ended_well_is_not(tmp_path: Path) -> None:
    now = [0.0]

    def node(number: int) -> Neighbour:
        return Neighbour(tmp_path, World(rank=2 * number, size=6, per_node=2, start="run"), clock=lambda: now[0])

    first, second, third = (node(number) for number in range(3))
    assert [one.next_node for one in (first, second, third)] == [1, 2, 0]
    for one in (first, second):
        one.beat()
    assert not first.is_lost() and not second.is_lost()
    now[0] = neighbour.SILENCE_S + 1
    second.beat()
    assert not first.is_lost()
    assert not second.is_lost()  # the third has not been seen, and may still import
    now[0] = neighbour.UNSEEN_S + 1
    assert first.is_lost() and second.is_lost()
    third.leave()
    assert not second.is_lost()
    assert not node(0).is_lost()  # a new start looks anew


@pytest.mark.parametrize("error", [None, ValueError("lost")])
def test_an_error_at_the_end_of_the_script_is_seen_by_every_python(
    plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """Before Python 3.12 the interpreter sets ``sys.last_value`` alone."""
    at_exit: list[Any] = []
    monkeypatch.setattr(entry.atexit, "register", at_exit.append)
    monkeypatch.delattr("sys.last_exc", raising=False)
    monkeypatch.setattr("sys.last_value", error, raising=False)
    monkeypatch.setattr(sys, "exit", sys.exit)
    monkeypatch.setattr(builtins, "SystemExit", SystemExit)
    monkeypatch.setattr(neighbour.of_process(neighbour._Exit), "is_recorded", False)
    of_first = request_of(plan_file, tmp_path)
    entry.announce_end(of_first)
    at_exit[0]()
    assert entry._end_of(of_first).exists() == (error is None)


@pytest.mark.parametrize(
    ("end", "is_good"),
    [
        ("pass", True),
        ("sys.exit()", True),
        ("sys.exit(0)", True),
        ("sys.exit(16)", False),
        ("sys.exit('validation failed')", False),
        ("raise ValueError", False),
        ("raise SystemExit", True),
        ("raise SystemExit(16)", False),
        ("quit(16)", False),
        ("caught(16); sys.exit(0)", True),
        ("caught(16); raise SystemExit(0)", True),
    ],
)
def test_a_node_that_ends_with_an_exit_code_is_no_good_end(tmp_path: Path, end: str, is_good: bool) -> None:
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from mindspeed_autoparallel.runtime.features.elastic.neighbour import watch_next_node\n"
        "from mindspeed_autoparallel.runtime.features.elastic.request import World\n"
        "watch_next_node(Path(sys.argv[1]), World(rank=0, size=2, per_node=1, start='run'))\n"
        "def caught(code):\n    try: sys.exit(code)\n    except SystemExit: pass\n"
        f"def main(): {end}\nmain()\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, timeout=100, check=False)
    assert (tmp_path / "nodes-run" / "0").exists()
    assert (tmp_path / "nodes-run" / "0.left").exists() == is_good


def test_a_thread_that_exits_prints_nothing_beside_recorded_exits() -> None:
    program = (
        "import sys, threading\n"
        "from mindspeed_autoparallel.runtime.features.elastic.neighbour import record_exits\n"
        "record_exits()\n"
        "for end in (lambda: sys.exit(0), lambda: 1 / 0):\n"
        "    thread = threading.Thread(target=end)\n    thread.start()\n    thread.join()\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert "ZeroDivisionError" in ran.stderr
    assert "Exit" not in ran.stderr


def test_a_spare_waits_for_the_end_of_this_training(plan_file: Path, tmp_path: Path) -> None:
    waiting = request_of(plan_file, tmp_path, rank=2)
    end = entry._end_of(waiting)
    end.write_text("")
    os.utime(end, (time.time() - 60, time.time() - 60))  # of a training before
    ended: list[object] = []

    def wait() -> None:
        with pytest.raises(SystemExit) as left:
            entry.wait_for_end(waiting, waiting.plan)
        ended.append(left.value.code)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(1.0)
    assert thread.is_alive() and not ended
    end.write_text("")
    thread.join(10.0)
    assert ended == [0]
