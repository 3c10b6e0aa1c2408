"""A page of every kind, from real searches of small problems and from the example plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy
from example_plan import example_plan
from native_runs import plan_of as native_plan

from mindspeed_autoparallel.cli._launch import flags_line
from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.data.distribution import DataSource, make_distribution
from mindspeed_autoparallel.data.work import SampleSize
from mindspeed_autoparallel.operators import preset_graph, search_graph
from mindspeed_autoparallel.operators.lowering.megatron import derive_megatron
from mindspeed_autoparallel.operators.picture import picture_data
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.layouts.assembly import plan_of
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.predict.analytic_profile import analytic_profile
from mindspeed_autoparallel.predict.model_file import Section
from mindspeed_autoparallel.predict.price import priced_plan
from mindspeed_autoparallel.predict.tuning import tune
from mindspeed_autoparallel.report import render_page
from mindspeed_autoparallel.report.data_page import render_data_page
from mindspeed_autoparallel.report.operator_page import render_operator_page
from mindspeed_autoparallel.report.sharded import render_sharded_page
from mindspeed_autoparallel.report.tuning import render_tuning_page
from mindspeed_autoparallel.spec import Cluster, Layout, Plan
from mindspeed_autoparallel.spec.plan_records import SearchRecord
from mindspeed_autoparallel.spec.sharded import GroupChoice, ShardedDecisions, ShardSizes
from mindspeed_autoparallel.spec.sharded_plan import ShardedMemory

_MODEL = {"type": "gpt", "num_layers": 8, "hidden": 2048, "heads": 16, "ffn": 8192, "seq": 2048, "vocab": 32000}


def _request(**parallel: Any) -> dict[str, Any]:
    return {
        "id": "small",
        "model": {**_MODEL, "swiglu": True},
        "hw": {"gpu": "H100", "num_gpus": 4, "gpus_per_node": 4},
        "parallel": parallel,
        "train": {"gbs": 16},
    }


def virtual_plan() -> Plan:
    """Return a plan of 96 layers on 8 stages of 4 chunks: 32 virtual stages."""
    model = {**_MODEL, "num_layers": 96, "swiglu": True}
    profile = analytic_profile([Section("text_decoder", model)], find_device("H100"), 8, train={})
    layout = Layout(pipeline_size=8, data_size=2, virtual_size=4, schedule="interleaved", overlap_gradient_reduce=True)
    rows = (3,) * 32
    placement = ModulePlacement(
        layers={"text_decoder": rows}, recompute={"text_decoder": {"full": (2,) * 8 + (0,) * 24}}
    )
    cluster, batch = Cluster(num_nodes=2, devices_per_node=8), 64
    found = evaluate(profile, cluster, layout, placement, batch)
    record = SearchRecord(
        status="feasible",
        lower_bound_us=0.9 * found.step.total_us,
        gap_fraction=0.1,
        num_configurations=1,
        num_solved=1,
        seconds=1.0,
    )
    return plan_of(profile, cluster, layout, found, batch, record)


def tuned_configuration(number: int, step_ms: float) -> dict[str, Any]:
    """Return one of a result's configurations."""
    memory = [{"pipeline_rank": 0, "peak_bytes": 2**30, "limit_bytes": 2**31, "peak_point": "backward of layer 1"}]
    return {
        "number": number,
        "label": f"PP{number} TP1",
        "step_time_ms": step_ms,
        "step_time_interval_ms": [0.9 * step_ms, 1.1 * step_ms],
        "bubble_fraction": 0.1,
        "memory": memory,
        "tokens_per_s_per_device": 5.0,
        "recompute": {"kind": "none", "layers_per_stage": [0]},
        "argv": ["--tensor-model-parallel-size", "1"],
        "take_out": ["--sequence-parallel"],
        "command": "torchrun --standalone --nproc-per-node 4 train.py --tensor-model-parallel-size 1",
        "plan": f"auto_tuning_plan_{number}.json",
        "limits": ["bubble: ranks waiting for others: 10.0% of the step"],
    }


def tuning_result() -> Any:
    """Return a result of ``--auto-tuning`` with made-up figures."""
    return {
        "ranks": 4,
        "devices_per_node": 4,
        "device": "cpu",
        "launches": [],
        "num_device_launches": 1,
        "knowledge": {"covered_time_share": 1.0},
        "notes": [],
        "top": [tuned_configuration(1, 100.0), tuned_configuration(2, 105.0), tuned_configuration(3, 150.0)],
        "search": {
            "num_candidates": 9,
            "num_legal": 5,
            "num_solved": 4,
            "num_bounded": 1,
            "num_without_room": 0,
            "seconds": 0.5,
            "lower_bound_ms": 100.0,
        },
        "as_given": {
            "label": "PP4 TP1",
            "step_time_ms": 125.0,
            "peak_bytes": 2**30,
            "limit_bytes": 2**31,
            "fits": True,
        },
        "searched": {"tensor parallel": "1, 2"},
        "left_out_dimensions": {"MC2": "needs an Ascend NPU"},
        "left_out": {"N stages are more than the N layers.": 4},
    }


def _sharded() -> str:
    decisions = ShardedDecisions(
        sizes=ShardSizes(num_devices=4, fully_shard_size=4),
        groups=(GroupChoice(pattern="model.layers.{*}"),),
        policies={"model.layers.{*}": ("recompute", "recompute", "keep", "keep")},
    )
    terms = {"parameters": 2**19, "gradients": 2**18, "activations": 2**18}
    memory = ShardedMemory(peak_bytes=2**20, limit_bytes=2**30, peak_point="backward of layer 3", terms=terms)
    return render_sharded_page(replace(native_plan(decisions), memory=memory))


def _data() -> str:
    drawn = numpy.random.default_rng(1)
    samples = [SampleSize(tokens=int(n), patches=int(n) // 3) for n in drawn.lognormal(6, 0.8, 300)]
    source = DataSource(
        kind="lengths", files=("train.jsonl",), sha256="", tokens_by="given", num_records=300, num_read=300
    )
    return render_data_page(make_distribution(source, samples))


def _operators() -> str:
    plan = search_graph(preset_graph("llama2-7b", batch=8, sequence=64, num_layers=2), 8, search_mode="exact")
    return render_operator_page(picture_data(plan, derive_megatron(plan).as_json()))


def _of_plan(plan: Plan) -> str:
    return render_page(plan, flags_line(plan))


_PAGES: dict[str, Callable[[], str]] = {
    "plan": lambda: _of_plan(
        tune(_request(), options=SearchOptions(time_limit_s=5.0, top_k=3, num_workers=1)).plans[0]
    ),
    "example": lambda: _of_plan(example_plan()),
    "virtual": lambda: _of_plan(virtual_plan()),
    "predict": lambda: _of_plan(priced_plan({**_request(tp=2, pp=2), "train": {"gbs": 16, "mbs": 1}})),
    "tuning": lambda: render_tuning_page(tuning_result()),
    "sharded": _sharded,
    "data": _data,
    "operators": _operators,
}
KINDS = tuple(_PAGES)


@cache
def example_page(kind: str) -> str:
    """Return the page of one of ``KINDS``."""
    return _PAGES[kind]()
