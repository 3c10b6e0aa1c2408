"""A plan in the host's words, and its refusals."""

import argparse
import json
import re
import sys
import types
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from mindspeed_autoparallel.errors import ConfigError, PlanError
from mindspeed_autoparallel.runtime.features.apply_plan import applicable, apply, overlaps
from mindspeed_autoparallel.runtime.features.apply_plan.check import comparison, crowding
from mindspeed_autoparallel.runtime.features.apply_plan.entry import prepare
from mindspeed_autoparallel.runtime.megatron import hybrid
from mindspeed_autoparallel.runtime.megatron.description import describe
from mindspeed_autoparallel.runtime.megatron.layout_arguments import (
    group_arguments,
    kind_everywhere,
    model_keys,
    native_flags,
    pipeline_layout,
    stage_arguments,
)
from mindspeed_autoparallel.spec.layout import Cluster, Layout
from mindspeed_autoparallel.spec.model import Model, Module
from mindspeed_autoparallel.spec.plan import Plan, ProfileRecord, RankMemory, SearchRecord, StagePlan, StepTime
from mindspeed_autoparallel.units import MIB


def make_plan(layers, recompute=None, model_hash="", virtual_size=1, kind="full", **layout):
    """``layers``: module -> layers per virtual stage."""
    num_stages = len(next(iter(layers.values())))
    pipeline_size = num_stages // virtual_size
    names = list(layers)
    modules = tuple(
        Module(name=name, result_key=name[:3], num_layers=sum(counts), predecessors=tuple(names[:index]))
        for index, (name, counts) in enumerate(layers.items())
    )
    stages = tuple(
        StagePlan(
            stage=stage,
            pipeline_rank=stage % pipeline_size,
            chunk=stage // pipeline_size,
            layers={name: counts[stage] for name, counts in layers.items()},
            first_layer={},
            recompute={name: {kind: counts[stage]} for name, counts in (recompute or {}).items() if counts[stage]},
            forward_us=1.0,
            backward_us=2.0,
        )
        for stage in range(num_stages)
    )
    memory = tuple(
        RankMemory(pipeline_rank=rank, peak_bytes=100 * MIB, limit_bytes=200 * MIB, peak_point="x", terms={})
        for rank in range(pipeline_size)
    )
    placed = Layout(pipeline_size=pipeline_size, virtual_size=virtual_size, **layout)
    return Plan(
        model=Model(name="m", modules=modules, sequence_length=8),
        cluster=Cluster(num_nodes=1, devices_per_node=placed.num_devices),
        layout=placed,
        global_batch_size=8,
        num_microbatches=placed.num_microbatches(8),
        stages=stages,
        memory=memory,
        step=StepTime(total_us=1000.0, pipeline_us=1000.0),
        throughput_tokens_per_s_per_device=1.0,
        baselines=(),
        alternatives=(),
        search=SearchRecord(
            status="optimal", lower_bound_us=1000.0, gap_fraction=0.0, num_configurations=1, num_solved=1, seconds=1.0
        ),
        profile=ProfileRecord(sha256="", source="measured", device="cpu", created_utc="", model_hash=model_hash),
        tool_version="0",
    )


TWO = {"image_encoder": [4, 0], "text_decoder": [1, 3]}
MODEL = {
    "image_encoder": {
        "vision_encoder": {"num_layers": 4, "pipeline_num_layers": [4], "recompute_granularity": "selective"}
    },
    "text_decoder": {"num_layers": 4, "pipeline_num_layers": [4]},
}


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Arguments of a multimodal job of two processes, and a writer of its plan."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    arguments = argparse.Namespace(
        mm_model=str(tmp_path / "model.json"),
        auto_parallel_plan=str(tmp_path / "plan.json"),
        auto_parallel_check_steps=5,
        recompute_granularity="full",
    )

    def write(plan):
        plan.write(tmp_path / "plan.json")
        return arguments

    return write


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


def test_a_plan_for_mindspeeds_late_layout_strings_has_its_list_instead(monkeypatch):
    """MindSpeed installs layout strings on import, by the command line: one that a plan set was not read."""
    late = types.SimpleNamespace(PipelineModelParallelLayoutFeature=object)
    arguments = argparse.Namespace(pipeline_model_parallel_layout=None, num_layer_list=None, noop_layers=None)
    plan = make_plan({"text_decoder": [1, 2]})
    assert "pipeline_model_parallel_layout" in stage_arguments(plan, arguments)
    monkeypatch.setitem(sys.modules, "mindspeed.features_manager", late)
    assert stage_arguments(plan, arguments) == {"num_layer_list": "1,2"}


def test_a_plan_does_not_turn_sequence_parallelism_on_where_mindspeed_mm_then_trains_otherwise(job, monkeypatch):
    monkeypatch.setitem(sys.modules, "mindspeed_mm", types.ModuleType("mindspeed_mm"))
    one = make_plan({"image_encoder": [4], "text_decoder": [4]}, tensor_size=2)
    arguments = job(replace(one, layout=replace(one.layout, sequence_parallel=True)))
    arguments.sequence_parallel, arguments.variable_seq_lengths = False, True
    with pytest.raises(PlanError, match=r"turns sequence parallelism on, .* gradients over the 2 tensor ranks"):
        prepare(arguments)
    arguments.sequence_parallel = True
    prepare(arguments)


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


@pytest.fixture
def flags_job(job, monkeypatch):
    """Arguments of a language model described by flags, and their command line."""
    arguments = job(make_plan({"text_decoder": [1, 3]}, tensor_size=1))
    del arguments.mm_model

    def give(plan=None, **values):
        words = [f"--{name.replace('_', '-')}" for name, value in values.items() if value not in (False, None)]
        monkeypatch.setattr(sys, "argv", ["script.py", *words])
        if plan is not None:
            job(plan)
        vars(arguments).update(num_layers=4, pipeline_model_parallel_layout=None, **values)
        return arguments

    return give


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("shared", [False, True], ids=["replicated", "distributed optimizer"])
def test_the_scripts_overlaps_stay_on_where_megatron_allows_them(flags_job, capsys, reduce, gather, planned, shared):
    plan = make_plan({"text_decoder": [1, 3]}, overlap_gradient_reduce=planned, distributed_optimizer=shared)
    arguments = flags_job(plan, overlap_grad_reduce=reduce, overlap_param_gather=gather)
    prepare(arguments)
    assert arguments.overlap_grad_reduce == (reduce or planned)
    # Megatron's two assertions about --overlap-param-gather.
    assert arguments.overlap_param_gather == (gather and shared and (reduce or planned))
    lines = capsys.readouterr().out.splitlines()
    switched_off = gather and not arguments.overlap_param_gather
    assert ("replaced by the plan: --overlap-param-gather, True in the script, False now" in lines) == switched_off
    assert any(line.startswith("kept from the script: --overlap-grad-reduce") for line in lines) == (
        reduce and not planned
    )


@pytest.mark.parametrize(
    ("layout", "recompute", "stays"),
    [
        ({"expert_size": 2, "data_size": 2}, None, True),
        ({"data_size": 2}, None, False),
        ({"expert_size": 2, "data_size": 2}, {"text_decoder": [1]}, False),
    ],
    ids=["as Megatron allows", "no expert ranks", "recomputed"],
)
def test_the_scripts_combined_1f1b_stays_where_megatron_allows_it(
    flags_job, capsys, monkeypatch, layout, recompute, stays
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    plan = make_plan({"text_decoder": [4]}, recompute, **layout)
    arguments = flags_job(plan, overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=True)
    prepare(arguments)
    assert (arguments.overlap_moe_expert_parallel_comm, arguments.delay_wgrad_compute) == (stays, stays)
    output = capsys.readouterr().out
    assert ("kept from the script: --overlap-moe-expert-parallel-comm" in output) == stays
    assert ("replaced by the plan: --delay-wgrad-compute, True in the script, False now" in output) == (not stays)


@pytest.mark.parametrize("chunks", [1, 2])
def test_gathering_along_with_the_step_stays_on_with_virtual_stages_alone(flags_job, capsys, chunks):
    """Otherwise the training ends in an assertion of Megatron (a functional test of 0.19)."""
    plan = make_plan({"text_decoder": [1] * 2 * chunks}, virtual_size=chunks, distributed_optimizer=True)
    name = "overlap_param_gather_with_optimizer_step"
    arguments = flags_job(plan, overlap_grad_reduce=True, overlap_param_gather=True, **{name: True})
    arguments.num_layers = 2 * chunks
    prepare(arguments)
    assert getattr(arguments, name) == (chunks == 2) and arguments.overlap_param_gather
    line = f"replaced by the plan: --{name.replace('_', '-')}, True in the script, False now"
    assert (line in capsys.readouterr().out) == (chunks == 1)


def test_no_gather_is_hidden_beside_the_legacy_models_of_0_12(flags_job, capsys):
    """Otherwise the training ends in an assertion of Megatron (four functional tests of 0.12)."""
    overlaps = {"overlap_gradient_reduce": True, "overlap_parameter_gather": True, "distributed_optimizer": True}
    for legacy in (False, True):
        arguments = flags_job(make_plan({"text_decoder": [1, 3]}, **overlaps), use_legacy_models=legacy)
        arguments.overlap_param_gather = False
        prepare(arguments)
        assert arguments.overlap_param_gather == (not legacy)
        assert ("missing: --overlap-param-gather" in capsys.readouterr().out) == legacy


@pytest.mark.parametrize(("sizes", "stay"), [([2, 2], False), ([1, 1], True)])
def test_a_hierarchy_of_context_parallel_ranks_stays_with_its_own_size_alone(flags_job, capsys, sizes, stay):
    """Otherwise Megatron's assertion of the product ends the training (a functional test of four releases)."""
    arguments = flags_job(hierarchical_context_parallel_sizes=sizes, cp_comm_type=["a2a+p2p"])
    prepare(arguments)
    assert arguments.hierarchical_context_parallel_sizes == (sizes if stay else None)
    assert arguments.cp_comm_type == (["a2a+p2p"] if stay else ["p2p"])
    assert ("replaced by the plan: --hierarchical-context-parallel-sizes" in capsys.readouterr().out) == (not stay)


def test_recomputation_in_advance_is_not_left_on_under_a_plan(flags_job, capsys):
    arguments = flags_job(recompute_in_advance=True)
    prepare(arguments)
    assert not arguments.recompute_in_advance
    assert "replaced by the plan: --recompute-in-advance, True in the script, False now" in capsys.readouterr().out


def test_a_plan_with_fewer_expert_ranks_than_groups_of_a_token_is_refused(flags_job):
    """MindSpeed-LLM's groups are the expert ranks; its deepseek2 test ended in an assertion under such a plan."""
    with pytest.raises(
        PlanError, match=r"size 1, and group_limited_greedy with --moe-router-group-topk 3 needs 4 or more"
    ):
        prepare(flags_job(moe_router_load_balancing_type="group_limited_greedy", moe_router_group_topk=3))
    prepare(flags_job(moe_router_load_balancing_type="aux_loss", moe_router_group_topk=3))


@pytest.mark.parametrize("flag", ["recompute_in_advance", "recompute_in_bubble"])
def test_a_plan_without_virtual_stages_is_refused_beside_mindspeeds_schedule_for_them(flags_job, monkeypatch, flag):
    """MindSpeed replaces the schedule on import; switched off later, it ended with a TypeError in the first step."""
    monkeypatch.setitem(sys.modules, "mindspeed", types.ModuleType("mindspeed"))
    line = rf"has 1 virtual stage .* schedule for --{flag.replace('_', '-')} needs 2 or more. Leave that flag out"
    with pytest.raises(PlanError, match=line):
        prepare(flags_job(**{flag: True}))


@pytest.mark.parametrize("split", [[1, 3], [4]])
def test_switches_of_pipelines_stay_on_under_a_plan_with_such_a_pipeline_alone(flags_job, capsys, split):
    """Otherwise Megatron's checks of its configuration, after those of arguments, end functional tests of four
    releases."""
    arguments = flags_job(
        make_plan({"text_decoder": split}, tensor_size=3 - len(split)),
        overlap_p2p_comm_warmup_flush=True,
        defer_embedding_wgrad_compute=True,
    )
    prepare(arguments)
    assert not arguments.overlap_p2p_comm_warmup_flush, "the plan has no virtual stages"
    assert arguments.defer_embedding_wgrad_compute == (len(split) > 1)
    said = capsys.readouterr().out
    assert re.search(r"replaced by the plan: --overlap-p2p\S+-warmup-flush, True in the script, False now", said)
    assert ("--defer-embedding-wgrad-compute, True in the script, False now" in said) == (len(split) == 1)


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


@pytest.mark.parametrize("name", ["use_megatron_fsdp", "use_torch_fsdp2"])
def test_a_plan_of_whole_parameters_does_not_train_a_script_that_shards_them(flags_job, name):
    with pytest.raises(ConfigError, match=f"--auto-parallel-plan .* --{name.replace('_', '-')}"):
        prepare(flags_job(**{name: True}))


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


def test_a_plan_of_another_model_is_refused(job):
    with pytest.raises(PlanError, match=r"another model.*image_encoder 4 layers"):
        prepare(job(make_plan(TWO, model_hash="0" * 64)))


def test_the_models_own_hash_is_accepted(job):
    arguments = job(make_plan(TWO))
    prepare(job(make_plan(TWO, model_hash=describe(arguments).model_hash)))


def test_another_number_of_processes_is_refused(job, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(PlanError, match=r"for 2 devices .* but 4 processes"):
        prepare(job(make_plan(TWO)))


def test_a_plan_with_lost_layers_is_refused(job):
    from dataclasses import replace

    plan = make_plan(TWO)
    broken = replace(
        plan, stages=(plan.stages[0], replace(plan.stages[1], layers={"image_encoder": 0, "text_decoder": 2}))
    )
    with pytest.raises(PlanError, match="3 in all; the model has 4"):
        prepare(job(broken))


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


def test_a_language_model_gets_megatrons_own_layout_string():
    plan = make_plan({"text_decoder": [5, 11, 9]})
    assert pipeline_layout(plan) == "Et*5|t*11|t*9L"
    arguments = SimpleNamespace(pipeline_model_parallel_layout=None)
    words = native_flags(plan, stage_arguments(plan, arguments))
    assert words[words.index("--pipeline-model-parallel-layout") + 1] == "Et*5|t*11|t*9L"
    assert words[words.index("--pipeline-model-parallel-size") + 1] == "3"


def test_layers_of_multi_token_prediction_stand_before_the_loss():
    plan = make_plan({"text_decoder": [5, 11, 9]})
    arguments = SimpleNamespace(pipeline_model_parallel_layout=None, mtp_num_layers=2)
    assert stage_arguments(plan, arguments)["pipeline_model_parallel_layout"] == "Et*5|t*11|t*9mmL"


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([4, 4, 4], {}),
        ([5, 4, 2], {"decoder_first_pipeline_num_layers": 5, "decoder_last_pipeline_num_layers": 2}),
        ([3, 2], {"decoder_first_pipeline_num_layers": 3}),
    ],
)
def test_a_release_without_layout_strings_gets_first_and_last_stage(layers, said):
    plan = make_plan({"text_decoder": layers})
    assert stage_arguments(plan, SimpleNamespace()) == said
    words = native_flags(plan, said)
    assert ("--decoder-first-pipeline-num-layers" in words) is bool(said)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([2, 2, 2, 2], {"num_layers_per_virtual_pipeline_stage": 2}),
        ([1, 2, 2, 2], {"num_layers_per_virtual_pipeline_stage": 2, "account_for_embedding_in_pipeline_split": True}),
        ([2, 2, 2, 1], {"num_layers_per_virtual_pipeline_stage": 2, "account_for_loss_in_pipeline_split": True}),
        ([3, 1, 3, 1], {"num_virtual_stages_per_pipeline_rank": 2, "decoder_first_pipeline_num_layers": 6}),
    ],
)
def test_a_release_without_layout_strings_gets_chunks(layers, said):
    plan = make_plan({"text_decoder": layers}, virtual_size=2, schedule="interleaved")
    assert stage_arguments(plan, SimpleNamespace()) == said
    for other in ([2, 1, 2, 2], [1, 3, 3, 3]):
        with pytest.raises(PlanError, match="no --pipeline-model-parallel-layout"):
            stage_arguments(
                make_plan({"text_decoder": other}, virtual_size=2, schedule="interleaved"), SimpleNamespace()
            )


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


@pytest.mark.parametrize("layers", [[3, 1], [1, 3], [2, 1, 3], [1, 2, 2, 3], [2, 2]])
def test_a_release_without_layout_strings_reads_the_split_back(layers):
    """0.12 divided by its zero stages between two that were both given."""
    said = stage_arguments(make_plan({"text_decoder": layers}), SimpleNamespace())
    first, last = said.get("decoder_first_pipeline_num_layers"), said.get("decoder_last_pipeline_num_layers")
    # Megatron 0.12's TransformerConfig: what is not given is shared out evenly, and there must be a stage to get it.
    given = [count for count in (first, last) if count is not None]
    between = len(layers) - len(given)
    share, rest = divmod(sum(layers) - sum(given), between)
    assert rest == 0
    read = [share] * between
    assert [first, *read][first is None :] + [last][last is None :] == layers


def test_mindspeed_llm_gets_a_list_of_any_split():
    host = SimpleNamespace(num_layer_list=None, noop_layers=None)
    plan = make_plan({"text_decoder": [4, 3, 5, 2]})
    words = native_flags(plan, stage_arguments(plan, host))
    assert words[words.index("--num-layer-list") + 1] == "4,3,5,2"


def test_a_release_without_layout_strings_refuses_other_splits():
    with pytest.raises(PlanError, match=r"\[4, 3, 5, 2\] layers on its stages, .* those between may not"):
        stage_arguments(make_plan({"text_decoder": [4, 3, 5, 2]}), SimpleNamespace())


def test_two_models_of_a_script_run_one_split_alone():
    runs = make_plan({"vision_model": [4, 0], "language_model": [3, 3]})
    assert stage_arguments(runs, SimpleNamespace(pipeline_model_parallel_layout=None)) == {}
    for layers in (
        {"vision_model": [2, 2], "language_model": [3, 3]},
        {"vision_model": [4, 0], "language_model": [2, 4]},
    ):
        with pytest.raises(
            PlanError, match="vision_model on the first stage and equally many layers of language_model"
        ):
            stage_arguments(make_plan(layers), SimpleNamespace())


def test_megatron_reads_the_layout_string_back():
    layout = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    text = pipeline_layout(make_plan({"text_decoder": [5, 11, 9, 7]}, virtual_size=2))
    parsed = layout.PipelineParallelLayerLayout.from_str(text, 2)
    kinds = [[[layer.name for layer in chunk] for chunk in rank] for rank in parsed.layout]
    assert [[chunk.count("decoder") for chunk in rank] for rank in kinds] == [[5, 9], [11, 7]]
    assert kinds[0][0][0] == "embedding"
    assert kinds[1][1][-1] == "loss"


@pytest.mark.parametrize("host", [{}, {"num_layer_list": None, "noop_layers": None}])
def test_a_host_without_layout_strings_refuses_ends_that_are_alone(host):
    plan = make_plan({"text_decoder": [0, 4, 4, 0]})
    with pytest.raises(PlanError, match="--no-standalone-ends"):
        stage_arguments(plan, SimpleNamespace(**host))


def test_megatron_accepts_ends_that_are_alone():
    """The validator of 0.13 and newer, with MTP beside the loss."""
    layout = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    plan = make_plan({"text_decoder": [0, 4, 4, 0]}, virtual_size=2, schedule="interleaved")
    for mtp, text in ((0, "E|t*4|t*4|L"), (1, "E|t*4|t*4|mL")):
        assert pipeline_layout(plan, mtp) == text
        layout.PipelineParallelLayerLayout(text, 2).validate_layer_layout(8, mtp or None)


def test_virtual_stages_are_a_list_per_chunk():
    plan = make_plan({"text_decoder": [1, 2, 3, 4]}, virtual_size=2, schedule="interleaved")
    assert model_keys(plan, "text_decoder")["pipeline_num_layers"] == [[1, 2], [3, 4]]


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


def test_a_batch_that_changes_during_the_training_is_refused(flags_job):
    """The plan's batch beside it would end in Megatron's ValueError."""
    with pytest.raises(
        ConfigError, match=r"--auto-parallel-plan is for one global batch, and --step-batch-size-schedule"
    ):
        prepare(flags_job(make_plan({"text_decoder": [2, 2]}), step_batch_size_schedule="0:4 1B:8"))


def test_a_plan_that_does_not_run_a_batch_of_a_ramp_is_refused(flags_job):
    """Megatron would end in its assertion, some only after the first batches."""
    plan = make_plan({"text_decoder": [2, 2]})
    pairs = replace(plan, layout=replace(plan.layout, micro_batch_size=2), num_microbatches=4)
    with pytest.raises(PlanError, match=r"--rampup-batch-size trains batches of 5 first: .*leave it out\.$"):
        prepare(flags_job(pairs, rampup_batch_size=[5, 3, 100]))


@pytest.mark.parametrize("given", [{"mtp_num_layers": 1}, {"hybrid_layer_pattern": "M*M*/M"}])
def test_groups_of_layers_beside_multi_token_prediction_are_refused(flags_job, given):
    plan = make_plan({"text_decoder": [2, 2]}, {"text_decoder": [2, 2]}, kind="full:2")
    with pytest.raises(PlanError, match=r"full \(groups of 2\), and Megatron recomputes layers of multi-token"):
        prepare(flags_job(plan, **given))


@pytest.mark.parametrize(
    ("release", "depths", "accepted"), [("0.18.2", 1, False), ("0.18.2", 0, True), ("0.19.0", 1, True)]
)
def test_whole_layers_beside_multi_token_prediction_are_refused_where_megatron_fails(
    flags_job, monkeypatch, release, depths, accepted
):
    monkeypatch.setattr(hybrid, "release_of", lambda distribution: release)
    plan = make_plan({"text_decoder": [2, 2]}, {"text_decoder": [2, 2]}, kind="full")
    arguments = flags_job(plan, mtp_num_layers=depths)
    if accepted:
        prepare(arguments)
        assert arguments.recompute_granularity == "full"
        return
    with pytest.raises(PlanError, match=r"recomputes whole layers, but Megatron 0.18 ends with a TypeError"):
        prepare(arguments)


@pytest.mark.parametrize(
    ("release", "layers", "accepted"), [("0.16.1", 1, False), ("0.16.1", 2, True), ("0.18.0", 1, True)]
)
def test_a_group_that_a_stage_does_not_fill_is_refused_where_megatron_would_end(
    flags_job, monkeypatch, release, layers, accepted
):
    monkeypatch.setattr(applicable, "release_of", lambda distribution: release)
    split = [4 - layers, layers]
    arguments = flags_job(make_plan({"text_decoder": split}, {"text_decoder": split}, kind="full:2"))
    if accepted:
        prepare(arguments)
        assert arguments.recompute_num_layers == 2
        return
    with pytest.raises(PlanError, match=r"this Megatron takes whole groups alone; the plan has \[3, 1\] layers"):
        prepare(arguments)


@pytest.mark.parametrize(("given", "planned", "accepted"), [(1, 2, False), (2, 1, False), (4, 2, True), (1, 1, True)])
def test_mindspeed_needs_context_parallelism_on_the_command_line(flags_job, monkeypatch, given, planned, accepted):
    """It chooses its attention while it is imported, by the command line alone."""
    arguments = flags_job(make_plan({"text_decoder": [1, 3]}, context_size=planned), context_parallel_size=given)
    monkeypatch.setenv("WORLD_SIZE", str(2 * planned))
    monkeypatch.setitem(sys.modules, "mindspeed.features_manager", types.ModuleType("mindspeed.features_manager"))
    if accepted:
        prepare(arguments)
        assert arguments.context_parallel_size == planned
        return
    with pytest.raises(PlanError, match=rf"given: {given}\). Give the script --context-parallel-size {planned}"):
        prepare(arguments)


@pytest.mark.parametrize(
    "accepted",
    [
        None,
        {"ckpt_format": "torch"},
        {"untie_embeddings_and_output_weights": True},
        {"save": None},
        {"mtp_num_layers": 0},
    ],
    ids=str,
)
def test_a_training_that_would_end_at_its_first_checkpoint_does_not_begin(flags_job, accepted):
    """Megatron 0.16, 0.19 and 0.20 end there with an assertion, for any layout of stages."""
    given = {
        "save": "out",
        "ckpt_format": "torch_dist",
        "mtp_num_layers": 1,
        "untie_embeddings_and_output_weights": False,
    }
    arguments = flags_job(make_plan({"text_decoder": [1, 3]}), **{**given, **(accepted or {})})
    if accepted:
        prepare(arguments)
        return
    with pytest.raises(
        PlanError, match=r"the plan has 2 stages, but Megatron fails at the first torch_dist checkpoint"
    ):
        prepare(arguments)


@pytest.mark.parametrize(("tensor", "sequence", "accepted"), [(1, False, False), (2, False, False), (2, True, True)])
def test_mindspeeds_fused_linear_layers_need_sequence_parallelism(flags_job, monkeypatch, tensor, sequence, accepted):
    monkeypatch.setenv("WORLD_SIZE", str(2 * tensor))
    plan = make_plan({"text_decoder": [1, 3]}, tensor_size=tensor, sequence_parallel=sequence)
    arguments = flags_job(plan, use_ascend_mc2=True)
    if accepted:
        prepare(arguments)
        return
    with pytest.raises(PlanError, match=rf"size {tensor} without sequence .* Leave that flag out of the script"):
        prepare(arguments)


@pytest.mark.parametrize(("tensor", "extended"), [(1, False), (2, True), (2, False)])
def test_overlapped_whole_experts_take_no_tensor_parallelism(flags_job, monkeypatch, tensor, extended):
    """MindSpeed asserted "needs `moe_tp_extend_ep`"."""
    monkeypatch.setenv("WORLD_SIZE", str(2 * tensor))
    given = {"moe_alltoall_overlap_comm": True, "moe_token_dispatcher_type": "alltoall_seq"}
    plan = make_plan({"text_decoder": [1, 3]}, tensor_size=tensor)
    arguments = flags_job(plan, **given, moe_tp_extend_ep=extended)
    if tensor == 1 or extended:
        prepare(arguments)
        return
    with pytest.raises(PlanError, match=r"size 2, and MindSpeed runs --moe-alltoall-overlap-comm .* --moe-tp-extend"):
        prepare(arguments)


@pytest.mark.parametrize(("tensor", "accepted"), [(2, False), (4, True)])
def test_a_grid_of_tensor_ranks_keeps_its_size(flags_job, monkeypatch, tensor, accepted):
    """MindSpeed asserted "need satisfy tp = tp_x * tp_y"."""
    monkeypatch.setenv("WORLD_SIZE", str(2 * tensor))
    arguments = flags_job(make_plan({"text_decoder": [1, 3]}, tensor_size=tensor), tp_2d=True, tp_x=2, tp_y=2)
    if accepted:
        prepare(arguments)
        return
    with pytest.raises(PlanError, match=r"size 2, and --tp-2d runs on --tp-x 2 times --tp-y 2 ranks"):
        prepare(arguments)


def test_a_grid_of_tensor_ranks_takes_no_sequence_parallelism(flags_job, monkeypatch):
    """MindSpeed asserted "2d tp does not support sequence parallel"."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    plan = make_plan({"text_decoder": [1, 3]}, tensor_size=4)
    split = replace(plan, layout=replace(plan.layout, sequence_parallel=True))
    with pytest.raises(PlanError, match=r"with sequence parallelism, and --tp-2d runs .* without"):
        prepare(flags_job(split, tp_2d=True, tp_x=2, tp_y=2))


def test_recompute_without_a_flag_of_the_host_is_refused():
    some = make_plan({"text_decoder": [2, 2]}, {"text_decoder": [2, 1]}, kind="selective:mlp")
    with pytest.raises(PlanError, match=r"selective \(mlp\) in some layers only"):
        kind_everywhere(some)
    with pytest.raises(PlanError, match=r"selective \(mlp\) in text_decoder"):
        model_keys(some, "text_decoder")


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


def test_processes_that_share_cores_get_the_note_that_times_are_not_comparable():
    assert crowding(2, 2) == ""
    assert "4 processes share 2 cores" in crowding(4, 2)


def test_the_comparison_shows_the_worst_rank_of_each_stage():
    ranks = [
        {"step_us": 900.0, "peak_bytes": 100 * MIB, "steps_us": [2500.0, 900.0, 700.0]},
        {"step_us": 800.0, "peak_bytes": 50 * MIB, "steps_us": [800.0]},
    ]
    text = comparison(make_plan(TWO), ranks)
    assert "(timed steps: 0.7 to 2.5 ms)" in text
    assert "+11.1 %" in text
    assert "+0.0 %" in text
    assert "+100.0 %" in text


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


@pytest.mark.parametrize(
    ("arguments", "installed", "expected"),
    [
        ({"tp_comm_overlap": False, "transformer_impl": "transformer_engine"}, True, {"tp_comm_overlap": True}),
        ({"tp_comm_overlap": True, "transformer_impl": "transformer_engine"}, True, {}),
        ({"tp_comm_overlap": False, "transformer_impl": "local"}, True, "--transformer-impl transformer_engine"),
        ({"tp_comm_overlap": False, "transformer_impl": "transformer_engine"}, False, "not installed"),
        ({"transformer_impl": "transformer_engine"}, True, "no such flag"),
    ],
)
def test_an_overlap_that_the_plan_was_priced_with_is_turned_on_or_named(
    monkeypatch, capsys, arguments, installed, expected
):
    monkeypatch.setattr(overlaps.importlib.util, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setenv("RANK", "0")
    plan = make_plan({"text_decoder": (4,)}, tensor_size=2, sequence_parallel=True, overlap_tensor_parallel=True)
    found = overlaps.tensor_overlap(plan, argparse.Namespace(**arguments))
    printed = capsys.readouterr().out
    if isinstance(expected, dict):
        assert (found, printed) == (expected, "")
    else:
        assert found == {} and "missing: --tp-comm-overlap" in printed and expected in printed
        slower = replace(plan, extra=replace(plan.extra, unoverlapped_us=1.25 * plan.step.total_us))
        assert overlaps.tensor_overlap(slower, argparse.Namespace(**arguments)) == {}
        assert "(+25.0%)" in capsys.readouterr().out
    plain = replace(plan, layout=replace(plan.layout, overlap_tensor_parallel=False))
    assert overlaps.tensor_overlap(plain, argparse.Namespace(**arguments)) == {}


@pytest.mark.parametrize(
    ("script", "differ"),
    [
        ({"bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwise", "grad_reduce_in_bf16": True}, ""),
        ({"bf16": True, "grad_reduce_in_bf16": True}, "precision bf16 (planned: fp8)"),
        ({"bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwise"}, "grad_reduce_in_bf16 False (planned: True)"),
        ({"bf16": True, "fp8": "hybrid", "fp8_recipe": "mxfp8", "cpu_offloading": True}, ""),
    ],
)
def test_switches_that_a_plan_was_not_priced_with_are_named(monkeypatch, capsys, script, differ):
    monkeypatch.setenv("RANK", "0")
    plan = make_plan({"text_decoder": (4,)})
    plan = replace(plan, profile=replace(plan.profile, train={"precision": "fp8", "grad_reduce_in_bf16": True}))
    overlaps.print_other_switches(plan, argparse.Namespace(**script))
    printed = capsys.readouterr().out
    assert (differ in printed and "`plan --script`" in printed) if differ else printed == ""
    measured = replace(plan, profile=replace(plan.profile, train={}))
    overlaps.print_other_switches(measured, argparse.Namespace(**script))
    assert capsys.readouterr().out == ""
