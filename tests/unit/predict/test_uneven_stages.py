"""Layers that do not split evenly over stages."""

from __future__ import annotations

import copy
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_autoparallel.cost.analytic.placement import layout_counts
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.predict.predict import predict_one
from mindspeed_autoparallel.predict.search import megatron_argv, search
from mindspeed_autoparallel.predict.space import candidates
from mindspeed_autoparallel.predict.uneven_stages import balanced_counts

_MODEL = {
    "type": "moe",
    "num_layers": 13,
    "hidden": 2048,
    "heads": 16,
    "seq": 2048,
    "swiglu": True,
    "num_experts": 8,
    "topk": 2,
    "moe_ffn": 1024,
    "num_dense_layers": 1,
    "mtp_layers": 1,
}
_BASE = {
    "model": _MODEL,
    "hw": {"gpu": "H100", "num_gpus": 8, "gpus_per_node": 8},
    "parallel": {},
    "train": {"gbs": 32},
}


@given(
    st.lists(st.floats(0.5, 9.0), min_size=2, max_size=8),
    st.floats(0.0, 20.0),
    st.integers(1, 5),
)
def test_no_other_split_has_a_faster_slowest_chunk(layers: list[float], head: float, chunks: int) -> None:
    if chunks > len(layers):
        with pytest.raises(ConfigError, match="cannot be split over"):
            balanced_counts(layers, head, chunks)
        return

    def slowest(counts: tuple[int, ...]) -> float:
        ends = list(itertools.accumulate(counts))
        times = [sum(layers[end - count : end]) for end, count in zip(ends, counts, strict=True)]
        return max([*times[:-1], times[-1] + head])

    found = balanced_counts(layers, head, chunks)
    assert sum(found) == len(layers)
    assert min(found) >= 1
    every = itertools.product(range(1, len(layers) + 1), repeat=chunks)
    best = min(slowest(counts) for counts in every if sum(counts) == len(layers))
    assert slowest(found) == pytest.approx(best)


def test_thirteen_layers_are_searched_over_pipelines_and_the_flags_place_them() -> None:
    placed = [request for request in candidates(_BASE) if request["parallel"].get("pipeline_layout")]
    assert {request["parallel"]["pp"] for request in placed} == {2, 4, 8}
    for request in placed:
        layout, sizes = request["parallel"]["pipeline_layout"], request["parallel"]
        assert sum(layout_counts(layout, 13, sizes["pp"], sizes["vpp"])) == 13
        assert layout.endswith("mL")
    found = next(request for request in placed if predict_one(request)["status"] == "ok")
    argv = megatron_argv(found)
    assert argv[argv.index("--pipeline-model-parallel-layout") + 1] == found["parallel"]["pipeline_layout"]
    assert "--num-layers-per-virtual-pipeline-stage" not in argv


def test_megatron_accepts_every_layout() -> None:
    layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    asked = {
        (request["parallel"]["pipeline_layout"], request["parallel"]["pp"])
        for request in candidates(_BASE)
        if request["parallel"].get("pipeline_layout")
    }
    assert len(asked) > 3
    for text, pipeline in asked:
        layouts.PipelineParallelLayerLayout(text, pipeline).validate_layer_layout(13, 1)


def test_mindspeed_is_given_a_list_and_no_virtual_stages() -> None:
    base = copy.deepcopy(_BASE)
    base["hw"]["gpu"] = "910B"
    placed = [request for request in candidates(base) if request["parallel"].get("num_layer_list")]
    assert {request["parallel"]["vpp"] for request in placed} == {1}
    request = next(request for request in placed if request["parallel"]["pp"] == 4)
    listed = request["parallel"]["num_layer_list"]
    argv = megatron_argv(request)
    assert argv[argv.index("--num-layer-list") + 1] == ",".join(map(str, listed))
    assert sum(listed) == 13


@pytest.mark.parametrize(
    ("held", "flags"),
    [
        ({"pipeline_layout": "Et*6|t*7mL"}, ["--pipeline-model-parallel-layout", "Et*6|t*7mL"]),
        ({"num_layer_list": [7, 6]}, ["--num-layer-list", "7,6"]),
        ({"first_stage_layers": 6}, ["--decoder-first-pipeline-num-layers", "6"]),
        ({"account_for_loss": True}, ["--account-for-loss-in-pipeline-split"]),
    ],
)
def test_a_placement_that_is_held_is_among_the_flags(held: dict[str, object], flags: list[str]) -> None:
    base = copy.deepcopy(_BASE)
    base["parallel"] = {"pp": 2, "vpp": 1, **held}
    for plan in search(base)["top"]:
        start = plan["argv"].index(flags[0])
        assert plan["argv"][start : start + len(flags)] == flags
