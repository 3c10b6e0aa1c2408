"""Verdicts through the front, on limits just below and above the peak of the fullest of real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_ranks import GPT, GPT_FLAGS, MARKS, played, real_peaks

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.units import MIB

pytestmark = [*MARKS, pytest.mark.long]

FLAGS = f"{GPT_FLAGS} --global-batch-size 16"
LAYOUTS = {
    "TP2 PP2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"),
    "PP2 VPP2 selective": (
        4,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --recompute-granularity selective",
    ),
    "TP2 CP2 full": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1",
    ),
    "PP2 TP2 EP2 on eight": (
        8,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --num-experts 4 "
        "--expert-model-parallel-size 2 --moe-router-topk 2 --moe-ffn-hidden-size 64 "
        "--moe-token-dispatcher-type alltoall",
    ),
}
BELOW, ABOVE = (0.98, 0.995, 0.999), (1.001, 1.005)


@pytest.mark.parametrize("name", LAYOUTS)
def test_verdicts_on_limits_beside_the_real_peak(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world, layout = LAYOUTS[name]
    flags = [*FLAGS.split(), *layout.split()]
    peaks = real_peaks(tmp_path / "real", GPT, flags, world)
    result = played(tmp_path, GPT, flags, world)
    for report in result["ranks"]:
        alone, members = report["run"]["peak_bytes"], [peaks[rank] for rank in report["stands_for"]]
        print(name, report["run"]["rank"], alone, members)
        assert all(abs(alone / peak - 1) <= 0.01 for peak in members)
    for share in (*BELOW, *ABOVE):
        limit = str(share * max(peaks) / MIB)
        code = main(["preflight", "--result", str(tmp_path / "preflight_result.json"), "--memory-limit-mib", limit])
        assert code == (3 if share in BELOW else 0), (share, capsys.readouterr().out)
    print(f"LIMITS {name}: {len(BELOW) + len(ABOVE)} of {len(BELOW) + len(ABOVE)} right")
