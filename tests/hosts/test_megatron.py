"""Megatron-LM source checkouts, run for real: ``MEGATRON_LM_SOURCES`` lists their folders (docs/hosts.md)."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("megatron_cells", Path(__file__).with_name("megatron_cells.py"))
cells = importlib.util.module_from_spec(_spec)
sys.modules["megatron_cells"] = cells
_spec.loader.exec_module(cells)

SOURCES = [Path(folder) for folder in os.environ.get("MEGATRON_LM_SOURCES", "").split(os.pathsep) if folder]
WITHOUT = (
    "MEGATRON_LM_SOURCES is not set: give it the folders of Megatron-LM source checkouts (core_v0.12.1, core_v0.16.1, "
    "core_v0.18.2, core_v0.19.0, main), separated by ':'. docs/hosts.md says how to get them."
)
pytestmark = [
    pytest.mark.timeout(3000),
    pytest.mark.distributed,
    pytest.mark.torch,
    pytest.mark.megatron,
    pytest.mark.skipif(not SOURCES, reason=WITHOUT),
]
MODELS = os.environ.get("MEGATRON_LM_MODELS", "dense,moe").split(",")
PORT = 22900
TOLERANCE = 1e-5


@pytest.fixture(params=SOURCES or [None], ids=lambda folder: folder.name if folder else "none")
def host(request, tmp_path):
    return cells.Host(sources=request.param, folder=tmp_path)


@pytest.mark.parametrize("model", MODELS)
def test_a_plan_is_found_that_trains_as_one_process_does(host, model, tmp_path):
    found = host.search(model, PORT)
    assert found.exit_code == 0, found.output[-3000:]
    assert "TP2 CP1" in found.output, "tensor parallel layouts are measured, too"
    script, flags = str(host.script(model)), host.flags(model)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    alone = host.run([*launcher, "1", script, *flags])
    assert alone.exit_code == 0, alone.output[-3000:]
    layout = host.plan()["layout"]
    world = layout["pipeline_size"] * layout["tensor_size"] * layout["data_size"] * layout["context_size"]
    plan = ["--auto-parallel-plan", str(tmp_path / "plan.json")]
    planned = host.run([*launcher, str(world), script, *flags, *plan])
    assert planned.exit_code == 0, planned.output[-3000:]
    assert len(alone.losses) == 3
    assert planned.losses == pytest.approx(alone.losses, rel=TOLERANCE)


HYBRID = ["--hybrid-layer-pattern", "M*-M*-"]


def test_the_operator_search_refuses_hybrid_models_before_megatron_is_imported(host):
    refused = host.run([str(host.script("dense")), *host.flags("dense"), *HYBRID, "--operator-search"])
    assert refused.exit_code == 2
    assert "--operator-search takes layers that are alike" in refused.output
    assert "Megatron-Core version" not in refused.output, "the script's imports were not reached"


def test_the_vision_language_script_is_planned_as_it_runs(host):
    if host.release < (0, 13):
        pytest.skip("0.12's pretrain_vlm.py imports transformer_engine whatever --transformer-impl says")
    found = host.search("vlm", PORT)
    assert found.exit_code == 0, found.output[-3000:]
    vision, language = (
        [stage["layers"][name] for stage in host.plan()["stages"]] for name in ("vision_model", "language_model")
    )
    assert sum(vision) == vision[0] == 4
    assert len(set(language)) == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "no/such/folder"],
            "the script ends before the first",
        ),
        (["--simulated-nnodes", "0"], "--simulated-nnodes"),
        (["--auto-parallel-profile", "none.json"], "none.json"),
    ],
)
def test_one_wrong_flag_is_named_before_a_second_launch(host, flags, said):
    found = host.search("dense", PORT, *flags)
    assert found.exit_code == 2
    assert said in found.output
    assert found.output.count("points in one launch") <= 1
