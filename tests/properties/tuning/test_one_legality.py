"""A layout is legal or refused by one rule in one line, whichever command it is given to."""

from __future__ import annotations

from typing import Any

import pytest
from how_many import how_many
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.errors import AutoParallelError
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions, enumerate_layouts
from mindspeed_autoparallel.planner.rank_memory import measured_at
from mindspeed_autoparallel.predict.analytic_profile import analytic_profile
from mindspeed_autoparallel.predict.model_file import Section
from mindspeed_autoparallel.predict.predict import predict_one
from mindspeed_autoparallel.predict.tuning import tune
from mindspeed_autoparallel.profiles import MeasuredAt, Profile
from mindspeed_autoparallel.spec import Cluster, Layout

_NODE = 8
_WIDTHS = ("MLP width", "expert width")
"""Of rules on what only a described model has: a profile lacks these costs."""


_WITH_A_LAYOUT_STRING = " Give pipeline_layout to leave stages without layers."
"""What ``predict`` adds where only a layout string helps."""


@st.composite
def _models(draw: st.DrawFn) -> dict[str, Any]:
    heads = draw(st.sampled_from([8, 12, 24]))
    model: dict[str, Any] = {
        "num_layers": draw(st.sampled_from([2, 24, 24, 24])),
        "hidden": 64 * heads,
        "heads": heads,
        "kv_heads": draw(st.sampled_from([count for count in (1, 2, 3, 4, 6, 8, 12, 24) if heads % count == 0])),
        "ffn": draw(st.sampled_from([1000, 1536, 3072])),
        "seq": draw(st.sampled_from([100, 384, 512, 8192])),
        "vocab": 1024,
        "type": "gpt",
    }
    if draw(st.booleans()):
        model |= {"type": "moe", "num_experts": draw(st.sampled_from([6, 8, 12])), "topk": 2}
        model["moe_ffn"] = draw(st.sampled_from([100, 768]))
    elif draw(st.integers(0, 3)) == 0:
        size = draw(st.sampled_from([6, 16]))
        model["vision_encoder"] = {"num_layers": 4, "hidden": 64 * size, "heads": size, "ffn": 512}
        model["vision_encoder"]["tokens_per_sample"] = 256
    return model


@st.composite
def _layouts(draw: st.DrawFn, experts: bool) -> Layout:
    small = st.sampled_from([1, 1, 1, 2, 3, 4])
    tensor, pipeline, virtual = draw(small), draw(st.sampled_from([1, 1, 2, 3, 4])), draw(st.sampled_from([1, 1, 2, 3]))
    expert = draw(small)
    shared = draw(st.sampled_from([1, 2, 3, 4])) if experts else 0
    return Layout(
        tensor_size=tensor,
        pipeline_size=pipeline,
        virtual_size=virtual,
        schedule="interleaved" if virtual > 1 else "1f1b",
        context_size=draw(small),
        data_size=draw(st.sampled_from([1, 2, 3, 4])),
        expert_size=expert,
        expert_tensor_size=shared,
        micro_batch_size=draw(st.sampled_from([1, 1, 2, 3])),
        sequence_parallel=tensor > 1 and draw(st.booleans()),
        microbatch_group_size=draw(st.sampled_from([0, 0, pipeline, pipeline + 1])) if virtual > 1 else 0,
    )


def _request(
    model: dict[str, Any], layout: Layout, devices: int, batch: int, gpu: str = "H100", precision: str = "bf16"
) -> dict[str, Any]:
    sizes = {
        "tp": layout.tensor_size,
        "pp": layout.pipeline_size,
        "cp": layout.context_size,
        "dp": layout.data_size,
        "ep": layout.expert_size,
        "vpp": layout.virtual_size,
        "sp": layout.sequence_parallel,
        "microbatch_group_size": layout.microbatch_group_size,
    }
    if layout.expert_tensor_size:
        sizes["etp"] = layout.expert_tensor_size
    return {
        "model": model,
        "hw": {"gpu": gpu, "num_gpus": devices, "gpus_per_node": min(devices, _NODE)},
        "parallel": sizes,
        "train": {"gbs": batch, "mbs": layout.micro_batch_size, "stack": "megatron-core", "precision": precision},
    }


def _by_predict(request: dict[str, Any]) -> str:
    answer = predict_one(request)
    return answer["reason"].removesuffix(_WITH_A_LAYOUT_STRING) if answer["status"] == "error" else ""


def _profile(model: dict[str, Any], layout: Layout) -> Profile:
    points = dict.fromkeys([MeasuredAt(), measured_at(layout)])
    return analytic_profile([Section("text_decoder", model)], find_device("H100"), _NODE, points=points)


def _by_plan(model: dict[str, Any], layout: Layout, devices: int, batch: int) -> tuple[str, str]:
    node = min(devices, _NODE)
    cluster = Cluster(num_nodes=devices // node, devices_per_node=node)
    found, verdicts = enumerate_layouts(_profile(model, layout), cluster, batch, SpaceOptions(), [layout])
    if found:
        return "", ""
    (verdict,) = verdicts
    return verdict.reason, verdict.outcome


@settings(max_examples=how_many(300, 3000), deadline=None)
@given(data=st.data(), model=_models(), batch=st.sampled_from([6, 8, 12, 24, 48]))
def test_predict_and_the_search_accept_the_same_layouts_and_refuse_the_others_in_the_same_line(
    data: st.DataObject, model: dict[str, Any], batch: int
) -> None:
    layout = data.draw(_layouts("num_experts" in model))
    devices = data.draw(st.sampled_from([layout.num_devices] * 4 + [8]))
    assume(devices <= _NODE or devices % _NODE == 0)
    predicted = _by_predict(_request(model, layout, devices, batch))
    # The search may give an encoder stages of its own, a request only by a layout string.
    assume("vision_encoder" not in model or "stages are more than" not in predicted)
    reason, outcome = _by_plan(model, layout, devices, batch)
    if any(width in predicted for width in _WIDTHS):
        assert outcome
    else:
        assert (reason, outcome) == (predicted, "illegal" if predicted else "")


@settings(max_examples=how_many(25, 200), deadline=None)
@given(
    data=st.data(),
    model=_models(),
    batch=st.sampled_from([6, 8, 24]),
    gpu=st.sampled_from(["H100", "A100-80GB"]),
    precision=st.sampled_from(["bf16", "fp8"]),
)
def test_tune_with_all_sizes_given_refuses_what_predict_refuses_in_its_line(
    data: st.DataObject, model: dict[str, Any], batch: int, gpu: str, precision: str
) -> None:
    layout = data.draw(_layouts("num_experts" in model))
    assume(layout.microbatch_group_size == 0 and layout.expert_tensor_size in (0, 1, layout.tensor_size))
    devices = data.draw(st.sampled_from([layout.num_devices] * 4 + [8]))
    assume(devices <= _NODE or devices % _NODE == 0)
    request = _request(model, layout, devices, batch, gpu, precision)
    predicted = _by_predict(request)
    # ``tune`` leaves the stage of the embedding or of the output without layers.
    assume(predicted and "stages are more than" not in predicted)
    # ``tune`` chooses the groups of microbatches.
    assume("not in groups of" not in predicted)
    options = SearchOptions(time_limit_s=1.0, top_k=1, num_workers=1, with_relaxations=False)
    with pytest.raises(AutoParallelError) as refused:
        tune(request, (), options)
    assert predicted in str(refused.value)
