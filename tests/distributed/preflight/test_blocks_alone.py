"""Blocks that one device measures by playing a rank, beside those that four real ranks measure: bytes, times, plans.

Both sides have the clock of ``same_clock.py``: what a block itself computes, without collectives, and without what other
programs of this machine take. Collectives are priced by the same links on both sides; routers are balanced on both.
"""

from __future__ import annotations

import copy
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
Points = dict[str, tuple[Path, dict[str, Any]]]
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


def points(folder: Path) -> Points:
    """Return file and content of every measured point, in the order in which they were measured."""
    files = sorted(folder.glob("auto_parallel_work/measurements/*/*MBS*.json"), key=lambda path: path.stat().st_mtime)
    return {path.stem: (path, json.loads(path.read_text())) for path in files}


def blocks(point: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the blocks of a point by module and name."""
    return {(module["name"], name): block for module in point["modules"] for name, block in module["blocks"].items()}


def compare(folder: Path, model: str) -> dict[str, Any]:
    """Measure ``model`` both ways; return counts and ratios, and leave profiles: of each side, and of every second
    repeat of the real one."""
    alone, real = folder / "alone", folder / "real"
    run(alone, model, 1)
    run(real, model, 4)
    (alone / "auto_parallel_work/profile.json").rename(folder / "alone.json")
    played, measured = points(alone), points(real)
    assert list(played) == list(measured) and played
    found = differences(folder, played, measured)
    for name, repeats in (("real", slice(None)), ("odd", slice(1, None, 2)), ("even", slice(0, None, 2))):
        profile_of_real(folder, model, played, measured, repeats).rename(folder / f"{name}.json")
    return found


def differences(folder: Path, played: Points, measured: Points) -> dict[str, Any]:
    """Return how many bytes are equal, ratios of times, and how many ranges of repeats overlap."""
    sides = {side: json.loads((folder / side / "repeats.json").read_text())["seen"] for side in ("alone", "real")}
    found: dict[str, Any] = {"same_bytes": 0, "bytes": 0, "other_bytes": [], "ratios": [], "overlap": 0}
    for number, (label, (_, point)) in enumerate(played.items()):
        others = blocks(measured[label][1])
        for (module, name), block in blocks(point).items():
            other = others[module, name]
            found["bytes"] += len(BYTES)
            found["same_bytes"] += sum(block[key] == other[key] for key in BYTES)
            found["other_bytes"] += [(label, name, key) for key in BYTES if block[key] != other[key]]
            for key in TIMES:
                ours, theirs = (
                    sorted(one[module][name][key] for one in sides[side][number]) for side in ("alone", "real")
                )
                if theirs[-1]:
                    found["ratios"].append(statistics.median(ours) / statistics.median(theirs))
                    found["overlap"] += ours[0] <= theirs[-1] and theirs[0] <= ours[-1]
    return found


def profile_of_real(folder: Path, model: str, played: Points, measured: Points, repeats: slice) -> Path:
    """Return the profile of the real ranks' ``repeats``, with collectives by the links of the played side.

    The search that measured alone runs again, from measurements with these times: nothing is measured.
    """
    seen = json.loads((folder / "real" / "repeats.json").read_text())["seen"]
    sent = json.loads((folder / "alone" / "repeats.json").read_text())["sent"]
    for number, (label, (path, point)) in enumerate(played.items()):
        point, real = copy.deepcopy(point), measured[label][1]
        for (module, name), block in blocks(point).items():
            for key in TIMES:
                times = [one[module][name][key] for one in seen[number][repeats]]
                block[key] = max(0.0, statistics.median(times)) + sent[number][module][name][key]
        for key in ("step_us", "finalize_us"):
            point["optimizer"][key] = real["optimizer"][key]
        point["relative_times"] = real["relative_times"]
        path.write_text(json.dumps(point))
    kept = (folder / "alone" / "repeats.json").read_text()
    run(folder / "alone", model, 1)
    (folder / "alone" / "repeats.json").write_text(kept)
    return folder / "alone/auto_parallel_work/profile.json"


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


def same_plans(folder: Path, sides: tuple[str, str], count: int, seed: int = 28) -> list[dict[str, Any]]:
    """Plan ``count`` drawn clusters from either profile; regret is by the second one."""
    source = random.Random(seed)
    alone, real = (read_profile(folder / f"{side}.json") for side in sides)
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
    cases = same_plans(tmp_path, ("alone", "real"), count)
    control = same_plans(tmp_path, ("odd", "even"), count)
    ratios = sorted(found["ratios"])
    summary = {
        "model": model,
        "same bytes": f"{found['same_bytes']} of {found['bytes']}",
        "alone / real, quartiles": [round(value, 3) for value in statistics.quantiles(ratios, n=4)],
        "alone / real, ends": [round(ratios[0], 3), round(ratios[-1], 3)],
        "within scatter": f"{found['overlap']} of {len(ratios)}",
        "same plans": f"{sum(case['same'] for case in cases)} of {count}",
        "same plans by odd and even repeats": f"{sum(case['same'] for case in control)} of {count}",
        "regrets": [round(case.get("regret", 0.0), 4) for case in cases],
        "regrets by odd and even repeats": [round(case.get("regret", 0.0), 4) for case in control],
    }
    print("SUMMARY " + json.dumps(summary))
    assert not found["other_bytes"], found["other_bytes"]
    assert 0.8 < statistics.median(ratios) < 1.25 and found["overlap"] >= 0.9 * len(ratios), summary
    assert statistics.median(case.get("regret", 0.0) for case in cases) < 0.03, summary
