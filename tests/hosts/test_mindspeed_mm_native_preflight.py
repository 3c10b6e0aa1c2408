"""``--auto-parallel-preflight`` in MindSpeed-MM's native FSDP2 trainer itself: peaks of ranks alone beside real ones."""

from __future__ import annotations

import json
import os

import pytest
from native_cells import (
    EXPERTS,
    EXPERTS_HYBRID,
    HYBRID,
    KINDS,
    PLANS,
    ULYSSES,
    needs_sources,
    renamed,
    run_native_host,
    write_config,
    write_model,
)
from native_runs import FOLLOW, plan_of

pytestmark = needs_sources()
CASES = {
    "experts, EP 2": ("moe", "text", EXPERTS, 1.0),
    "experts, EP 2, half as many tokens again": ("moe", "text", EXPERTS, 1.5),
    "replicas of shards, pictures": ("moe", "pictures", HYBRID, 1.0),
    "Ulysses 2, offload": ("moe", "text", ULYSSES, 1.0),
    "Qwen3-Omni, sounds": ("omni", "sounds", HYBRID, 1.0),
    "Qwen3.5 with experts, EP 2, HSDP, pictures": ("linear-moe", "pictures", EXPERTS_HYBRID, 1.0),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a function: the folder with a model and its data, made once."""
    made = {}

    def get(kind):
        if not os.environ.get(KINDS[kind].python):
            pytest.skip(f"set {KINDS[kind].python} (tests/hosts/README.md)")
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            write_model(made[kind], kind)
        return made[kind]

    return get


@pytest.mark.parametrize("case", CASES)
def test_ranks_alone_have_the_peaks_of_real_ones(case, folders, monkeypatch):
    kind, data, name, imbalance = CASES[case]
    decided, folder, python = renamed(PLANS[name], kind), folders(kind), KINDS[kind].python
    sizes = decided.sizes
    plan_of(decided, KINDS[kind].model_id).write(folder / "plan.json")
    flash = {"model.attn_implementation": "flash_attention_2"} if sizes.ulysses_size > 1 else {}
    config = write_config(folder, kind, flash, data=data)
    ranks = "0" if imbalance > 1 else "ends"
    words = ["--auto-parallel-preflight", "plan.json", "--auto-parallel-preflight-ranks", ranks]
    words += ["--auto-parallel-preflight-imbalance", str(imbalance), "--auto-parallel-output-dir", str(folder)]
    alone = run_native_host(1, config, *words, python=python)
    assert alone.status == 0 and "verdict: fits" in alone.output, alone.output[-3000:]
    (folder / "follow.py").write_text(FOLLOW)
    config.write_text(config.read_text("utf-8").replace("mindspeed_autoparallel.plugin", "follow"), "utf-8")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("IMBALANCE", str(imbalance))
    monkeypatch.setenv("EXPERT_RANKS", str(sizes.expert_size))
    real = run_native_host(sizes.num_devices, config, python=python)
    assert real.status == 0, real.output[-3000:]
    runs = [report["run"] for report in json.loads((folder / "preflight_result.json").read_text())["ranks"]]
    assert [run["rank"] for run in runs] == ([0] if imbalance > 1 else [0, sizes.num_devices - 1])
    for run in runs:
        expected = json.loads((folder / f"real{run['rank']}.json").read_text())
        for key in ("peak_bytes", "resident_bytes"):
            print(f"PEAK {case}, rank {run['rank']}: {key} {run[key]} real {expected[key]}", run["peak_place"])
            assert run[key] == pytest.approx(expected[key], rel=0.01)
