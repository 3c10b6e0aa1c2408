"""Widths of intervals around predicted step times."""

import copy
import dataclasses

import pytest

from mindspeed_autoparallel.cost.analytic.layer_time import correction_key
from mindspeed_autoparallel.cost.analytic.reading import read_workload
from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.predict.confidence import extrapolation, half_width
from mindspeed_autoparallel.predict.predict import predict_one

_REQUEST = {
    "model": {"type": "gpt", "num_layers": 24, "hidden": 2048, "heads": 16, "seq": 1024},
    "hw": {"gpu": "A100", "num_gpus": 8, "gpus_per_node": 8},
    "parallel": {"tp": 2, "pp": 2},
    "train": {"gbs": 32, "mbs": 2, "recompute": "full"},
}
_WIDTHS = {"seen": 0.03, "more_devices": 0.05, "unseen_large_shape": 0.1, "unseen_shape": 0.2}


def _work(**changes: dict) -> Workload:
    request = copy.deepcopy(_REQUEST)
    for section, values in changes.items():
        request[section].update(values)
    return read_workload(request)


def _device(**values: object) -> Device:
    """An A100 on which exactly the shape of ``_REQUEST`` was measured."""
    device = find_device("A100-80GB")
    known = {"corrections": ((*correction_key(_work()), 0.1),), "measured_recompute": ("full",), "intervals": _WIDTHS}
    changed = dataclasses.replace(device.efficiency("megatron-2021"), **{**known, **values})
    return dataclasses.replace(device, efficiencies={"megatron-2021": changed})


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "seen"),
        ({"model": {"num_layers": 48}}, "seen"),
        ({"model": {"hidden": 1024}}, "unseen_shape"),
        ({"model": {"hidden": 12288, "heads": 96}}, "unseen_large_shape"),
        ({"train": {"recompute": "none"}}, "unseen_shape"),
    ],
)
def test_unmeasured_properties_determine_the_width(changes: dict, kind: str) -> None:
    assert half_width(_work(**changes), _device()) == (_WIDTHS[kind], kind)


def test_models_with_experts_are_never_taken_for_measured_ones() -> None:
    experts = {"type": "moe", "num_experts": 8, "topk": 2, "moe_ffn": 8192}
    work = _work(model=experts, train={"stack": "megatron-2021"})
    assert extrapolation(work, _device()) == "unmeasured_features"


def test_several_nodes_never_narrow_the_interval_and_widen_it_by_the_load_of_the_network() -> None:
    device = _device(intervals={**_WIDTHS, "more_devices": 0.3})
    large = {"hidden": 12288, "heads": 96}
    assert half_width(_work(model=large), device)[0] == 0.1
    assert half_width(_work(model=large, hw={"num_gpus": 16}), device)[0] > 0.3
    seen = _device(intervals={**_WIDTHS, "seen": 0.07})
    # Replicas on both nodes reduce gradients once for a long step, or for a short one.
    wide, narrow = (half_width(_work(hw={"num_gpus": 16}, train={"gbs": gbs}), seen) for gbs in (32, 1024))
    assert wide[1] == narrow[1] == "more_devices"
    assert wide[0] > narrow[0] > 0.07


def test_a_kind_without_held_out_runs_gets_twice_the_widest_of_the_others() -> None:
    device = _device(intervals={"seen": 0.03, "unseen_large_shape": 0.1}, relative_error=0.02)
    assert half_width(_work(model={"hidden": 1024}), device) == (0.2, "unseen_shape")
    assert half_width(_work(), _device(intervals={}, relative_error=0.15))[0] == 0.3


def test_answers_carry_the_interval_and_the_kind() -> None:
    answer = predict_one({"id": 1, **_REQUEST})
    low, high = answer["step_time_interval_ms"]
    width, kind = half_width(_work(), find_device("A100-80GB"))
    assert answer["step_time_extrapolation"] == kind == "seen"
    assert high / answer["step_time_ms"] == pytest.approx(1 + width)
    assert answer["step_time_ms"] / low == pytest.approx(1 + width)


def test_peaks_of_tiny_models_have_wider_intervals() -> None:
    tiny = predict_one({"id": 1, **_REQUEST})
    large = predict_one({"id": 2, **_REQUEST, "model": {**_REQUEST["model"], "hidden": 6144, "heads": 48}})
    assert tiny["peak_memory_gib"] < 10 < large["peak_memory_gib"]
    for answer, width in ((tiny, 0.28), (large, 0.05)):
        low, high = answer["peak_memory_interval_gib"]
        assert high / answer["peak_memory_gib"] == pytest.approx(1 + width)
        assert answer["peak_memory_gib"] / low == pytest.approx(1 + width)


def test_tuning_on_examples_has_a_width_of_its_own_where_no_such_run_was_measured() -> None:
    kind = half_width(_work(train={"task": "sft"}), _device())[1]
    assert kind == "supervised"
    plain, tuned = (half_width(_work(train=train), _device())[0] for train in ({}, {"task": "sft_long_context"}))
    assert tuned > 5 * plain
    known = _device(measured_features=("supervised",))
    assert half_width(_work(train={"task": "sft"}), known) == half_width(_work(), known)


def test_new_features_have_widths_by_what_they_are() -> None:
    device = find_device("H100")
    recipe = {"hw": {"gpu": "H100"}, "train": {"precision": "fp8"}}
    experts = {"type": "moe", "num_experts": 8, "topk": 2, "moe_ffn": 8192}
    latent = {"q_lora_rank": 512, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
    hybrid = {"type": "hybrid", "layer_pattern": "M*ME" * 6, **{k: v for k, v in experts.items() if k != "type"}}
    models = ({}, hybrid, experts, {**experts, "mla": latent})
    widths = [half_width(_work(model=model, **recipe), device)[0] for model in models]
    assert widths[0] == widths[1] < widths[2] < widths[3]
    four_bits = {"hw": {"gpu": "GB200"}, "train": {"precision": "nvfp4"}}
    rack = find_device("GB200")
    eight = half_width(_work(hw={"gpu": "GB200"}, train={"precision": "mxfp8"}), rack)[0]
    assert half_width(_work(**four_bits), rack)[0] > eight
