"""Megatron's own LLaVA model with its vision model under another layout equals one process."""

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.timeout(1200), pytest.mark.distributed, pytest.mark.torch, pytest.mark.megatron]

_spec = importlib.util.spec_from_file_location("hetero_launching", Path(__file__).with_name("launching.py"))
launching = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(launching)

TOLERANCE = 1e-5
CASES = [
    {"name": "dp4_over_tp2", "encoder": {"tp": 1}, "backbone": {"tp": 2}, "scale": 2, "steps": 3},
    {"name": "tp2_over_pp2", "encoder": {"tp": 2}, "backbone": {"pp": 2}, "memory": "window"},
    {
        "name": "dp4_over_tp2pp2",
        "encoder": {"tp": 1},
        "backbone": {"tp": 2, "pp": 2},
        "scale": 4,
        "memory": "recompute",
        # As the script reads its data.
        "first_tensor_rank_holds": True,
    },
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("llava")
    for num_processes, cases in ((1, [{"name": "reference", "steps": 3}]), (4, CASES)):
        (made / "cases.json").write_text(json.dumps(cases))
        launching.launch("oracle.py", num_processes, made, made / "cases.json", "llava_host")
    return made


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_training_equals_one_process(folder, case):
    worst = launching.differences(launching.load(folder, case["name"]), launching.load(folder, "reference"))
    assert worst.pop("spread") == 0.0, "replicas differ"
    assert all(value <= TOLERANCE for value in worst.values()), worst


def test_the_gradients_compared_are_those_of_every_part(folder):
    names = list(launching.load(folder, "dp4_over_tp2pp2")["gradients"][0])
    for part in ("image_encoder.conv1", "image_encoder.decoder.layers.3", "text_decoder.vision_projection", "language"):
        assert any(part in name for name in names), part
