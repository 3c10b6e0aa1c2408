"""Attention heads and groups decide which tensor-parallel sizes are measured."""

import argparse
from dataclasses import replace

import pytest
from language_profile import language_profile
from search_arguments import SEARCH_ARGUMENTS
from small_profile import small_profile

from mindspeed_autoparallel.errors import ConfigError, ProfileError
from mindspeed_autoparallel.runtime.features.auto_parallel_mm import search as searching
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.request import read_request
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.search import search
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.source import profile_source
from mindspeed_autoparallel.runtime.megatron import hybrid

COMMON = {
    **SEARCH_ARGUMENTS,
    "num_layers": 4,
    "num_attention_heads": 4,
    "nproc_per_node": 4,
    "context_parallel_size": 1,
    "auto_parallel_time_limit_s": 60,
}


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        # Megatron's default is one group, and means nothing without its switch.
        ({"num_query_groups": 1, "group_query_attention": False}, {1, 2, 4}),
        ({"num_query_groups": 2, "group_query_attention": True}, {1, 2}),
        ({"num_query_groups": 1, "group_query_attention": True}, {1}),
    ],
)
def test_groups_count_where_heads_are_grouped(tmp_path, flags, sizes):
    request = read_request(argparse.Namespace(**COMMON, **flags, auto_parallel_work_dir=str(tmp_path)))
    assert {point.tensor_size for point in request.points()} == sizes


@pytest.mark.parametrize(("flags", "tensor_ranks_share_tokens"), [({}, False), ({"num_experts": 4}, True)])
def test_tensor_parallel_experts_are_measured_with_sequence_parallelism(tmp_path, flags, tensor_ranks_share_tokens):
    # Megatron trains experts with TP above 1 in no other way: the first forward raises.
    request = read_request(argparse.Namespace(**COMMON, **flags, auto_parallel_work_dir=str(tmp_path)))
    asked = {(point.tensor_size > 1, point.sequence_parallel) for point in request.points()}
    assert asked == {(False, False), (True, tensor_ranks_share_tokens)}


@pytest.mark.parametrize(("expert_size", "sizes"), [(1, {1, 2, 4}), (2, {1, 2}), (4, {1})])
def test_experts_and_tensor_ranks_are_measured_on_the_devices_that_are_there(tmp_path, expert_size, sizes):
    """Megatron gives every expert TP ranks of its own: two devices cannot measure TP 2 with EP 2, and the search must
    leave that point out."""
    flags = {"num_experts": 4, "expert_model_parallel_size": expert_size}
    request = read_request(argparse.Namespace(**COMMON, **flags, auto_parallel_work_dir=str(tmp_path)))
    assert {point.tensor_size for point in request.points()} == sizes


@pytest.mark.parametrize(
    ("given", "expert_size", "points"),
    [
        # (TP, ETP), 0: as TP. Whole experts leave room for twice the expert ranks, and are measured beside shared ones.
        ({"expert_tensor_parallel_size": None}, 2, {(1, 0), (2, 0), (2, 1), (4, 1)}),
        ({"expert_tensor_parallel_size": None}, 4, {(1, 0), (2, 1), (4, 1)}),
        # The script's own is kept.
        ({"expert_tensor_parallel_size": 1}, 2, {(1, 0), (2, 1), (4, 1)}),
        ({"expert_tensor_parallel_size": 2}, 2, {(2, 0), (4, 2)}),
        # Megatron's oldest dispatcher runs the tensor size alone.
        ({"expert_tensor_parallel_size": None, "moe_token_dispatcher_type": "alltoall_seq"}, 2, {(1, 0), (2, 0)}),
        ({}, 2, {(1, 0), (2, 0)}),
    ],
)
def test_experts_that_tensor_ranks_do_not_share_are_measured_too(tmp_path, given, expert_size, points):
    flags = {"num_experts": 4, "expert_model_parallel_size": expert_size, **given}
    request = read_request(argparse.Namespace(**COMMON, **flags, auto_parallel_work_dir=str(tmp_path)))
    assert {(point.tensor_size, point.expert_tensor_size) for point in request.points()} == points


@pytest.mark.parametrize(("mib", "size"), [(None, None), (6.12, int(6.12 * 2**20)), (8192, 2**33)])
def test_a_memory_limit_may_be_a_fraction_of_a_mib(tmp_path, mib, size):
    given = {**COMMON, "auto_parallel_memory_limit_mib": mib, "auto_parallel_work_dir": str(tmp_path)}
    assert read_request(argparse.Namespace(**given)).memory_limit_bytes == size


@pytest.mark.parametrize(
    ("flags", "sizes", "num_played"),
    [
        ({}, {1, 2, 4}, 4),
        ({"context_parallel_size": 3}, {1, 2, 4}, 12),
        ({"num_experts": 4, "expert_model_parallel_size": 4}, {1, 2, 4}, 16),
        ({"simulated_nproc_per_node": 2}, {1, 2}, 2),
        ({"simulated_nproc_per_node": 1}, {1}, 0),
        ({"nproc_per_node": 2}, {1, 2}, 0),
        # One device on each of several nodes: the first plays, unless nodes of the cluster have one device, too.
        ({"nnodes": 2}, {1, 2, 4}, 4),
        ({"nnodes": 2, "simulated_nnodes": 4, "simulated_nproc_per_node": 1}, {1}, 0),
    ],
)
def test_one_device_plays_a_rank_of_every_layout(tmp_path, flags, sizes, num_played):
    given = {**COMMON, "nproc_per_node": 1, **flags, "auto_parallel_work_dir": str(tmp_path)}
    request = read_request(argparse.Namespace(**given))
    assert {point.tensor_size for point in request.points()} == sizes
    assert request.num_played == num_played
    for point in request.points() if num_played else ():
        assert num_played % (point.tensor_size * point.context_size) == 0
        assert num_played % ((point.expert_tensor_size or point.tensor_size) * point.expert_size) == 0


@pytest.mark.parametrize(("flags", "name"), [({}, None), ({"profile_device": "H100"}, "H100")])
def test_a_device_that_measures_alone_may_use_the_links_of_a_named_device(tmp_path, flags, name):
    given = {**COMMON, "nproc_per_node": 1, **flags, "auto_parallel_work_dir": str(tmp_path)}
    request = read_request(argparse.Namespace(**given))
    assert (request.link_device.name if request.link_device else None) == name
    with pytest.raises(ConfigError, match="--profile-device is for --profile-source analytic"):
        read_request(argparse.Namespace(**{**given, "nproc_per_node": 2, "profile_device": "H100"}))


@pytest.mark.parametrize("mib", [0.0, -1.0, float("nan"), float("inf"), 1e308])
def test_a_memory_limit_that_cannot_be_is_refused(tmp_path, mib):
    given = {**COMMON, "auto_parallel_memory_limit_mib": mib, "auto_parallel_work_dir": str(tmp_path)}
    with pytest.raises(ConfigError, match="memory limit of a device must be above 0"):
        read_request(argparse.Namespace(**given))


@pytest.mark.parametrize("overlap", [False, True])
def test_layouts_are_searched_with_the_scripts_own_overlap(tmp_path, overlap):
    given = {**COMMON, "nproc_per_node": 2, "simulated_nproc_per_node": 2, "overlap_grad_reduce": overlap}
    arguments = argparse.Namespace(**given, auto_parallel_work_dir=str(tmp_path))
    plan = search(read_request(arguments), small_profile(), arguments)
    layouts = [plan.layout, *(other.layout for other in plan.alternatives)]
    assert {layout.overlap_gradient_reduce for layout in layouts} == {overlap}


def test_too_few_measuring_devices_are_named_with_all_that_they_must_hold(tmp_path):
    flags = {"num_experts": 4, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 2}
    arguments = {**COMMON, **flags, "auto_parallel_work_dir": str(tmp_path)}
    said = "4 measuring devices .* --expert-model-parallel-size 4 x --expert-tensor-parallel-size 2"
    with pytest.raises(ConfigError, match=said):
        read_request(argparse.Namespace(**arguments))
    # Planning from a profile measures nothing.
    assert read_request(argparse.Namespace(**arguments, auto_parallel_profile_file="p.json")).profile_file


@pytest.mark.parametrize(("release", "whole"), [("0.18.2", False), ("0.19.0", True)])
def test_a_search_recomputes_whole_layers_where_megatron_can(tmp_path, monkeypatch, release, whole):
    """0.18 fails in those of multi-token prediction."""
    monkeypatch.setattr(hybrid, "release_of", lambda distribution: release)
    given = {**COMMON, "mtp_num_layers": 1, "auto_parallel_work_dir": str(tmp_path)}
    arguments = argparse.Namespace(**given)
    profile = small_profile(capacity_mib=4000)
    found = searching._what_the_host_runs(read_request(arguments), profile, arguments)
    kinds = {kind for module in found.measurements[0].modules.values() for kind in module.layer.recompute}
    assert "none" in kinds and ("full" in kinds) == whole


def test_a_ramp_leaves_out_what_does_not_divide_its_first_batch(tmp_path):
    """Megatron asserts it at every batch; 16 alone allows MBS4 on four replicas."""
    given = {**COMMON, "global_batch_size": 16, "rampup_batch_size": ["6", "10", "16"], "simulated_nproc_per_node": 4}
    arguments = argparse.Namespace(**given, auto_parallel_work_dir=str(tmp_path))
    request = read_request(arguments)
    assert {point.micro_batch_size for point in request.points()} == {1, 2}
    plan = search(request, small_profile(), arguments)
    assert 6 % (plan.layout.data_size * plan.layout.micro_batch_size) == 0
    reasons = [verdict.reason for verdict in plan.search.verdicts]
    assert any("--rampup-batch-size trains batches of 6 first: global batch 6 is not" in reason for reason in reasons)


def test_a_batch_that_changes_during_the_training_is_refused_by_its_flag(tmp_path):
    """Megatron takes no --global-batch-size beside it: naming that one would end in its ValueError."""
    given = {**COMMON, "global_batch_size": None, "step_batch_size_schedule": "0:384 200B:768"}
    with pytest.raises(
        ConfigError, match=r"--auto-parallel-mm is for one .* --step-batch-size-schedule 0:384 200B:768 "
    ):
        read_request(argparse.Namespace(**given, auto_parallel_work_dir=str(tmp_path)))


def test_the_output_folder_is_checked_before_anything_is_measured_on_the_node_that_writes(tmp_path):
    """It was found to be a file when the plan was written, after measurements and search."""
    (tmp_path / "file").touch()
    given = {
        **COMMON,
        "auto_parallel_work_dir": str(tmp_path / "w"),
        "auto_parallel_output_dir": str(tmp_path / "file"),
    }
    with pytest.raises(ConfigError, match=r"--auto-parallel-output-dir .*/file cannot be a folder"):
        read_request(argparse.Namespace(**given))
    assert read_request(argparse.Namespace(**{**given, "nnodes": 2, "node_rank": 1}))


@pytest.mark.parametrize("model_hash", ["", "another"])
@pytest.mark.parametrize("layers", [32, 33])
def test_the_profile_of_another_model_is_refused(model_hash, layers, tmp_path):
    """Its plan was written with the advice to train with it, and the training refused it."""
    whole = language_profile()
    (decoder,) = whole.model.modules
    profile = replace(whole, provenance=replace(whole.provenance, model_hash=model_hash))
    profile.write(tmp_path / "profile.json")
    given = {**COMMON, "num_layers": layers, "auto_parallel_work_dir": str(tmp_path / "work")}
    arguments = argparse.Namespace(**given, auto_parallel_profile_file=str(tmp_path / "profile.json"))
    request = read_request(arguments)
    if decoder.num_layers == layers and not model_hash:
        assert profile_source(request, arguments) == profile
        return
    with pytest.raises(
        ProfileError, match=f"another model.*: .* {decoder.num_layers} layers there, .* {layers} layers here"
    ):
        profile_source(request, arguments)


def test_costs_of_a_file_and_computed_ones_exclude_each_other(tmp_path):
    given = {**COMMON, "profile_source": "analytic", "profile_device": "H100", "auto_parallel_profile_file": "p.json"}
    with pytest.raises(ConfigError, match=r"p\.json has the costs, and --profile-source analytic computes them"):
        read_request(argparse.Namespace(**given, auto_parallel_work_dir=str(tmp_path)))
