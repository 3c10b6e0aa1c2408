"""The plugin inside a hand-written host of the structure of MindSpeed-MM's native FSDP2 trainer (`small_native/`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from native_runs import IN_FRONT, PLUGIN, native_file, plan_of, run_native

from mindspeed_autoparallel.spec.sharded import GroupChoice, ShardedDecisions, ShardSizes

pytestmark = [pytest.mark.torch, pytest.mark.distributed]


def decisions(**sizes: int) -> ShardedDecisions:
    """Return a plan's decisions: half of the layers are recomputed, and no group is freed after forward."""
    patterns = ("model.embed_tokens", "model.layers.{*}", "lm_head", "")
    return ShardedDecisions(
        sizes=ShardSizes(expert_shard_size=sizes["num_devices"], **sizes),
        groups=tuple(GroupChoice(pattern=pattern, reshard_after_forward=False) for pattern in patterns),
        policies={"model.layers.{*}": ("recompute", "recompute", "keep", "recompute")},
    )


def test_a_plan_trains_as_one_process_does_and_prints_predicted_beside_measured(tmp_path: Path) -> None:
    config = native_file(tmp_path)
    alone = run_native(1, native_file(tmp_path, plugins="", **{"steps: 1": "steps: 4"}))
    assert alone.status == 0, alone.outputs[0]
    config = native_file(tmp_path)
    text = config.read_text()
    plan_of(decisions(num_devices=2, fully_shard_size=1, accumulation=2)).write(tmp_path / "plan.json")
    done = run_native(2, config, "--auto-parallel-plan", "plan.json", "--auto-parallel-check-steps", "3")
    assert done.status == 0, done.outputs[0]
    assert done.outputs[0].count("recompute model.layers") == 3 and "sizes 1 2" in done.outputs[0]
    assert "ms predicted" in done.outputs[0] and "MiB measured" in done.outputs[0]
    assert config.read_text() == text
    flat = [value for step in done.losses for value in step]
    assert flat == pytest.approx([value for step in alone.losses for value in step], rel=1e-6)


@pytest.mark.parametrize("front", [False, True])
def test_without_flags_nothing_changes(tmp_path: Path, front: bool) -> None:
    config = native_file(tmp_path, plugins="" if front else PLUGIN)
    done = run_native(1, config, command=("-c", IN_FRONT)) if front else run_native(1, config)
    assert done.status == 0 and len(done.losses) == 3, done.outputs[0]
    assert ("no flag of mindspeed_autoparallel" in done.outputs[0]) != front


def test_flags_work_where_the_package_is_imported_in_front_of_the_script(tmp_path: Path) -> None:
    plan_of(decisions(num_devices=1, fully_shard_size=1)).write(tmp_path / "plan.json")
    config = native_file(tmp_path, plugins="")
    done = run_native(1, config, "--auto-parallel-plan", "plan.json", command=("-c", IN_FRONT))
    assert done.status == 0 and done.outputs[0].count("recompute model.layers") == 3, done.outputs[0]


def test_the_package_named_as_a_plugin_is_refused_with_the_modules_name(tmp_path: Path) -> None:
    done = run_native(1, native_file(tmp_path, plugins="mindspeed_autoparallel"))
    assert done.status == 2 and "name its module mindspeed_autoparallel.plugin" in done.outputs[0]
    assert "Traceback" not in done.outputs[0] and not done.losses


@pytest.mark.parametrize(
    ("words", "edits", "message"),
    [
        (["--auto-parallel-plan", "plan.json"], {"model_id: tiny": "model_id: other"}, "trains other"),
        (["--auto-parallel-plan", "missing.json"], {}, "missing.json"),
        (["--auto-paralel-plan", "plan.json"], {}, "nearest is --auto-parallel-plan"),
        (["--auto-parallel-mm"], {}, "--simulated-nnodes"),
        (["--auto-parallel-plan", "plan.json"], {"/model\n": "/nowhere\n"}, "is not a folder"),
        (["--auto-parallel-plan", "plan.json"], {"apply_modules: [": "apply_modules: ['model.layers.{3}', "}, "{3-3}"),
    ],
)
def test_bad_input_ends_with_a_line_before_anything_starts(tmp_path, words, edits, message):
    plan_of(decisions(num_devices=1, fully_shard_size=1)).write(tmp_path / "plan.json")
    config = native_file(tmp_path, **edits)
    text = config.read_text()
    done = run_native(1, config, *words)
    assert done.status == 2 and message in done.outputs[0], done.outputs[0]
    assert "Traceback" not in done.outputs[0] and not done.losses
    assert config.read_text() == text
