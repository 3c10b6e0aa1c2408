"""Switches of the script that stay on under a plan, and those that the plan turns on or off."""

import argparse
import re
from dataclasses import replace

import pytest
from made_plans import make_plan

from mindspeed_autoparallel.runtime.features.apply_plan import overlaps
from mindspeed_autoparallel.runtime.features.apply_plan.entry import prepare


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
