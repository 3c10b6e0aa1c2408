"""``--auto-parallel-preflight`` in the hand-written native trainer: peaks beside real ranks, verdicts, bad input."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from native_runs import FOLLOW, PLUGIN, ROOT, SCRIPT, SMALL, native_file, plan_of, run_native

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.spec.sharded import GroupChoice, ShardedDecisions, ShardSizes

pytestmark = [pytest.mark.torch, pytest.mark.distributed]

PATTERNS = ("model.embed_tokens", "model.layers.{*}", "lm_head", "")


def plan(*, recompute: bool, reshard: bool, **sizes: int) -> ShardedDecisions:
    """Return decisions for four devices."""
    policies = ("recompute", "keep", "recompute", "keep") if recompute else ("keep",) * 4
    return ShardedDecisions(
        sizes=ShardSizes(num_devices=4, expert_shard_size=4, **sizes),
        groups=tuple(GroupChoice(pattern=pattern, reshard_after_forward=reshard) for pattern in PATTERNS),
        policies={"model.layers.{*}": policies},
    )


CASES: dict[str, ShardedDecisions | None] = {
    "shards of four, two micro batches": plan(recompute=False, reshard=True, fully_shard_size=4, accumulation=2),
    "two replicas, recompute, nothing freed": plan(recompute=True, reshard=False, fully_shard_size=2),
    "the file's own, uneven shards": None,
}


def preflight(folder: Path, *words: str) -> tuple[int, str, dict[str, Any]]:
    """Return exit status, output and result of a pre-flight of the file in ``folder``."""
    done = run_native(1, folder / "config.yaml", *words)
    result = folder / "preflight_result.json"
    return done.status, done.outputs[0], json.loads(result.read_text()) if result.exists() else {}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[] if number == 1 else pytest.mark.long) for number, name in enumerate(CASES)]
)
def test_a_rank_alone_has_the_peak_of_a_real_one(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decisions = CASES[case]
    (tmp_path / "follow.py").write_text(FOLLOW)
    config = native_file(tmp_path, plugins="follow")
    if decisions is None:
        # Of 34 and 65 rows the last of four ranks has fewer than the others.
        sizes = {"vocab_size": 65, "hidden_size": 34, "num_attention_heads": 2, "num_hidden_layers": 3}
        (tmp_path / "model" / "config.json").write_text(json.dumps(sizes))
        words = ["--auto-parallel-preflight", "--simulated-nnodes", "1", "--simulated-nproc-per-node", "4"]
    else:
        plan_of(decisions).write(tmp_path / "plan.json")
        words = ["--auto-parallel-preflight", "plan.json"]
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    real = run_native(4, config)
    assert real.status == 0, real.outputs[0][-3000:]
    native_file(tmp_path, plugins=PLUGIN)
    if decisions is None:
        (tmp_path / "model" / "config.json").write_text(json.dumps(sizes))
    status, output, result = preflight(tmp_path, *words, "--auto-parallel-preflight-ranks", "ends")
    assert status == 0 and "verdict: fits" in output and "loss:" not in output, output
    runs = [report["run"] for report in result["ranks"]]
    assert [run["rank"] for run in runs] == [0, 3] and all(run["num_steps"] == 3 for run in runs)
    for run in runs:
        expected = json.loads((tmp_path / f"real{run['rank']}.json").read_text())
        print(case, run["rank"], run["peak_bytes"], expected["peak_bytes"], run["peak_place"], expected["peak_place"])
        assert run["peak_bytes"] == pytest.approx(expected["peak_bytes"], rel=0.01)
        assert run["resident_bytes"] == pytest.approx(expected["resident_bytes"], rel=0.01)
        assert [item["kind"] for item in run["passes"]] == ["F", "B"] * (2 if "two micro" in case else 1)
    log = (tmp_path / "auto_parallel_work/logs/preflight-rank0.rank0.log").read_text()
    assert "loss:" not in log


@pytest.mark.usefixtures("forked_starts")
def test_the_front_reports_a_limit_below_the_peak_and_what_would_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    edits = {"micro_batch_size: 1": "micro_batch_size: 4", "{samples: 64}": "{samples: 64, length: 512}"}
    config = native_file(tmp_path, **edits)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SMALL), str(ROOT)]))
    monkeypatch.chdir(tmp_path)
    words = ["--devices", "4", "--memory-limit-mib", "1", "--out", str(tmp_path), "--", str(SCRIPT), str(config)]
    assert main(["preflight", *words]) == 3
    output, result = capfd.readouterr().out, json.loads((tmp_path / "preflight_result.json").read_text())
    assert "runs out of memory by" in output and "micro_batch_size 2 in place of 4" in output
    assert result["verdict"] == "runs_out" and result["ranks"][0]["stands_for"] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--auto-parallel-preflight", "plan.json", "--auto-parallel-preflight-ranks", "4"], "has ranks 0 to 3"),
        (["--auto-parallel-preflight"], "--simulated-nnodes"),
        (["--auto-parallel-preflight", "plan.json", "--auto-parallel-mm"], "exclude each other"),
    ],
)
def test_bad_input_ends_with_a_line_before_anything_starts(words: list[str], message: str, tmp_path: Path) -> None:
    native_file(tmp_path)
    plan_of(plan(recompute=False, reshard=True, fully_shard_size=4)).write(tmp_path / "plan.json")
    status, output, result = preflight(tmp_path, *words)
    assert status == 2 and message in output.splitlines()[-1] and not result and "Traceback" not in output, output
