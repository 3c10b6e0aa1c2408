"""``--profile-source analytic``: the model's shapes are read from flags and model.json, the device from the catalogue."""

from __future__ import annotations

import argparse
import json
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from search_arguments import SEARCH_ARGUMENTS

from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.profiles import BlockCost, Profile
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.request import read_request
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.search import search
from mindspeed_autoparallel.runtime.features.measuring import target_device
from mindspeed_autoparallel.runtime.megatron.description import describe
from mindspeed_autoparallel.runtime.megatron.hybrid import cut_pattern
from mindspeed_autoparallel.runtime.megatron.layout_arguments import kind_everywhere
from mindspeed_autoparallel.runtime.profiling.sources.analytic import computed_profile
from mindspeed_autoparallel.spec import Plan

_GPT = {
    "mm_model": None,
    "num_layers": 8,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "group_query_attention": True,
    "num_query_groups": 4,
    "ffn_hidden_size": 2816,
    "seq_length": 2048,
    "swiglu": True,
    "vocab_size": 32000,
    "untie_embeddings_and_output_weights": True,
    "num_experts": None,
    "kv_channels": 64,
}


def _arguments(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**_GPT, **changes})


def _asked(**values: Any) -> Any:
    plain = {"profile_source": "analytic", "profile_device": None, "profile_device_file": None}
    return target_device(argparse.Namespace(**{**plain, **values}))


def _profile(arguments: argparse.Namespace, per_node: int = 8) -> Profile:
    pytest.importorskip("megatron.core")  # its release decides how interleaved stages send
    return computed_profile(arguments, describe(arguments), find_device("910B"), per_node)


@pytest.mark.parametrize(("dispatcher", "sizes"), [("alltoall", {0, 1}), ("alltoall_seq", {0})])
def test_whole_experts_have_no_costs_where_the_dispatcher_takes_the_tensor_size_alone(
    dispatcher: str, sizes: set[int]
) -> None:
    """Megatron ends with an error beside such a plan: "alltoall_seq dispatcher not support different TP size"."""
    experts = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 512}
    given = _arguments(**experts, moe_token_dispatcher_type=dispatcher, expert_tensor_parallel_size=None)
    assert {one.at.expert_tensor_size for one in _profile(given).measurements} == sizes


def test_measuring_stays_the_default() -> None:
    assert target_device(argparse.Namespace()) is None


def test_the_device_is_found_in_the_catalogue_or_in_a_file_of_ones_own(tmp_path: Path) -> None:
    assert _asked(profile_device="ascend 910b").name == "Ascend-910B"
    from mindspeed_autoparallel.cost import catalogue

    own = json.loads((Path(catalogue.__file__).parent / "catalogue_data/ascend_910b.json").read_text())
    own["name"] = "My-NPU"
    (tmp_path / "own.json").write_text(json.dumps(own))
    assert _asked(profile_device_file=str(tmp_path / "own.json")).name == "My-NPU"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "needs --profile-device"),
        ({"profile_device": "TPU"}, "unknown device 'TPU'"),
        ({"profile_source": "measured", "profile_device": "H100"}, "--profile-device is for --profile-source analytic"),
    ],
)
def test_a_device_that_is_missing_unknown_or_useless_is_refused(values: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _asked(**values)


def test_shapes_of_a_gpt_script_come_from_its_flags(logged: list[str]) -> None:
    profile = _profile(_arguments())
    assert any("nothing is measured" in text for text in logged)
    assert profile.provenance.source == "analytic"
    assert profile.provenance.model_hash == describe(_arguments()).model_hash
    module = profile.model.module("text_decoder")
    assert (module.num_layers, module.num_heads, module.num_kv_heads) == (8, 16, 4)
    # 1024 x (1024 + 2 x 256 + 1024 + 3 x 2816) + two norms
    assert profile.measurements[0].modules["text_decoder"].layer.dense.num_parameters == 11274240


def test_an_optimizer_without_computed_costs_is_named_as_its_flag() -> None:
    with pytest.raises(ConfigError, match=r"--optimizer muon has no computed costs.*--profile-source measured"):
        _profile(_arguments(optimizer="muon"))


@pytest.mark.parametrize("dense_first", [None, 0, -1])
def test_experts_of_a_script_are_counted_apart(dense_first: int | None) -> None:
    experts = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 512}
    profile = _profile(_arguments(**experts, first_k_dense_replace=dense_first))
    layer = profile.measurements[0].modules["text_decoder"].layer
    assert layer.expert.num_parameters == 4 * 3 * 1024 * 512


def _with_encoder() -> dict[str, Any]:
    return {
        "image_encoder": {
            "vision_encoder": {
                "num_layers": 4,
                "hidden_size": 256,
                "num_attention_heads": 4,
                "ffn_hidden_size": 1024,
                "freeze": True,
            }
        },
        "text_decoder": {
            "num_layers": 8,
            "hidden_size": 512,
            "num_attention_heads": 8,
            "ffn_hidden_size": 1408,
            "gated_linear_unit": True,
            "vocab_size": 1000,
        },
    }


def test_shapes_of_encoders_come_from_model_json_and_assumptions_are_logged(tmp_path: Path, logged: list[str]) -> None:
    content = _with_encoder()
    (tmp_path / "model.json").write_text(json.dumps(content))
    profile = _profile(_arguments(mm_model=str(tmp_path / "model.json")))
    assert [module.name for module in profile.model.modules] == ["image_encoder", "text_decoder"]
    assert profile.model.modules[0].frozen
    assert profile.model.vocab_size == 1000
    assert any("image_encoder" in text and "--seq-length 2048 is used" in text for text in logged)
    logged.clear()
    content["image_encoder"]["vision_encoder"] |= {"image_size": 224, "patch_size": 14}
    (tmp_path / "model.json").write_text(json.dumps(content))
    profile = _profile(_arguments(mm_model=str(tmp_path / "model.json")))
    assert profile.model.modules[0].tokens_per_sample == 256
    for name in ("hidden_size", "num_attention_heads"):
        del content["image_encoder"]["vision_encoder"][name]
    (tmp_path / "model.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"no hidden_size and num_attention_heads of image_encoder.*source measured"):
        _profile(_arguments(mm_model=str(tmp_path / "model.json")))
    assert not any("taken as" in text for text in logged)


@pytest.mark.parametrize(
    ("host", "given", "expected"),
    [("mindspeed_mm", False, {False}), ("mindspeed_mm", True, {True}), ("other", False, {True})],
)
def test_sequence_parallelism_stays_off_where_mindspeed_mm_sums_an_encoders_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str], host: str, given: bool, expected: set[bool]
) -> None:
    """Qwen2.5-VL under its TP2: norms of 7.784 where one process has 5.764."""
    monkeypatch.setitem(sys.modules, host, types.ModuleType(host))
    (tmp_path / "model.json").write_text(json.dumps(_with_encoder()))
    changes = {**_SEARCH, "mm_model": str(tmp_path / "model.json"), "sequence_parallel": given}
    arguments = _arguments(**changes, auto_parallel_work_dir=str(tmp_path / "work"))
    plan = search(read_request(arguments), _profile(arguments), arguments)
    others = [verdict.layout for verdict in plan.search.verdicts if verdict.outcome not in ("illegal", "unmeasured")]
    searched = [plan.layout, *others]
    assert {layout.sequence_parallel for layout in searched if layout.tensor_size > 1} == expected
    assert any("sums the image encoder's gradients" in text for text in logged) == (host == "mindspeed_mm")


def test_every_kind_of_layer_of_the_script_is_priced() -> None:
    experts = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 512, "moe_layer_freq": [0] * 2 + [1] * 6}
    latent = {"multi_latent_attention": True, "kv_lora_rank": 128, "q_lora_rank": 192}
    plain = _profile(_arguments()).measurements[0].modules["text_decoder"]
    cost = _profile(_arguments(**experts, **latent, mtp_num_layers=1)).measurements[0].modules["text_decoder"]
    assert cost.pattern == (0, 0, 1, 1, 1, 1, 1, 1)
    assert [kind.expert.num_parameters > 0 for kind in cost.kinds] == [False, True]
    assert cost.kinds[0].dense.num_parameters != plain.layer.dense.num_parameters
    assert plain.post is not None and cost.post is not None and cost.prediction is not None
    assert cost.prediction.expert.num_parameters > 0
    assert cost.post.forward_us == pytest.approx(2 * plain.post.forward_us), "the further token has its logits there"


_SEARCH = {
    **SEARCH_ARGUMENTS,
    "nproc_per_node": 2,
    "auto_parallel_time_limit_s": 5,
    "profile_source": "analytic",
    "profile_device": "910B",
}


@pytest.mark.parametrize(
    ("given", "host", "contexts"),
    [
        ({"context_parallel_size": 2}, "MindSpeed", {2}),
        ({"context_parallel_size": 1, "seq_length": 2**15}, "MindSpeed", {1}),
        ({"context_parallel_size": 1, "seq_length": 2**15}, "Megatron", {1, 2, 4}),
        ({"context_parallel_size": 2}, "Megatron", {1, 2}),
    ],
)
def test_a_search_keeps_what_mindspeed_has_chosen_while_it_was_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict, host: str, contexts: set
) -> None:
    """It takes attention from ``--context-parallel-size`` on the command line, so that a plan cannot change that any more."""
    if host == "MindSpeed":
        monkeypatch.setitem(sys.modules, "mindspeed.features_manager", types.ModuleType("mindspeed.features_manager"))
    arguments = _arguments(**{**_SEARCH, **given}, auto_parallel_work_dir=str(tmp_path))
    plan = search(read_request(arguments), _profile(arguments), arguments)
    assert {plan.layout.context_size} | {verdict.layout.context_size for verdict in plan.search.verdicts} == contexts


def test_a_grid_of_tensor_ranks_has_its_own_costs() -> None:
    """Groups of 2 x 2 ranks have two each; sides of 4 x 1 and 1 x 4 gather and reduce tensors of different widths."""
    times = set()
    for x, y in ((2, 2), (4, 1), (1, 4)):
        rows = _profile(_arguments(tp_2d=True, tp_x=x, tp_y=y)).measurements
        (one,) = (row for row in rows if row.at.tensor_size == 4 and row.at.micro_batch_size == 1)
        times.add(one.modules["text_decoder"].layer.forward_us)
    assert len(times) == 3


@pytest.mark.parametrize(
    ("given", "tensor_sizes", "words"),
    [
        ({"use_ascend_mc2": True, "sequence_parallel": True}, {2, 4}, r"--use-ascend-mc2 \(tensor and sequence"),
        ({"tp_2d": True, "tp_x": 2, "tp_y": 2}, {4}, r"--tp-2d \(tensor-parallel size 4, no sequence"),
    ],
)
def test_a_search_keeps_tensor_sizes_at_which_mindspeed_runs(
    tmp_path: Path, given: dict, tensor_sizes: set, words: str
) -> None:
    """It ends at ``--use-ascend-mc2`` without tensor and sequence parallelism, at ``--tp-2d`` of another size or with them."""
    given = {**given, "context_parallel_size": 1, "nproc_per_node": 4, "auto_parallel_work_dir": str(tmp_path)}
    arguments = _arguments(**{**_SEARCH, **given})
    request, profile = read_request(arguments), _profile(arguments)
    assert {point.tensor_size for point in request.points()} == tensor_sizes
    plan = search(request, profile, arguments)
    assert plan.layout.tensor_size in tensor_sizes
    assert plan.layout.sequence_parallel == ("sequence_parallel" in given)
    with pytest.raises(ConfigError, match=rf"a plan cannot change {words}.* nodes of 1 devices"):
        search(replace(request, cluster_devices_per_node=1), profile, arguments)


def test_overlapped_whole_experts_are_searched_without_tensor_parallelism(tmp_path: Path) -> None:
    """MindSpeed asserted that they "need moe_tp_extend_ep"."""
    given = {"moe_alltoall_overlap_comm": True, "moe_token_dispatcher_type": "alltoall_seq", "nproc_per_node": 4}
    arguments = _arguments(**{**_SEARCH, **given, "auto_parallel_work_dir": str(tmp_path)})
    assert {point.tensor_size for point in read_request(arguments).points()} == {1}
    arguments.moe_tp_extend_ep = True
    assert {point.tensor_size for point in read_request(arguments).points()} > {1}


def _with_light_selective(_: str, layer: BlockCost) -> BlockCost:
    """Half of the activations for a tenth of the time of full recompute."""
    none, full = layer.recompute["none"], layer.recompute["full"]
    light = replace(full, saved_bytes=none.saved_bytes // 2, extra_backward_us=full.extra_backward_us / 10)
    return replace(layer, recompute={"none": none, "selective": light, "full": full})


def test_a_plan_recomputes_what_flags_can_give(tmp_path: Path) -> None:
    """Megatron has no flag for full recompute in some layers and selective in others: such a plan is refused."""
    given = {"seq_length": 4096, "num_layers": 16, "context_parallel_size": 1, "auto_parallel_work_dir": str(tmp_path)}
    arguments = _arguments(
        **{**_SEARCH, **given, "simulated_nproc_per_node": 1, "auto_parallel_memory_limit_mib": 7000}
    )
    request, profile = read_request(arguments), _profile(arguments)
    measurements = tuple(
        replace(one, modules={name: cost.with_layers(_with_light_selective) for name, cost in one.modules.items()})
        for one in profile.measurements
    )
    kinds = []
    for limit in (7000, 10**6):
        limited = replace(request, memory_limit_bytes=limit * 2**20)
        plan = search(limited, replace(profile, measurements=measurements), arguments)
        kind_everywhere(plan)
        kinds.append({kind for kind, count in plan.stages[0].recompute.get("text_decoder", {}).items() if count})
        assert ("recomputed whole" in plan.search.scope) == (limit == 7000)
    assert kinds[0] == {"full"}


def test_expert_sizes_that_group_limited_routing_does_not_run_are_left_out(tmp_path: Path) -> None:
    """MindSpeed-LLM's groups are the expert ranks, of which each token takes fewer than there are."""
    experts = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 512, "moe_router_group_topk": 1}
    for balance in ("aux_loss", "group_limited_greedy"):
        plan = _planned(tmp_path, **experts, moe_router_load_balancing_type=balance, expert_model_parallel_size=2)
        illegal = [one for one in plan.search.verdicts if "group_limited_greedy" in one.reason]
        searched = [one.layout for one in plan.search.verdicts if one.outcome in ("solved", "bounded")]
        assert {one.layout.expert_size for one in illegal} == ({1} if balance == "group_limited_greedy" else set())
        assert (1 in {layout.expert_size for layout in searched}) == (balance == "aux_loss")
        assert {one.outcome for one in illegal} <= {"illegal"}


def _planned(folder: Path, **given: Any) -> Plan:
    arguments = _arguments(**{**_SEARCH, "context_parallel_size": 1, "auto_parallel_work_dir": str(folder), **given})
    request = read_request(arguments)
    return search(request, _profile(arguments, request.cluster_devices_per_node), arguments)


@pytest.mark.parametrize(("mib", "recomputed"), [(None, 0), (3200, 7)])
def test_a_gpt_written_as_a_hybrid_gets_the_plan_of_the_gpt(tmp_path: Path, mib: int | None, recomputed: int) -> None:
    """Every layer is two of the pattern's, attention and MLP."""
    gpt = _planned(tmp_path, auto_parallel_memory_limit_mib=mib)
    pattern = {"hybrid_layer_pattern": "*-" * 8, "num_layers": 16, "auto_parallel_memory_limit_mib": mib}
    hybrid = _planned(tmp_path, **pattern)
    assert hybrid.layout == replace(gpt.layout, standalone_ends=False)
    assert hybrid.layers_of("text_decoder") == tuple(2 * count for count in gpt.layers_of("text_decoder"))
    assert gpt.recomputed_of("text_decoder", "full") == (recomputed,)
    assert hybrid.recomputed_of("text_decoder", "full") == (2 * recomputed,)
    # Each half hands its output on: norms and sums between them are paid twice.
    assert hybrid.search.lower_bound_us == pytest.approx(gpt.search.lower_bound_us, rel=0.01)


def test_a_pattern_of_many_kinds_is_searched_and_cut(tmp_path: Path) -> None:
    pattern = "M-M*-ME-M-*-M-ME"
    mamba = {"mamba_num_heads": 16, "mamba_head_dim": 64, "mamba_state_dim": 64, "mamba_num_groups": 4}
    experts = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 512}
    nodes = {"nproc_per_node": 1, "simulated_nnodes": 4, "simulated_nproc_per_node": 1}
    sizes = {"hybrid_layer_pattern": pattern, "num_layers": 16, "auto_parallel_memory_limit_mib": 2600, **nodes}
    plan = _planned(tmp_path, **mamba, **experts, **sizes)
    assert plan.layout.pipeline_size > 1
    assert cut_pattern(pattern, plan.layers_of("text_decoder")).replace("|", "") == pattern
