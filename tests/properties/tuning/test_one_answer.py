"""One described training has one answer: of ``predict``, its page, ``tune`` with the same sizes, and plan files read again."""

from __future__ import annotations

import json
from typing import Any

import pytest
from drawn_layouts import DEVICES, MODELS
from how_many import how_many
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_autoparallel.cost.analytic.reading import read_workload
from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.errors import AutoParallelError, ConfigError
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.replay import replay
from mindspeed_autoparallel.predict.analytic_profile import stated_train
from mindspeed_autoparallel.predict.model_file import Section
from mindspeed_autoparallel.predict.predict import predict_one
from mindspeed_autoparallel.predict.price import priced_plan
from mindspeed_autoparallel.predict.tuning import Tuned, tune
from mindspeed_autoparallel.spec import Plan

APART = 1e-3
_SWITCHES: list[dict[str, Any]] = [
    {},
    {"cpu_offloading_num_layers": 2},
    {"precision": "fp16"},
    {"grad_reduce_in_bf16": True},
    {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    {"tp_comm_overlap": True},
    {"cross_entropy_fusion": False},
    {"attention": "unfused"},
    {"optimizer_cpu_offload": True},
    {"task": "dpo"},
]
_AS_STATED = {"grad_reduce_in_bf16": False, "exp_avg_dtype": "fp32", "cpu_offloading_num_layers": 0}
"""Switches that ``predict`` would else assume where a run does not fit, as a plan does not."""


@st.composite
def _requests(draw: st.DrawFn) -> dict[str, Any]:
    family, devices = draw(st.sampled_from(list(MODELS))), draw(st.sampled_from([4, 8, 16]))
    model = {**MODELS[family], "seq": 2048}
    if "layer_pattern" not in model:
        model["num_layers"] = 8
    parallel: dict[str, Any] = {
        "tp": draw(st.sampled_from([1, 2, 4])),
        "pp": draw(st.sampled_from([1, 2, 4])),
        "cp": draw(st.sampled_from([1, 1, 2])),
        "dist_opt": draw(st.booleans()),
        "sp": draw(st.booleans()),
    }
    if parallel["pp"] > 1 and family != "hybrid":
        parallel["vpp"] = draw(st.sampled_from([1, 2]))
    if model["type"] == "moe":
        parallel |= {"ep": draw(st.sampled_from([1, 2, 4])), "etp": draw(st.sampled_from([1, parallel["tp"]]))}
    train = {"gbs": 2 * devices, "mbs": draw(st.sampled_from([1, 2])), "recompute": "none", "stack": "megatron-core"}
    train |= {"overlap_grad_reduce": draw(st.booleans()), **_AS_STATED, **draw(st.sampled_from(_SWITCHES))}
    hardware = {"gpu": draw(st.sampled_from(DEVICES)), "num_gpus": devices, "gpus_per_node": min(8, devices)}
    return {"model": model, "hw": hardware, "parallel": parallel, "train": train}


def _peak_gib(plan: Plan) -> float:
    return max(rank.peak_bytes for rank in plan.memory) / 2**30


def _check(plan: Plan, request: dict[str, Any]) -> None:
    """A plan, its file and the answer to its request have one step and one peak."""
    again, _ = replay(Plan.parse(json.loads(plan.text())))
    assert again.step.total_us == pytest.approx(plan.step.total_us)
    assert again.memory == plan.memory
    # Without a layout of parameters ``predict`` assumes shards where a run does not fit.
    answer = predict_one({**request, "parallel": {"fsdp": 1, **request["parallel"]}})
    assert answer["status"] != "error", answer["reason"]
    assert answer["step_time_ms"] == pytest.approx(plan.step.total_us / 1e3, rel=APART)
    assert answer["peak_memory_gib"] == pytest.approx(_peak_gib(plan), rel=APART)


def _tuned(request: dict[str, Any]) -> Tuned:
    return tune(request, (), SearchOptions(time_limit_s=0.7, top_k=1, num_workers=1, with_relaxations=False))


@settings(max_examples=how_many(25, 300), deadline=None)
@given(request=_requests())
def test_what_predict_prices_is_tuned_with_these_sizes_and_what_it_refuses_is_refused(request: dict[str, Any]) -> None:
    try:
        work = read_workload(request)
    except ConfigError as error:
        with pytest.raises(AutoParallelError) as refused:
            _tuned(request)
        assert str(error) in str(refused.value)
        return
    # As ``tune`` states them.
    sections = [Section("text_decoder", request["model"])]
    switches = {key: value for key, value in request["train"].items() if key not in ("gbs", "mbs", "recompute")}
    stated = {**request["train"], **stated_train(sections, find_device(work.gpu), switches)}
    described = {**request, "train": stated}
    plan = priced_plan(described)
    _check(plan, described)
    fits = all(rank.peak_bytes <= rank.limit_bytes for rank in plan.memory)
    try:
        tuned = _tuned(described)
    except AutoParallelError as error:
        assert not fits, error
        return
    for other, own in zip(tuned.plans, tuned.requests, strict=True):
        _check(other, own)
    if fits:
        assert tuned.plans[0].step.total_us <= plan.step.total_us * (1 + APART)
