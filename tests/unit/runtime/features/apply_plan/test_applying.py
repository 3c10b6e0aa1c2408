"""A plan in the host's words: sizes, splits and recompute that reach its arguments."""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from made_plans import MODEL, TWO, make_plan

from mindspeed_autoparallel.errors import PlanError
from mindspeed_autoparallel.runtime.features.apply_plan import apply, overlaps
from mindspeed_autoparallel.runtime.features.apply_plan.entry import prepare
from mindspeed_autoparallel.runtime.megatron.description import describe
from mindspeed_autoparallel.runtime.megatron.layout_arguments import group_arguments


def test_combined_1f1b_is_applied_only_to_a_host_that_has_it(job):
    arguments = job(make_plan(TWO, {}, paired=True))
    with pytest.raises(PlanError, match="this Megatron has no --overlap-moe-expert-parallel-comm"):
        prepare(arguments)
    arguments.overlap_moe_expert_parallel_comm = False
    prepare(arguments)
    assert arguments.overlap_moe_expert_parallel_comm is True


@pytest.mark.parametrize(
    "plan", [make_plan(TWO), make_plan({"image_encoder": [4], "text_decoder": [4]}, tensor_size=2)], ids=["two", "one"]
)
@pytest.mark.parametrize("host_is_mindspeed_mm", [True, False])
def test_stages_of_mindspeed_mm_exchange_samples_of_their_own_lengths(job, plan, host_is_mindspeed_mm, monkeypatch):
    """MindSpeed-MM's example without --variable-seq-lengths ended in its first step on two stages: a sample is shorter
    than --seq-length."""
    monkeypatch.setattr(overlaps, "is_mindspeed_mm", lambda: host_is_mindspeed_mm)
    arguments = job(plan)
    arguments.variable_seq_lengths = False
    prepare(arguments)
    assert arguments.variable_seq_lengths == (host_is_mindspeed_mm and plan.layout.pipeline_size > 1)


def test_sizes_layers_and_recompute_reach_the_host(job, tmp_path):
    arguments = job(make_plan(TWO, {"text_decoder": [1, 2]}, micro_batch_size=2))
    prepare(arguments)
    assert (arguments.pipeline_model_parallel_size, arguments.micro_batch_size, arguments.global_batch_size) == (
        2,
        2,
        8,
    )
    applied = json.loads(open(arguments.mm_model).read())
    assert applied["image_encoder"]["vision_encoder"] == {"num_layers": 4, "pipeline_num_layers": [4, 0]}
    assert applied["text_decoder"] == {
        "num_layers": 4,
        "pipeline_num_layers": [1, 3],
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": [1, 2],
    }
    assert json.loads((tmp_path / "model.json").read_text()) == MODEL


def test_ranks_that_share_an_expert_follow_the_plan_in_a_model_without_experts(flags_job, capsys):
    """Otherwise functional tests of three releases end where Megatron divides the world by them."""
    arguments = flags_job(expert_tensor_parallel_size=4)
    prepare(arguments)
    assert arguments.expert_tensor_parallel_size is None
    assert "replaced by the plan: --expert-tensor-parallel-size, 4 in the script" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "size", "told"), [("aux_loss", 4, True), ("aux_loss", 1, False), ("none", 4, False)])
def test_a_line_names_experts_that_are_balanced_over_other_samples(flags_job, capsys, kind, size, told):
    """Seven of 122 trainings of Megatron's authors had other losses under a plan, as with that micro batch natively."""
    plan = make_plan({"text_decoder": [1, 3]}, tensor_size=1)
    values = {"num_experts": 4, "moe_router_load_balancing_type": kind}
    arguments = flags_job(plan, micro_batch_size=plan.layout.micro_batch_size * size, **values)
    prepare(arguments)
    assert ("losses differ from the script's, as with --micro-batch-size" in capsys.readouterr().out) == told


def test_every_flag_of_the_script_that_the_plan_changes_has_a_line(flags_job, capsys):
    arguments = flags_job(tensor_model_parallel_size=4, micro_batch_size=1, global_batch_size=16)
    prepare(arguments)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("replaced by the plan")]
    assert lines == [
        "replaced by the plan: --tensor-model-parallel-size, 4 in the script, 1 now",
        "replaced by the plan: --global-batch-size, 16 in the script, 8 now",
    ]


def test_a_plan_with_encoders_of_their_own_names_what_it_changes_too(flags_job, capsys, monkeypatch):
    def hetero(plan, description, arguments, path):
        vars(arguments).update(tensor_model_parallel_size=1, pipeline_model_parallel_size=1)

    monkeypatch.setattr(apply, "apply_hetero", hetero)
    monkeypatch.setattr(apply, "check_applies", lambda *_: None)
    plan = replace(make_plan({"text_decoder": [4]}, tensor_size=2), hetero=SimpleNamespace())
    arguments = flags_job(tensor_model_parallel_size=4, micro_batch_size=2, global_batch_size=8)
    path = Path("plan.json")
    apply.apply(
        apply.PlanRequest(path=path, plan=plan, description=describe(arguments), calibration_file=None), arguments
    )
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("replaced by the plan")]
    assert lines == [
        "replaced by the plan: --tensor-model-parallel-size, 4 in the script, 2 now",
        "replaced by the plan: --micro-batch-size, 2 in the script, 1 now",
    ]


@pytest.mark.parametrize(
    ("save", "reshardable", "warned"), [("c", False, True), ("c", True, False), (None, False, False)]
)
def test_a_checkpoint_that_no_other_layout_resumes_is_announced(flags_job, capsys, save, reshardable, warned):
    prepare(flags_job(save=save, dist_ckpt_optim_fully_reshardable=reshardable))
    assert ("--dist-ckpt-optim-fully-reshardable" in capsys.readouterr().out) == warned


def test_mindspeed_mm_gets_the_number_of_its_own_stage(job, monkeypatch):
    """Its blocks compare a layer with one number: a list per stage fails in the first forward, on every rank."""
    monkeypatch.setitem(sys.modules, "mindspeed_mm", ModuleType("mindspeed_mm"))
    arguments = job(make_plan(TWO, {"text_decoder": [0, 2]}))
    decoders = {}
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        prepare(arguments)
        decoders[rank] = json.loads(Path(arguments.mm_model).read_text())["text_decoder"]
        assert decoders[rank]["pipeline_num_layers"] == [1, 3]
    assert "recompute_granularity" not in decoders[0]
    assert decoders[1]["recompute_num_layers"] == 2


def test_the_scripts_own_split_flags_make_way_for_a_layout_string(tmp_path, monkeypatch):
    """Megatron refuses --pipeline-model-parallel-layout beside --account-for-embedding-in-pipeline-split."""
    make_plan({"text_decoder": [1, 3]}).write(tmp_path / "plan.json")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    own = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    arguments = argparse.Namespace(
        num_layers=4,
        auto_parallel_plan=str(tmp_path / "plan.json"),
        auto_parallel_check_steps=3,
        pipeline_model_parallel_layout=None,
        decoder_first_pipeline_num_layers=1,
        **own,
    )
    prepare(arguments)
    assert arguments.pipeline_model_parallel_layout == "Et*1|t*3L"
    assert arguments.decoder_first_pipeline_num_layers is None
    assert [getattr(arguments, name) for name in own] == [False, False]


def test_the_group_size_of_a_plan_is_megatrons_own_flag(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    for size, expected in ((0, None), (2, None), (4, 4)):
        plan = make_plan(
            {"text_decoder": [1, 2, 3, 4]}, virtual_size=2, schedule="interleaved", microbatch_group_size=size
        )
        plan.write(tmp_path / "plan.json")
        arguments = argparse.Namespace(
            num_layers=10,
            auto_parallel_plan=str(tmp_path / "plan.json"),
            auto_parallel_check_steps=3,
            pipeline_model_parallel_layout=None,
            microbatch_group_size_per_vp_stage=8,
        )
        prepare(arguments)
        assert arguments.microbatch_group_size_per_vp_stage == expected
        printed = capsys.readouterr().out
        assert ("--microbatch-group-size-per-virtual-pipeline-stage 4" in printed) == (expected == 4)
    with pytest.raises(PlanError, match="always runs 2"):
        group_arguments(plan, SimpleNamespace())


def test_every_rank_of_a_language_model_recomputes_its_own_stages_layers(tmp_path, monkeypatch):
    plan = make_plan({"text_decoder": [2, 2]}, {"text_decoder": [2, 0]})
    plan.write(tmp_path / "plan.json")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, expected in ((0, ("full", 2)), (1, (None, None))):
        monkeypatch.setenv("RANK", str(rank))
        arguments = argparse.Namespace(
            num_layers=4,
            auto_parallel_plan=str(tmp_path / "plan.json"),
            auto_parallel_check_steps=3,
            pipeline_model_parallel_layout=None,
        )
        prepare(arguments)
        assert (arguments.recompute_granularity, arguments.recompute_num_layers) == expected
        assert arguments.pipeline_model_parallel_layout == "Et*2|t*2L"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("selective", ("selective", None, None, None)),
        ("selective:layernorm,mlp", ("selective", None, None, ["layernorm", "mlp"])),
        ("full:2", ("full", "uniform", 2, None)),
    ],
)
def test_a_language_model_recomputes_modules_or_groups_of_layers_as_planned(kind, expected, tmp_path, monkeypatch):
    make_plan({"text_decoder": [2, 2]}, {"text_decoder": [2, 2]}, kind=kind).write(tmp_path / "plan.json")
    monkeypatch.setenv("WORLD_SIZE", "2")
    arguments = argparse.Namespace(
        num_layers=4,
        auto_parallel_plan=str(tmp_path / "plan.json"),
        auto_parallel_check_steps=3,
        pipeline_model_parallel_layout=None,
        recompute_method="block",
    )
    prepare(arguments)
    found = (arguments.recompute_granularity, arguments.recompute_method, arguments.recompute_num_layers)
    assert (*found, arguments.recompute_modules) == expected


def test_chunks_that_should_recompute_differently_are_named(tmp_path, monkeypatch, capsys):
    plan = make_plan(
        {"text_decoder": [2, 2, 2, 2]}, {"text_decoder": [2, 1, 0, 1]}, virtual_size=2, schedule="interleaved"
    )
    plan.write(tmp_path / "plan.json")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    arguments = argparse.Namespace(
        num_layers=8,
        auto_parallel_plan=str(tmp_path / "plan.json"),
        auto_parallel_check_steps=3,
        pipeline_model_parallel_layout=None,
    )
    prepare(arguments)
    assert arguments.recompute_num_layers == 2
    assert "pipeline ranks [0] recompute more than planned" in capsys.readouterr().out


@pytest.mark.parametrize(("planned", "said"), [(0, 2), (2, 2), (1, 1)])
def test_ranks_that_share_an_expert_follow_the_plan_not_the_script(planned, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    plan = make_plan({"text_decoder": [8]}, tensor_size=2, expert_tensor_size=planned)
    (module,) = plan.model.modules
    plan = replace(plan, model=replace(plan.model, modules=(replace(module, num_experts=4),)))
    plan.write(tmp_path / "plan.json")
    arguments = argparse.Namespace(
        num_layers=8,
        auto_parallel_plan=str(tmp_path / "plan.json"),
        auto_parallel_check_steps=3,
        pipeline_model_parallel_layout=None,
        expert_tensor_parallel_size=4,
    )
    prepare(arguments)
    assert arguments.expert_tensor_parallel_size == said
    assert f"--expert-tensor-parallel-size {said}" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["hetero_parallel", "auto_parallel_hetero"])
def test_a_plan_with_one_layout_is_refused_where_encoders_are_to_have_their_own(job, name, tmp_path):
    """The script wrote a model.json without sizes and ended with an error about that file."""
    arguments = job(make_plan(TWO))
    setattr(arguments, name, True)
    with pytest.raises(PlanError, match=f"one layout for all modules.*--{name.replace('_', '-')}.*drop the flag"):
        prepare(arguments)
    assert not list(tmp_path.glob("applied_model*"))
