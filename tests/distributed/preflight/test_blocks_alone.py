"""Blocks that one device measures by playing a rank, beside those that four real ranks measure: bytes, times, plans.

Both sides have the clock of ``same_clock.py``: what a block itself computes, without collectives, and without what other
programs of this machine take. Collectives are priced by the same links on both sides; routers are balanced on both.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pytest
from forked_python import forked_python

from mindspeed_autoparallel.errors import PlanError
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.profiles import Profile, read_profile
from mindspeed_autoparallel.spec.cluster import Cluster
from mindspeed_autoparallel.spec.plan import Plan

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.torch,
    pytest.mark.megatron,
    pytest.mark.long,
    pytest.mark.timeout(1800),
]

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "docs/examples/pretrain_gpt.py"
FLAGS = """--num-layers 8 --hidden-size 256 --ffn-hidden-size 768 --seq-length 256 --max-position-embeddings 256
    --micro-batch-size 1 --global-batch-size 6 --tokenizer-type NullTokenizer --vocab-size 1023
    --make-vocab-size-divisible-by 128 --normalization RMSNorm --swiglu --disable-bias-linear
    --position-embedding-type rope --lr 1e-3 --train-iters 20 --mock-data --use-distributed-optimizer
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-rope-fusion --no-persist-layer-norm
    --eval-interval 1000 --eval-iters 0 --transformer-impl local --untie-embeddings-and-output-weights
    --sequence-parallel --num-workers 0 --auto-parallel-mm --simulated-nnodes 1 --simulated-nproc-per-node 4"""
MODELS = {
    "dense": "--num-attention-heads 4",
    "experts": "--num-attention-heads 2 --num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2 "
    "--moe-ffn-hidden-size 256 --moe-token-dispatcher-type alltoall",
    "context": "--num-attention-heads 2 --context-parallel-size 2",
}
SAME_CLOCK = Path(__file__).with_name("same_clock.py")
TIMES = ("forward_us", "backward_us")
BYTES = ("saved_bytes", "forward_peak_bytes", "backward_peak_bytes", "output_bytes")


def run(folder: Path, model: str, processes: int) -> None:
    """Run ``--auto-parallel-mm`` of a model in ``folder``."""
    first = "# isort: split\n"
    script = folder / "train.py"
    folder.mkdir(exist_ok=True)
    shutil.copy(SAME_CLOCK, folder)
    text = EXAMPLE.read_text()
    assert first in text
    script.write_text(text.replace(first, f"{first}import same_clock\n"))
    words = [*FLAGS.split(), *MODELS[model].split(), "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [forked_python(), str(script), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu", "PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def points(folder: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Return file and content of every measured point, in the order in which they were measured."""
    files = sorted(folder.glob("auto_parallel_work/measurements/*/*MBS*.json"), key=lambda path: path.stat().st_mtime)
    return {path.stem: (path, json.loads(path.read_text())) for path in files}


def blocks(point: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the blocks of a point by module and name."""
    return {(module["name"], name): block for module in point["modules"] for name, block in module["blocks"].items()}


def compare(folder: Path, model: str) -> dict[str, Any]:
    """Measure ``model`` both ways; return counts and ratios, and leave the profile of each side."""
    alone, real = folder / "alone", folder / "real"
    run(alone, model, 1)
    run(real, model, 4)
    (alone / "auto_parallel_work/profile.json").rename(folder / "alone.json")
    played, measured = points(alone), points(real)
    assert list(played) == list(measured) and played
    sides = {side.name: json.loads((side / "repeats.json").read_text()) for side in (alone, real)}
    found: dict[str, Any] = {"same_bytes": 0, "bytes": 0, "other_bytes": [], "ratios": [], "overlap": 0, "times": 0}
    for number, (label, (path, point)) in enumerate(played.items()):
        others = blocks(measured[label][1])
        for (module, name), block in blocks(point).items():
            other, sent = others[module, name], sides["alone"]["sent"][number][module][name]
            for key in BYTES:
                found["bytes"] += 1
                found["same_bytes"] += block[key] == other[key]
                if block[key] != other[key]:
                    found["other_bytes"].append((label, module, name, key, block[key], other[key]))
            for key in TIMES:
                repeats = {
                    side: [one[module][name][key] for one in values["seen"][number]] for side, values in sides.items()
                }
                medians = {side: statistics.median(values) for side, values in repeats.items()}
                if medians["real"]:
                    found["times"] += 1
                    found["ratios"].append(medians["alone"] / medians["real"])
                    low, high = (min(repeats["real"]), max(repeats["real"]))
                    found["overlap"] += min(repeats["alone"]) <= high and max(repeats["alone"]) >= low
                block[key] = other[key] + sent[key]
        for key in ("step_us", "finalize_us"):
            point["optimizer"][key] = measured[label][1]["optimizer"][key]
        point["relative_times"] = measured[label][1]["relative_times"]
        path.write_text(json.dumps(point))
    # The same command again, from these measurements: nothing is measured.
    run(alone, model, 1)
    (alone / "auto_parallel_work/profile.json").rename(folder / "real.json")
    return found


def planned(profile: Profile, cluster: Cluster, batch: int) -> Plan | None:
    """Return the best plan, ``None`` where nothing fits."""
    try:
        return search(profile, cluster, batch, SearchOptions(time_limit_s=20.0, num_workers=1, with_relaxations=False))
    except PlanError:
        return None


def decisions(plan: Plan | None) -> Any:
    """Return what a plan decides: the layout, and layers and recompute of every stage."""
    if plan is None:
        return None
    return plan.layout, [(stage.first_layer, stage.layers, stage.recompute) for stage in plan.stages]


def same_plans(folder: Path, count: int, seed: int) -> list[dict[str, Any]]:
    """Plan ``count`` drawn clusters from either profile."""
    source = random.Random(seed)
    alone, real = (read_profile(folder / f"{side}.json") for side in ("alone", "real"))
    cases: list[dict[str, Any]] = []
    while len(cases) < count:
        nodes, batch = source.choice((1, 2, 4)), source.choice((16, 32, 64))
        roomy = planned(alone, Cluster(num_nodes=nodes, devices_per_node=4, memory_limit_bytes=2**40), batch)
        assert roomy is not None
        share = source.choice((1.5, 0.9, 0.75, 0.6))
        limit = int(share * max(rank.peak_bytes for rank in roomy.memory))
        cluster = Cluster(num_nodes=nodes, devices_per_node=4, memory_limit_bytes=limit)
        plans = [planned(profile, cluster, batch) for profile in (alone, real)]
        if plans[0] is None and plans[1] is None:
            continue
        case = {"nodes": nodes, "batch": batch, "limit": share, "same": decisions(plans[0]) == decisions(plans[1])}
        case["plans"] = [None if plan is None else plan.layout.label() for plan in plans]
        if plans[0] is not None and plans[1] is not None and not case["same"]:
            options = SearchOptions(time_limit_s=20.0, num_workers=1, layouts=[plans[0].layout])
            kept = search(real, cluster, batch, options)  # of the layout, with its best split
            case["regret"] = kept.step.total_us / plans[1].step.total_us - 1
        cases.append(case)
    return cases


@pytest.mark.parametrize(("model", "count"), [("dense", 7), ("experts", 7), ("context", 6)])
def test_blocks_measured_alone_are_those_of_real_ranks(model: str, count: int, tmp_path: Path) -> None:
    found = compare(tmp_path, model)
    cases = same_plans(tmp_path, count, seed=28)
    ratios = sorted(found["ratios"])
    summary = {
        "model": model,
        "same bytes": f"{found['same_bytes']} of {found['bytes']}",
        "alone / real, quartiles": [round(value, 3) for value in statistics.quantiles(ratios, n=4)],
        "alone / real, ends": [round(ratios[0], 3), round(ratios[-1], 3)],
        "within scatter": f"{found['overlap']} of {found['times']}",
        "same plans": f"{sum(case['same'] for case in cases)} of {count}",
        "others": [case for case in cases if not case["same"]],
    }
    print("SUMMARY " + json.dumps(summary))
    assert not found["other_bytes"], found["other_bytes"]
    assert 0.8 < statistics.median(ratios) < 1.25, summary
    assert sum(case["same"] or case.get("regret", 1.0) < 0.02 for case in cases) >= count - 1, summary
