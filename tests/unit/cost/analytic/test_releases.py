"""What a container of NeMo implies for switches that a request leaves open."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_autoparallel.cost.analytic.layer_time import layer_time
from mindspeed_autoparallel.cost.analytic.reading import read_workload
from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.cost.collectives import Fabric
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.predict.predict import predict_one

_EXPERTS = {
    "type": "moe", "num_layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 4, "head_size": 128, "ffn": 6144,
    "seq": 4096, "vocab": 32000, "swiglu": True, "num_experts": 128, "topk": 8, "moe_ffn": 768,
}  # fmt: skip
_LATENT = {"q_lora_rank": 512, "kv_lora_rank": 256, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def _request(software: str | None, gpu: str = "GB200", model: dict[str, Any] | None = None, **train: Any) -> Any:
    node = 4 if gpu.startswith("G") else 8
    return {
        "model": {**_EXPERTS, **(model or {})},
        "hw": {"gpu": gpu, "num_gpus": 16, "gpus_per_node": node},
        "parallel": {"ep": 8},
        "train": {"gbs": 64, "mbs": 1, "precision": "mxfp8", "software": software, **train},
    }


def _work(*arguments: Any, **train: Any) -> Workload:
    return read_workload(_request(*arguments, **train))


def test_the_newest_mxfp8_recipes_capture_whole_iterations_and_earlier_ones_all_but_the_experts() -> None:
    newest, named, before = _work(None), _work("nemo-26.06"), _work("nemo-26.04.01")
    assert newest == named
    assert newest.expert_overlap and newest.replays_experts and newest.replayed_launches > 0.9
    assert not before.expert_overlap and not before.replays_experts and before.replayed_launches > 0
    assert _work("25.09").replayed_launches == 0
    assert _work("26.06", precision="bf16") == _work("26.04", precision="bf16")


def test_stated_releases_of_a_request_override_its_container() -> None:
    stated = {"moe_a2a_overlap": False, "cuda_graph": "none", "attention": "fused", "cross_entropy_fusion": True}
    stated |= {"fp8_dot_product_attention": False}
    each = {_work(name, model={"dispatcher": "alltoall"}, **stated) for name in (None, "25.04", "26.02", "26.06")}
    assert len(each) == 1


def test_early_containers_lack_kernels() -> None:
    latent = {"mla": _LATENT}
    assert not _work("25.04", model=latent).fused_attention
    assert _work("25.04", gpu="H100", model=latent, precision="fp8").fused_attention
    assert _work("25.09", model=latent).fused_attention
    assert _work("25.09").exchanged_per_expert and not _work("25.11").exchanged_per_expert
    assert _work("25.11", gpu="B200").exchanged_per_expert and not _work("26.02", gpu="B200").exchanged_per_expert
    assert not _work("24.07").cross_entropy_fusion and _work("25.09").cross_entropy_fusion


def test_dropped_tokens_are_sent_once_for_each_expert_unless_a_dispatcher_is_named() -> None:
    assert _work(None, model={"capacity_factor": 1.0}).exchanged_per_expert
    assert not _work(None, model={"capacity_factor": 1.0, "dispatcher": "flex"}).exchanged_per_expert


def test_exchanges_between_nodes_are_hidden_by_earlier_recipes_of_dropless_experts() -> None:
    def hidden(software: str, gpu: str = "B200", **model: Any) -> bool:
        request = _request(software, gpu, model, precision="fp8" if gpu == "H100" else "mxfp8")
        return read_workload({**request, "parallel": {"ep": 16}}).expert_overlap

    assert hidden("26.04") and hidden("25.11", "H100")
    assert not hidden("26.02", "H100") and not hidden("25.11", "H100", capacity_factor=1.0)
    assert not hidden("26.04", "GB200")  # a rack is one domain


def test_a_graph_of_parts_leaves_the_launches_of_experts() -> None:
    device = find_device("GB200", ())
    efficiency = device.efficiency("megatron-core")
    fabric = Fabric.of(device, efficiency, 4, None)

    def us(graph: str) -> float:
        time = layer_time(_work(None, moe_a2a_overlap=False, cuda_graph=graph), device, efficiency, fabric)
        return time.forward_us + time.backward_us

    whole, parts, none = (us(graph) for graph in ("full_iteration", "transformer_engine", "none"))
    assert whole < 0.75 * parts < 0.75 * none


def test_the_loss_of_transformer_engine_passes_over_the_logits_five_times() -> None:
    # The step without it has 16 passes; on one stage the difference is 11 passes over the logits of each microbatch.
    plain, fused = (
        predict_one(_request(None, moe_a2a_overlap=False, cuda_graph="none", cross_entropy_fusion=value))
        for value in (False, True)
    )
    logits_ms = 4096 * 32000 * 2 / (8000e6 * 0.73459)
    assert plain["step_time_ms"] - fused["step_time_ms"] == pytest.approx(4 * 11 * logits_ms, rel=0.01)


def test_recipes_of_latent_attention_run_its_up_projections_again() -> None:
    def modules(software: str | None, **train: Any) -> tuple[str, ...]:
        return _work(software, model={"mla": _LATENT}, recompute="selective", **train).recompute_detail.modules

    assert modules("26.04") == ("mla_up_proj",)
    assert modules(None) == modules("25.04") == modules("26.04", recompute_modules=["core_attn"]) == ("core_attn",)


def test_quantized_attention_is_faster_where_heads_are_latent() -> None:
    def ms(latent: bool, quantized: bool) -> float:
        model = {"mla": _LATENT} if latent else {}
        request = _request("26.06", model=model, fp8_dot_product_attention=quantized)
        return float(predict_one(request)["step_time_ms"])

    assert ms(True, True) < ms(True, False)
    assert ms(False, True) == ms(False, False)
    assert ms(True, True) == predict_one(_request("26.06", model={"mla": _LATENT}))["step_time_ms"]


def test_a_container_is_named_by_year_and_month() -> None:
    for name in ("nemo", "26.13", "pytorch-25.04", "0.5.0", 26):
        with pytest.raises(ConfigError, match=r"train.software is .*, must name a NeMo container"):
            _work(name)
    notes = predict_one(_request("26.04", moe_a2a_overlap=False, cuda_graph="none"))["notes"]
    assert any("train.software: no effect here" in note for note in notes)
    notes = predict_one(_request("26.06"))["notes"]
    assert sum("the recipes of 26.06" in note for note in notes) == 2
