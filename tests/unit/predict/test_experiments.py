"""Which figures a choice hangs on, what would settle it, and which plan regrets least until then."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.cost.analytic.reading import read_workload
from mindspeed_autoparallel.cost.analytic.step_time import closed_form_us
from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.predict.experiments import _shape_errors, _shapes, _spreads, decide
from mindspeed_autoparallel.predict.fitting import with_values

_REQUEST: dict[str, Any] = {
    "model": {"type": "gpt", "num_layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "seq": 4096,
              "vocab": 128256, "swiglu": True},
    "hw": {"gpu": "MI300X", "num_gpus": 16, "gpus_per_node": 8, "inter_node_gbps": 800},
    "train": {"gbs": 32, "mbs": 1},
}  # fmt: skip

_SCHEMAS = Path(__file__).parents[3] / "docs" / "schemas"


def _works() -> list[Workload]:
    layouts = [{"tp": 8, "pp": 1}, {"tp": 1, "pp": 1}, {"tp": 2, "pp": 4}, {"tp": 4, "pp": 2}, {"tp": 1, "pp": 8}]
    return [read_workload({**_REQUEST, "parallel": layout}) for layout in layouts]


def _known(device: Device, deviation: float) -> Device:
    names = ("gemm_fraction", "attention_fraction", "memory_fraction", "link_fraction", "inter_fraction", "launch_us")
    names += ("step_us", "tensor_launch_us", "point_to_point_us", "link_latency_us")
    return with_values(device, "megatron-core", {"uncertainty": dict.fromkeys(names, deviation)})


def test_a_choice_between_figures_that_are_known_is_settled() -> None:
    decision = decide(_works(), _known(find_device("MI300X"), 1e-4))
    assert not decision.hangs_on
    assert not decision.experiments
    assert decision.safest == decision.fastest


def test_a_choice_that_hangs_on_a_figure_names_it_and_a_run_that_settles_it() -> None:
    device, works = _known(find_device("MI300X"), 0.4), _works()
    decision = decide(works, device)
    times = [closed_form_us(work, device) / 1e3 for work in works]
    assert decision.fastest == times.index(min(times))
    assert decision.hangs_on
    assert decision.worst_regret["safest"] <= decision.worst_regret["fastest"]
    assert 1 <= len(decision.experiments) <= 3
    left = [decision.worst_regret["safest"], *(item.worst_regret_after for item in decision.experiments)]
    assert left == sorted(left, reverse=True)
    for item in decision.experiments:
        assert item.work.num_devices <= works[item.candidate].num_devices
        assert item.device_seconds > 0


def test_plans_within_the_error_of_their_shapes_are_undecided_and_one_of_them_settles_it() -> None:
    works = _works()
    exact = with_values(find_device("MI300X"), "megatron-core", {"relative_error": 1e-6, "intervals": {"seen": 1e-6}})
    assert decide(works, _known(exact, 1e-6)).undecided == ()
    assert decide(works, _known(exact, 1e-6)).settling is None
    rough = decide(works, _known(find_device("MI300X"), 1e-6))
    assert rough.undecided
    assert rough.settling in rough.undecided
    assert rough.fastest not in rough.undecided
    assert rough.worst_regret["fastest"] > 0.005


def test_layers_of_one_shape_err_together() -> None:
    # Both have TP 2 and MBS 1, and differ in stages only.
    layouts = [{"tp": 2, "pp": 1}, {"tp": 2, "pp": 2}, {"tp": 4, "pp": 1}]
    works = [read_workload({**_REQUEST, "parallel": layout}) for layout in layouts]
    errors, shapes = _shape_errors(works, find_device("MI300X")), _shapes(works)
    spreads = _spreads(np.zeros((3, 1)), np.zeros(1), errors, shapes)
    assert spreads[0, 1] == pytest.approx(0.02 * 2**0.5)
    assert spreads[0, 2] == pytest.approx(np.hypot(errors[0], errors[2]))
    assert spreads[0, 2] > 5 * spreads[0, 1]


def test_the_regret_of_a_scenario_is_that_of_the_figures_it_moves() -> None:
    device, works = _known(find_device("MI300X"), 0.3), _works()
    decision = decide(works, device)
    name, regret = next(iter(decision.hangs_on.items()))
    value = getattr(device.efficiency("megatron-core"), name)
    worst = 0.0
    for factor in (1.645 * 0.3, -1.645 * 0.3):
        moved = with_values(device, "megatron-core", {name: value * 2.718281828**factor})
        times = [closed_form_us(work, moved) / 1e3 for work in works]
        worst = max(worst, times[decision.fastest] / min(times) - 1)
    assert regret == pytest.approx(worst, rel=0.35, abs=0.01)  # slopes stand for the curve


def test_the_command_prints_the_decision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "request.json"
    path.write_text(json.dumps({**_REQUEST, "parallel": {}}))
    assert main(["tune", "--request", str(path), "--what-to-measure", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    schema = jsonschema.Draft202012Validator(json.loads((_SCHEMAS / "tuning.json").read_text("utf-8")))
    schema.validate(document)
    decision = document["decision"]
    for key in decision:
        assert not schema.is_valid({**document, "decision": {**decision, key: [["wrong"]]}})
    assert decision["fastest"] == 1
    assert decision["worst_regret"]["safest"] <= decision["worst_regret"]["fastest"]
    assert main(["tune", "--request", str(path), "--what-to-measure"]) == 0
    assert "least worst regret" in (out := capsys.readouterr().out) or "settled" in out


def test_shrunk_runs_are_legal() -> None:
    for item in decide(_works(), _known(find_device("MI300X"), 0.4)).experiments:
        assert item.work.num_microbatches >= item.work.pipeline_size
        assert dataclasses.replace(item.work) == item.work
