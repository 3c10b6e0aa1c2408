"""A layout with its switches has one step time and one peak, whichever command computes it."""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from drawn_layouts import drawn

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.cost.analytic.reading import read_workload
from mindspeed_autoparallel.cost.analytic.step_time import closed_form_us
from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.cost.collectives import Fabric
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.evaluate import Evaluation, evaluate
from mindspeed_autoparallel.planner.layouts.assembly import plan_of
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.rank_memory import measured_at
from mindspeed_autoparallel.planner.replay import replay
from mindspeed_autoparallel.planner.tuner.candidates import Dimensions, ProfileVariant, enumerate_space
from mindspeed_autoparallel.planner.tuner.placements import evaluate_placement
from mindspeed_autoparallel.predict.analytic_profile import analytic_profile, stated_train
from mindspeed_autoparallel.predict.fitting import with_values
from mindspeed_autoparallel.predict.megatron_arguments import request_of_arguments
from mindspeed_autoparallel.predict.model_file import Section
from mindspeed_autoparallel.predict.predict import predict_one
from mindspeed_autoparallel.predict.price import described, price, priced_plan
from mindspeed_autoparallel.predict.sharded_costs import device_cost
from mindspeed_autoparallel.predict.tuning import request_of_plan, tune
from mindspeed_autoparallel.runtime.features.auto_tuning.source import _memory_bytes
from mindspeed_autoparallel.spec import Cluster, Model, Plan
from mindspeed_autoparallel.spec.plan_records import SearchRecord

APART = 1e-3


def _planned(request: dict[str, Any]) -> tuple[Evaluation, Plan]:
    """Return what ``plan`` has for the layout: its profile's point, its evaluation and its plan file."""
    work = read_workload(request)
    device = find_device(work.gpu)
    run = described(work, device)
    train = {key: value for key, value in request["train"].items() if key not in ("gbs", "mbs", "recompute")}
    profile = run.profile
    if work.model.encoder is None:
        sections = [Section("text_decoder", request["model"])]
        at = measured_at(run.layout)
        profile = analytic_profile(sections, device, work.devices_per_node, train=train, points=[at])
    found = evaluate(profile, run.cluster, run.layout, run.placement, work.global_batch)
    record = SearchRecord(
        status="feasible", lower_bound_us=0.0, gap_fraction=1.0, num_configurations=1, num_solved=1, seconds=0.0
    )
    plan = plan_of(profile, run.cluster, run.layout, found, work.global_batch, record)
    return found, plan


def _model_of_the_search(request: dict[str, Any]) -> Model:
    work = read_workload(request)
    at = measured_at(described(work, find_device(work.gpu)).layout)
    sections = [Section("text_decoder", request["model"])]
    return analytic_profile(sections, find_device(work.gpu), work.devices_per_node, train={}, points=[at]).model


@pytest.mark.parametrize(
    ("name", "request_"), list(drawn(14, seed=3)), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_page_of_predict_describes_the_model_as_a_search_does(name: str, request_: dict[str, Any]) -> None:
    assert priced_plan(request_).model == _model_of_the_search(request_)


_STATED = {"grad_reduce_in_bf16": False, "exp_avg_dtype": "fp32", "cpu_offloading_num_layers": 0}
"""Switches that ``predict`` would else assume where a run does not fit, as a plan does not."""


def _check(request: dict[str, Any]) -> None:
    request = {**request, "train": {**_STATED, **request["train"]}}
    request["parallel"] = {"fsdp": 1, **request["parallel"]}
    answer = predict_one(request)
    assert answer["status"] != "error", answer["reason"]
    found, plan = _planned(request)
    again, _ = replay(plan)
    for step_us in (found.step.total_us, plan.step.total_us, again.step.total_us):
        assert step_us / 1e3 == pytest.approx(answer["step_time_ms"], rel=APART)
    for memory in (found.memory, plan.memory, again.memory):
        peak_gib = max(rank.peak_bytes for rank in memory) / 2**30
        assert peak_gib == pytest.approx(answer["peak_memory_gib"], rel=APART)


@pytest.mark.parametrize(
    ("name", "request_"), list(drawn(28)), ids=lambda value: value if isinstance(value, str) else ""
)
def test_predict_plan_and_simulate_agree(name: str, request_: dict[str, Any]) -> None:
    _check(request_)


@pytest.mark.long
def test_predict_plan_and_simulate_agree_over_200_layouts() -> None:
    for name, request in drawn(200, seed=1):
        try:
            _check(request)
        except AssertionError as error:
            raise AssertionError(f"{name}: {request['parallel']} {request['train']}") from error


_NAMES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "ffn": "ffn_hidden_size",
    "seq": "seq_length",
    "vocab": "vocab_size",
    "topk": "moe_router_topk",
    "moe_ffn": "moe_ffn_hidden_size",
    "mtp_layers": "mtp_num_layers",
    "gbs": "global_batch_size",
    "mbs": "micro_batch_size",
}


def _script(request: dict[str, Any], number: int) -> argparse.Namespace:
    """Return Megatron's namespace of a drawn request, with switches of its own."""
    model, train = request["model"], request["train"]
    given = {**model, **request["parallel"], **train}
    values = {name: given[key] for key, name in _NAMES.items() if given.get(key) is not None}
    return argparse.Namespace(
        **{**values, **(model.get("mla") or {}), "context_parallel_size": 1},
        mm_model=None,
        num_layers=model["num_layers"],
        num_experts=model.get("num_experts"),
        group_query_attention=bool(model.get("kv_heads")),
        num_query_groups=model.get("kv_heads"),
        multi_latent_attention="mla" in model,
        kv_channels=128,
        swiglu=bool(model.get("swiglu")),
        untie_embeddings_and_output_weights=not model.get("tied_embeddings"),
        sequence_parallel=request["parallel"]["tp"] > 1,
        use_distributed_optimizer=True,
        overlap_grad_reduce=train["overlap_grad_reduce"],
        tp_comm_overlap=train["tp_comm_overlap"],
        bf16=True,
        fp8_format=("hybrid" if number % 3 == 0 and request["hw"]["gpu"] == "H100" else None),
        attention_dropout=0.1 * (number % 2),
        hidden_dropout=0.0,
        attention_backend=["AttnBackend.flash", "AttnBackend.unfused"][number % 5 == 0],
        cross_entropy_loss_fusion=number % 2 == 0,
        cross_entropy_fusion_impl="te",
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=True,
    )


def _scripts(count: int) -> list[Any]:
    found = []
    for number, (name, request) in enumerate(drawn(3 * count, seed=5)):
        if request["model"]["type"] in ("gpt", "moe") and "hybrid" not in name and "vision" not in name:
            found.append(pytest.param(_script(request, number), request["hw"], id=name))
    return found[:count]


@pytest.mark.parametrize(("script", "hardware"), _scripts(12))
def test_auto_parallel_mm_prices_a_script_as_predict_prices_its_arguments(
    script: argparse.Namespace, hardware: dict[str, Any]
) -> None:
    """Both read the script: its precision, its dropout, its attention, its fused loss."""
    pytest.importorskip("megatron.core")  # its release decides how interleaved stages send
    from mindspeed_autoparallel.runtime.megatron.description import describe
    from mindspeed_autoparallel.runtime.profiling.sources.analytic import computed_profile

    request = request_of_arguments(vars(script), hardware)
    request["train"] |= {"recompute": "none", **_STATED}
    work = read_workload(request)
    device = find_device(work.gpu)
    run = described(work, device)
    profile = computed_profile(script, describe(script), device, work.devices_per_node)
    profile = replace(profile, interleaved_sends=run.profile.interleaved_sends)
    found = evaluate(profile, run.cluster, run.layout, run.placement, work.global_batch)
    answer = predict_one(request)
    assert answer["status"] != "error", answer["reason"]
    assert found.step.total_us / 1e3 == pytest.approx(answer["step_time_ms"], rel=APART)
    peak_gib = max(rank.peak_bytes for rank in found.memory) / 2**30
    assert peak_gib == pytest.approx(answer["peak_memory_gib"], rel=APART)


@pytest.mark.parametrize("overlapped", [False, True])
def test_auto_tuning_prices_every_layout_of_a_profile_as_plan_does(overlapped: bool) -> None:
    """Traces make other profiles than shapes; under one profile there is one price."""
    request = next(request for name, request in drawn(7) if "dense" in name)
    device, cluster, batch = find_device("H100"), Cluster(num_nodes=2, devices_per_node=8), 64
    profile = analytic_profile(
        [Section("text_decoder", request["model"])], device, 8, train={"overlap_grad_reduce": overlapped}
    )
    dimensions = Dimensions(overlap_gradient_reduce=(overlapped,))
    variants = [ProfileVariant(name="", settings={}, profile=profile)]
    compared = set()
    for configuration in enumerate_space(variants, cluster, batch, dimensions).configurations[::7]:
        layout = configuration.layout
        layers, over = divmod(profile.model.num_layers, layout.num_virtual_stages)
        if over:
            continue
        found = evaluate_placement(configuration, (layers,) * layout.num_virtual_stages, "none", 0, dimensions)
        again = evaluate(profile, cluster, found.configuration.layout, found.placement, batch, with_timeline=False)
        assert found.step_us == pytest.approx(again.step.total_us, rel=APART), layout.label()
        assert found.peak_bytes == max(rank.peak_bytes for rank in again.memory)
        compared.add(layout.label())
    assert len(compared) > 10


def test_a_plan_file_has_the_price_without_the_overlap_that_it_was_priced_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {"type": "gpt", "num_layers": 4, "hidden": 8192, "heads": 64, "ffn": 28672, "seq": 4096, "vocab": 32000}
    (tmp_path / "model.json").write_text(json.dumps(model))
    words = ["plan", "--profile-source", "analytic", "--model", str(tmp_path / "model.json"), "--device", "H100"]
    words += ["--nnodes", "1", "--nproc-per-node", "4", "--global-batch-size", "2", "--out", str(tmp_path)]
    assert main(words) == 0
    plan = Plan.read(tmp_path / "plan.json")
    assert plan.layout.tensor_size > 1 and plan.layout.overlap_tensor_parallel
    base = {"model": model, "hw": {"gpu": "H100", "num_gpus": 4, "gpus_per_node": 4}}
    for overlapped, step_us in ((True, plan.step.total_us), (False, plan.extra.unoverlapped_us)):
        switches = {**_STATED, "tp_comm_overlap": overlapped}
        stated = stated_train([Section("text_decoder", model)], find_device("H100"), switches)
        answer = predict_one(request_of_plan(plan, base, stated))
        assert answer["step_time_ms"] == pytest.approx(step_us / 1e3, rel=APART)
    more = plan.extra.unoverlapped_us / plan.step.total_us - 1
    assert more > 0.01
    assert (
        f"without --tp-comm-overlap: {plan.extra.unoverlapped_us / 1e3:.1f} ms (+{more:.1%})" in capsys.readouterr().out
    )
    edited = replace(plan, global_batch_size=4, num_microbatches=2 * plan.num_microbatches)
    assert replay(edited)[0].extra.unoverlapped_us == 0


@pytest.mark.parametrize(("encoder_layers", "layers"), [(4, 12), (24, 12), (12, 4)])
def test_tuned_plans_with_virtual_stages_of_an_encoder_have_the_price_of_their_requests(
    encoder_layers: int, layers: int
) -> None:
    encoder = {"num_layers": encoder_layers, "hidden": 512, "heads": 8, "ffn": 2048, "tokens_per_sample": 256}
    sizes = {"num_layers": layers, "hidden": 1024, "heads": 8, "ffn": 4096, "vocab": 32000, "seq": 1024}
    base = {
        "model": {**sizes, "vision_encoder": encoder},
        "hw": {"gpu": "H100", "num_gpus": 8, "gpus_per_node": 8},
        "parallel": {"tp": 1, "pp": 4, "vpp": 2},
        "train": {"gbs": 32, "mbs": 1},
    }
    tuned = tune(base, (), SearchOptions(time_limit_s=5, top_k=1, num_workers=1, with_relaxations=False))
    for plan, request in zip(tuned.plans, tuned.requests, strict=True):
        assert predict_one(request)["step_time_ms"] == pytest.approx(plan.step.total_us / 1e3, rel=APART)
    assert any(any(plan.layers_of("encoder")[4:]) for plan in tuned.plans) == (encoder_layers > layers)


def test_the_layers_of_an_encoder_are_given_by_stage_or_by_chunk() -> None:
    encoder = {"num_layers": 4, "hidden": 512, "heads": 8, "ffn": 2048, "tokens_per_sample": 256}
    model = {"num_layers": 8, "hidden": 1024, "heads": 8, "ffn": 4096, "vocab": 32000, "seq": 1024}
    request = {
        "hw": {"gpu": "H100", "num_gpus": 4, "gpus_per_node": 4},
        "parallel": {"tp": 1, "pp": 2, "vpp": 2},
        "train": {"gbs": 32, "mbs": 1},
    }

    def chunks(counts: list[int]) -> list[tuple[int, ...]]:
        described = {**model, "vision_encoder": {**encoder, "pipeline_num_layers": counts}}
        return [stage.encoder_chunks for stage in read_workload({**request, "model": described}).stages]

    assert chunks([3, 1]) == chunks([3, 1, 0, 0]) == [(3, 0), (1, 0)]
    assert chunks([1, 1, 2, 0]) == [(1, 2), (1, 0)]
    with pytest.raises(ConfigError, match=r"4 layers, its split over 2 stages or 4 chunks is \[1, 1, 2\]"):
        chunks([1, 1, 2])


def test_ratios_of_the_closed_form_are_those_of_the_price() -> None:
    """Intervals, fits and experiments take slopes from the closed form, and no step: what it is used for holds."""
    apart = []
    for _, request in drawn(28, seed=2):
        work = read_workload(request)
        device = find_device(work.gpu)
        for name in ("inter_fraction", "memory_fraction", "gemm_fraction"):
            value = getattr(device.efficiency(work.stack), name)
            slower = with_values(device, work.stack, {name: value / 1.5})
            closed = closed_form_us(work, slower) / closed_form_us(work, device)
            priced = price(work, slower).step.total_us / price(work, device).step.total_us
            apart.append(abs(closed / priced - 1))
    assert statistics.median(apart) < 0.005, sorted(apart)
    assert max(apart) < 0.05, sorted(apart)[-5:]


@pytest.mark.parametrize(
    ("name", "usable_gib"), [("910B", 0.94 * 60.97), ("H100", 0.94 * 79.11), ("MI300X", 0.94 * 192)]
)
def test_a_device_has_one_memory_whatever_plans_for_it(name: str, usable_gib: float) -> None:
    """Megatron's computed plans, those of FSDP2, ``tune``, and tuning for a device that is not at hand."""
    device = find_device(name)
    fabric = Fabric.of(device, device.efficiency("megatron-core"), 8, None)
    model = {"type": "gpt", "num_layers": 2, "hidden": 256, "heads": 4, "seq": 128, "vocab": 512}
    tuned = tune({"model": model, "hw": {"gpu": name, "num_gpus": 8}, "parallel": {}, "train": {"gbs": 8}})
    request = cast(Any, SimpleNamespace(memory_limit_bytes=None, target_device=device))
    memories = {
        "plan": analytic_profile([Section("text_decoder", model)], device, 8).device.memory_capacity_bytes,
        "plan --fsdp2": device_cost(device, fabric).memory_capacity_bytes,
        "tune": tuned.plans[0].memory[0].limit_bytes,
        "--auto-tuning": _memory_bytes(request, None),
    }
    assert memories == dict.fromkeys(memories, pytest.approx(usable_gib * 2**30, rel=1e-9))
