"""Plans that the host cannot train under are refused before the training."""

import sys
import types
from dataclasses import replace

import pytest
from made_plans import TWO, make_plan

from mindspeed_autoparallel.errors import ConfigError, PlanError
from mindspeed_autoparallel.runtime.features.apply_plan import applicable
from mindspeed_autoparallel.runtime.features.apply_plan.entry import prepare
from mindspeed_autoparallel.runtime.megatron import hybrid
from mindspeed_autoparallel.runtime.megatron.description import describe


def test_a_plan_does_not_turn_sequence_parallelism_on_where_mindspeed_mm_then_trains_otherwise(job, monkeypatch):
    monkeypatch.setitem(sys.modules, "mindspeed_mm", types.ModuleType("mindspeed_mm"))
    one = make_plan({"image_encoder": [4], "text_decoder": [4]}, tensor_size=2)
    arguments = job(replace(one, layout=replace(one.layout, sequence_parallel=True)))
    arguments.sequence_parallel, arguments.variable_seq_lengths = False, True
    with pytest.raises(PlanError, match=r"turns sequence parallelism on, .* gradients over the 2 tensor ranks"):
        prepare(arguments)
    arguments.sequence_parallel = True
    prepare(arguments)


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


@pytest.mark.parametrize("name", ["use_megatron_fsdp", "use_torch_fsdp2"])
def test_a_plan_of_whole_parameters_does_not_train_a_script_that_shards_them(flags_job, name):
    with pytest.raises(ConfigError, match=f"--auto-parallel-plan .* --{name.replace('_', '-')}"):
        prepare(flags_job(**{name: True}))


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
