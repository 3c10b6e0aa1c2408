"""The searched dimensions follow from model, ranks and host; each omitted one has a reason."""

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.planning import plan_search
from mindspeed_autoparallel.runtime.features.auto_tuning.request import read_request
from mindspeed_autoparallel.runtime.megatron import hybrid

HOST = argparse.Namespace(recompute_granularity=None, recompute_modules=None, pipeline_model_parallel_layout=None)


def arguments(tmp_path, **changes):
    values = {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "seq_length": 8192,
        "micro_batch_size": 1,
        "global_batch_size": 12,
        "nnodes": 1,
        "nproc_per_node": 8,
        "node_rank": 0,
        "master_addr": "localhost",
        "master_port": 6000,
        "auto_tuning_ranks": 16,
        "auto_tuning_work_dir": str(tmp_path / "work"),
        "auto_tuning_knowledge_base": None,
        "auto_tuning_memory_limit_mib": None,
        "auto_tuning_launch_timeout_s": 60,
        "auto_tuning_verify": False,
        "auto_tuning_log_level": "info",
    }
    return argparse.Namespace(**{**values, **changes})


@pytest.fixture
def request_(tmp_path):
    return read_request(arguments(tmp_path))


def sizes(plan, name):
    return sorted({getattr(point, name) for point in plan.points})


def test_sizes_follow_heads_ranks_sequence_and_batch(request_):
    plan = plan_search(request_, HOST, "cuda")
    assert sizes(plan, "tensor_size") == [1, 2, 4, 8]
    assert sizes(plan, "context_size") == [1, 2, 4, 8]
    assert sizes(plan, "micro_batch_size") == [1, 2, 4]
    assert "12 is not divisible by 8" in plan.left_out["micro batch 8"]
    assert plan.left_out["expert parallel"] == "the model has no experts"


def test_a_size_that_heads_do_not_divide_is_left_out_with_the_numbers(request_):
    plan = plan_search(replace(request_, num_heads=6, num_query_groups=6), HOST, "cuda")
    assert sizes(plan, "tensor_size") == [1, 2]
    assert plan.left_out["tensor parallel 4"] == "6 heads cannot be split over 4"


def test_a_short_sequence_is_not_split_unless_the_script_splits_it(request_):
    short = replace(request_, sequence_length=1024)
    assert sizes(plan_search(short, HOST, "cuda"), "context_size") == [1]
    assert "leaves 512 tokens per rank" in plan_search(short, HOST, "cuda").left_out["context parallel 2"]
    assert sizes(plan_search(replace(short, context_size=2), HOST, "cuda"), "context_size") == [1, 2]


def test_context_sizes_that_the_ranks_cannot_hold_are_not_listed_as_searched(request_):
    plan = plan_search(replace(request_, context_size=64), HOST, "cuda")
    assert plan.searched["context parallel"] == "1, 2, 4, 8"
    assert plan.left_out["context parallel 64"] == "16 ranks are not a multiple of it"


def test_experts_bring_their_dimensions(request_):
    host = argparse.Namespace(**vars(HOST), moe_token_dispatcher_type="alltoall", expert_tensor_parallel_size=None)
    plan = plan_search(replace(request_, num_experts=4), host, "cuda")
    assert sizes(plan, "expert_size") == [1, 2, 4]
    assert [way.title for way in plan.variants] == ["", "allgather dispatcher", "whole experts"]
    assert all(point.sequence_parallel == (point.tensor_size > 1) for point in plan.points)


def test_expert_sizes_that_mindspeed_does_not_run_are_left_out_by_name(tmp_path):
    given = arguments(tmp_path, moe_router_load_balancing_type="group_limited_greedy", moe_router_group_topk=2)
    request = replace(read_request(given), num_experts=8)
    plan = plan_search(request, HOST, "cuda")
    assert sizes(plan, "expert_size") == [4, 8]
    reason = "group_limited_greedy with --moe-router-group-topk 2 needs 3 or more"
    assert (plan.left_out["expert parallel 1"], plan.left_out["expert parallel 2"]) == (reason, reason)
    with pytest.raises(ConfigError, match=f"no expert-parallel size up to 2 fits: {reason}. Tune for more ranks"):
        plan_search(replace(request, num_experts=2), HOST, "cuda")


def test_whole_layers_are_not_recomputed_where_megatron_fails_beside_multi_token_prediction(request_, monkeypatch):
    host = argparse.Namespace(**vars(HOST), mtp_num_layers=1)
    for release, whole in (("0.18.2", False), ("0.19.0", True)):
        monkeypatch.setattr(hybrid, "release_of", lambda distribution, release=release: release)
        plan = plan_search(request_, host, "cuda")
        assert ("full" in plan.dimensions.recompute, "recompute of whole layers" in plan.left_out) == (whole, not whole)


def test_modules_are_recomputed_alone_and_together_with_what_is_cheap(request_):
    plan = plan_search(request_, HOST, "cuda")
    assert [settings["recompute_modules"] for settings in plan.recompute.values()] == [
        ["core_attn"],
        ["layernorm"],
        ["mlp"],
        ["core_attn", "layernorm"],
        ["core_attn", "layernorm", "mlp"],
    ]
    assert set(plan.recompute) >= {"selective:mlp", "selective:core_attn,layernorm,mlp"}
    own = argparse.Namespace(**{**vars(HOST), "recompute_modules": ["mlp", "core_attn"]})
    assert "selective:mlp,core_attn" in plan_search(request_, own, "cuda").recompute


def test_modules_of_experts_are_recomputed_where_megatron_can(request_):
    moe = replace(request_, num_experts=4)
    plain = plan_search(moe, HOST, "cuda")
    assert {"selective:moe", "selective:core_attn,layernorm,moe"} <= set(plain.recompute)
    assert "--moe-grouped-gemm" in plain.left_out["recompute of moe_act"]
    assert "no shared experts" in plain.left_out["recompute of shared_experts"]
    rich = argparse.Namespace(
        **vars(HOST),
        moe_grouped_gemm=True,
        moe_shared_expert_intermediate_size=64,
        moe_shared_expert_overlap=False,
        multi_latent_attention=True,
    )
    kinds = set(plan_search(moe, rich, "cuda").recompute)
    assert {"selective:moe_act", "selective:mla_up_proj", "selective:shared_experts"} <= kinds
    # The activation is inside of the experts: with both Megatron would compute it again twice.
    assert not any({"moe", "moe_act"} <= set(kind.split(":")[1].split(",")) for kind in kinds)


def test_switches_that_host_or_device_lack_are_left_out_with_the_reason(request_):
    plan = plan_search(request_, argparse.Namespace(), "cpu")
    assert plan.dimensions.recompute == ("none",)
    assert not plan.dimensions.uneven_stages
    assert "--moe-expert-capacity-factor" in plan.left_out["expert capacity and token dropping"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nnodes": 2, "auto_tuning_ranks": 8}, "at least 16 ranks"),
        ({"auto_tuning_ranks": 12}, "the nearest are 8 and 16"),
        ({"node_rank": 1}, "--node-rank must be 0 to 0"),
        ({"seq_length": 10, "context_parallel_size": 4}, "--context-parallel-size 4"),
        ({"global_batch_size": None}, "--global-batch-size"),
        ({"num_layers": 0}, "--num-layers"),
        ({"auto_tuning_work_dir": "/proc/none"}, "cannot write to the work dir"),
    ],
)
def test_bad_input_is_named_before_anything_starts(tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        read_request(arguments(tmp_path, **changes))


def test_the_work_dir_is_private(tmp_path):
    request = read_request(arguments(tmp_path))
    assert Path(request.work_dir).stat().st_mode & 0o777 == 0o700


def test_rows_of_attention_are_exchanged_for_heads_where_context_and_tensor_ranks_divide_them(request_):
    host = argparse.Namespace(**vars(HOST), cp_comm_type=["p2p"], transformer_impl="local")
    plan = plan_search(replace(request_, num_query_groups=4), host, "cpu")
    (way,) = plan.variants[1:]
    assert way.settings == {"cp_comm_type": ["a2a"]}
    wanted = {(p.tensor_size, p.context_size) for p in plan.points if way.applies_to(p)}
    assert wanted == {(1, 2), (1, 4), (2, 2)}
    assert any("ring attention" in name for name in plan.left_out)
    odd = plan_search(replace(request_, num_heads=3, num_query_groups=3), host, "cpu")
    assert len(odd.variants) == 1
    assert "no layout" in odd.left_out["all-to-all of attention heads"]
    other = argparse.Namespace(**{**vars(host), "transformer_impl": "transformer_engine"})
    assert "cannot be traced" in plan_search(request_, other, "cuda").left_out["exchanges of context parallelism"]


def test_fused_rearrangement_of_tokens_has_a_reason_why_it_is_not_searched(request_):
    moe = replace(request_, num_experts=4)
    name = "fused token rearrangement (--moe-permute-fusion)"
    has = argparse.Namespace(**vars(HOST), moe_permute_fusion=False)
    assert "no --moe-permute-fusion" in plan_search(moe, HOST, "cuda").left_out[name]
    assert "GPUs" in plan_search(moe, has, "cpu").left_out[name]
    assert "cannot be traced" in plan_search(moe, has, "npu").left_out[name]
    assert name not in plan_search(request_, has, "cuda").left_out


def test_a_file_to_calibrate_without_launches_that_measure_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="give --auto-tuning-verify with it"):
        read_request(arguments(tmp_path, auto_parallel_calibrate=str(tmp_path / "mine.json")))
