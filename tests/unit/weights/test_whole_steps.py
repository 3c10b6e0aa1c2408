"""A lost rank's files: which step is whole, which shard is gone, and what `replan` prints of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch
from small_profile import small_profile

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.results import write_results
from mindspeed_autoparallel.spec import Cluster, Layout, Plan
from mindspeed_autoparallel.weights.whole_steps import loss_line, saved_steps

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def plan() -> Plan:
    layout = Layout(pipeline_size=2, tensor_size=2, data_size=2)
    options = SearchOptions(layouts=[layout], with_relaxations=False)
    return search(small_profile(), Cluster(num_nodes=4, devices_per_node=2), 16, options)


def rank_folders(checkpoint: Path, *steps: int) -> None:
    for step in steps:
        for tensor in range(2):
            for stage in range(2):
                folder = checkpoint / f"iter_{step:07d}" / f"mp_rank_{tensor:02d}_{stage:03d}"
                folder.mkdir(parents=True)
                torch.save({"model": {"w": torch.zeros(2)}}, folder / "model_optim_rng.pt")
    (checkpoint / "latest_checkpointed_iteration.txt").write_text(str(max(steps)))


def torch_dist(checkpoint: Path, *steps: int) -> None:
    import torch.distributed.checkpoint as dcp

    for step in steps:
        folder = checkpoint / f"iter_{step:07d}"
        dcp.save({"decoder.weight": torch.zeros(64), "other": torch.ones(8)}, checkpoint_id=folder, no_dist=True)
        (folder / "common.pt").write_bytes(b"")
    (checkpoint / "latest_checkpointed_iteration.txt").write_text(str(max(steps)))


def test_the_shard_that_only_a_lost_node_held_is_named_with_the_older_whole_step(plan: Plan, tmp_path: Path) -> None:
    rank_folders(tmp_path, 10, 20, 30)
    assert saved_steps(tmp_path, plan).whole is not None and not saved_steps(tmp_path, plan).broken
    # Tensor rank 1 of the second stage: rank 5, on node 2.
    (tmp_path / "iter_0000030" / "mp_rank_01_001" / "model_optim_rng.pt").unlink()
    (tmp_path / "iter_0000020" / "mp_rank_00_000" / "model_optim_rng.pt").write_bytes(b"cut off")
    saved = saved_steps(tmp_path, plan)
    assert [step.iteration for step in saved.broken] == [30, 20]
    line = loss_line(saved, tmp_path, plan.cluster.devices_per_node)
    assert "rank 5 on node 2" in line and "tensor rank 1, pipeline rank 1" in line and "Step 10 is whole" in line


def test_steps_newer_than_the_tracker_file_are_left_out(plan: Plan, tmp_path: Path) -> None:
    rank_folders(tmp_path, 10, 20)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    whole = saved_steps(tmp_path, plan).whole
    assert whole is not None and whole.iteration == 10


def test_newer_megatron_keeps_its_plain_objects_among_the_data(plan: Plan, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    torch_dist(tmp_path, 3)
    (tmp_path / "iter_0000003" / "common.pt").unlink()
    gaps = saved_steps(tmp_path, plan).broken[0].gaps
    assert [gap.file for gap in gaps] == ["common.pt"]
    state = {"common_state/shard_0_1": torch.zeros(1)}
    dcp.save(state, checkpoint_id=tmp_path / "iter_0000003", no_dist=True)
    assert saved_steps(tmp_path, plan).whole is not None


@pytest.mark.parametrize("damage", ["missing", "short", "no metadata", "no folder"])
def test_half_a_distributed_checkpoint_is_seen(damage: str, plan: Plan, tmp_path: Path) -> None:
    torch_dist(tmp_path, 1, 2)
    folder = tmp_path / "iter_0000002"
    (data,) = folder.glob("*.distcp")
    if damage == "missing":
        data.unlink()
    elif damage == "short":
        data.write_bytes(data.read_bytes()[:-1])
    elif damage == "no metadata":
        (folder / ".metadata").unlink()
    else:
        folder.rename(tmp_path / "elsewhere")
    saved = saved_steps(tmp_path, plan)
    assert saved.whole is not None and saved.whole.iteration == 1
    assert [step.iteration for step in saved.broken] == [2]
    if damage in ("missing", "short"):
        assert "rank 0 on node 0" in loss_line(saved, tmp_path, 2)


def test_replan_loads_the_older_step_and_refuses_where_none_is_whole(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_results(plan, tmp_path, small_profile())
    checkpoint = tmp_path / "ckpt"
    torch_dist(checkpoint, 1, 2)
    next((checkpoint / "iter_0000002").glob("*.distcp")).unlink()
    words = ["replan", "--plan", str(tmp_path / "plan.json"), "--lost-node", "0", "--checkpoint", str(checkpoint)]
    assert main([*words, "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["run"][-1].endswith(f"--load {checkpoint} --ckpt-step 1")
    assert "is incomplete" in printed.err
    next((checkpoint / "iter_0000001").glob("*.distcp")).unlink()
    assert main(words) == 2
    assert "No older step" in capsys.readouterr().err
    assert main([*words[:-1], str(tmp_path)]) == 2


def test_rank_folders_get_a_recut_command(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_results(plan, tmp_path, small_profile())
    rank_folders(tmp_path / "ckpt", 5)
    words = ["replan", "--plan", str(tmp_path / "plan.json"), "--lost-node", "0", "--json"]
    assert main([*words, "--checkpoint", str(tmp_path / "ckpt"), "--hf-dir", "hf"]) == 0
    recut, launch = json.loads(capsys.readouterr().out)["run"]
    assert "convert resplit" in recut and "--hf-dir hf" in recut and "iter_0000005" in recut
    assert recut.endswith("--format torch_dist")
    assert launch.endswith(f"--load {tmp_path / 'ckpt-recut'} --ckpt-format torch_dist")
