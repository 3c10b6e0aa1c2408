"""Every batch of the GPU kit runs and writes figures that parse, with tiny sizes on CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forked_python import forked_python

pytestmark = [pytest.mark.distributed, pytest.mark.torch, pytest.mark.megatron, pytest.mark.timeout(900)]
KIT = Path(__file__).with_name("kit.py")
ROOT = KIT.parents[2]


def dry_run(folder: Path, batch: str) -> list[dict[str, Any]]:
    environment = {**os.environ, "OUT": str(folder), "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [forked_python(), str(KIT), batch, "--small"],
        env={**environment, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in (folder / f"{batch}.jsonl").read_text().splitlines()]
    assert lines[0]["kind"] == "machine" and lines[0]["date"]
    return lines[1:]


@pytest.fixture(autouse=True)
def _training_is_there() -> None:
    pytest.importorskip("megatron.training")


def test_blocks_are_measured_beside_predictions_and_calibrated(tmp_path: Path) -> None:
    lines = dry_run(tmp_path, "blocks")
    figures = [line for line in lines if line["kind"] == "figure"]
    assert {line["block"] for line in figures} == {"dense", "gqa", "experts", "vit", "mla", "linear_attention"}
    assert len(figures) == len(lines) == 12 and all(line["measured"]["forward_us"] > 0 for line in figures)
    # Linear attention has no computed profile.
    assert all((line["predicted"] is None) == (line["block"] == "linear_attention") for line in figures)
    scores = dry_run(tmp_path, "calibrate")
    assert [line["time"] for line in scores] == ["forward_us", "backward_us"]
    assert all(len(line["factors"]) == line["num_fitted"] == line["num_scored"] == 5 for line in scores)


def test_layouts_are_run_beside_predictions(tmp_path: Path) -> None:
    (line,) = dry_run(tmp_path, "layouts")
    assert line["kind"] == "figure" and line["peak_gib"] > 0 and line["predicted"]["peak_gib"] > 0


def test_orders_are_compared(tmp_path: Path) -> None:
    figure, score = dry_run(tmp_path, "order")
    assert figure["replay_ms"] > 0 and figure["predicted"]["step_ms"] > 0
    assert score["kind"] == "score" and score["holds"]


def test_a_rank_of_a_sharded_training_runs_alone(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    lines = dry_run(tmp_path, "published")
    assert [line["checkpointed"] for line in lines] == ["selective", "full", "none"]
    for line in lines:
        assert line["kind"] == "figure" and line["parameters_here"] * line["world"] >= line["parameters"], line


def test_the_kit_covers_what_it_lists() -> None:
    sys.path.insert(0, str(KIT.parent))
    try:
        import batch_blocks
        import batch_calibrate
        import batch_layouts
    finally:
        sys.path.remove(str(KIT.parent))
    blocks = batch_blocks.items(small=False)
    assert len(blocks) == 40 and len(batch_layouts.LAYOUTS) == 20
    fitted, scored = batch_calibrate.fitted_and_scored([one for one in blocks if one["block"] != "linear_attention"])
    assert len(fitted) == 10 and len(scored) == 24
