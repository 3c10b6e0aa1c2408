"""Blocks that one device measures by playing a rank, beside those that four real ranks measure: bytes, times, plans.

Both sides have the clock of ``same_clock.py``: what a block itself computes, without collectives, and without what other
programs of this machine take. Collectives are priced by the same links on both sides; routers are balanced on both.

Times scatter, so plans are compared by rule: a case is decided where, by the real profile, the best plan of another layout
is slower by more than the scatter, which is what 90 % of the layers' times differ by at most between the odd and the even
repeats of the real run. Work has no scatter.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pytest
from forked_python import forked_python
from script_ranks import GPT, GPT_FLAGS, MARKS, environment

from mindspeed_autoparallel.errors import PlanError
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.profiles import Profile, read_profile
from mindspeed_autoparallel.spec.layout import Cluster
from mindspeed_autoparallel.spec.plan import Plan

pytestmark = [*MARKS, pytest.mark.long]

FLAGS = f"""{GPT_FLAGS} --num-layers 8 --hidden-size 256 --ffn-hidden-size 768 --seq-length 256
    --max-position-embeddings 256 --global-batch-size 6 --vocab-size 1023 --sequence-parallel
    --auto-parallel-mm --simulated-nnodes 1 --simulated-nproc-per-node 4"""
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
    text = GPT.read_text()
    assert first in text
    script.write_text(text.replace(first, f"{first}import same_clock\n"))
    words = [*FLAGS.split(), *MODELS[model].split(), "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [forked_python(), str(script), *words],
        env=environment(),
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
    work = {side: json.loads((folder / side / "repeats.json").read_text())["work"] for side in ("alone", "real")}
    found: dict[str, Any] = {"same_bytes": 0, "bytes": 0, "other_bytes": [], "ratios": [], "overlap": 0}
    found |= {"work": 0, "other_work": [], "scatter": []}
    for number, (label, (_, point)) in enumerate(played.items()):
        others = blocks(measured[label][1])
        for (module, name), block in blocks(point).items():
            other = others[module, name]
            found["bytes"] += len(BYTES)
            found["same_bytes"] += sum(block[key] == other[key] for key in BYTES)
            found["other_bytes"] += [(label, name, key) for key in BYTES if block[key] != other[key]]
            for key in TIMES:
                counted = [work[side][number][module][name][key] for side in ("alone", "real")]
                found["work"] += 1
                error = abs(counted[0] - counted[1]) / max(*counted, 1e-9)
                found["other_work"] += [(error, label, name, key, *counted)] if error > 1e-9 else []
                halves = [
                    statistics.median(one[module][name][key] for one in half)
                    for half in halves_of(sides["real"][number])
                ]
                if name not in ("pre", "post") and halves[1]:
                    found["scatter"].append(abs(halves[0] / halves[1] - 1))
                ours, theirs = (
                    sorted(one[module][name][key] for one in sides[side][number]) for side in ("alone", "real")
                )
                if theirs[-1]:
                    found["ratios"].append(statistics.median(ours) / statistics.median(theirs))
                    found["overlap"] += ours[0] <= theirs[-1] and theirs[0] <= ours[-1]
    return found


def halves_of(repeats: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the odd and the even repeats."""
    return repeats[1::2], repeats[::2]


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


def same_plans(folder: Path, sides: tuple[str, str], count: int, scatter: float) -> list[dict[str, Any]]:
    """Plan drawn clusters from either profile until ``count`` of them are decided, at most twice as many.

    Regret and what is decided are by the second profile.
    """
    source = random.Random(28)
    alone, real = (read_profile(folder / f"{side}.json") for side in sides)
    cases: list[dict[str, Any]] = []
    roomy: dict[tuple[int, int], int] = {}
    while len(cases) < count or (len(cases) < 2 * count and sum(case["gap"] > scatter for case in cases) < count):
        nodes, batch = source.choice((1, 2, 4)), source.choice((16, 32, 64))
        if (nodes, batch) not in roomy:
            plan = planned(alone, Cluster(num_nodes=nodes, devices_per_node=4, memory_limit_bytes=2**40), batch)
            assert plan is not None
            roomy[nodes, batch] = max(rank.peak_bytes for rank in plan.memory)
        share = source.choice((1.5, 0.9, 0.75, 0.6))
        cluster = Cluster(num_nodes=nodes, devices_per_node=4, memory_limit_bytes=int(share * roomy[nodes, batch]))
        first, second = (planned(profile, cluster, batch) for profile in (alone, real))
        if first is None and second is None:
            continue
        case = {"nodes": nodes, "batch": batch, "limit": share, "same": decisions(first) == decisions(second)}
        case["plans"] = [None if plan is None else plan.layout.label() for plan in (first, second)]
        others = [] if second is None else [other.step_us for other in second.alternatives]
        case["gap"] = min(others) / second.step.total_us - 1 if second is not None and others else 1.0
        case["same_layout"] = case["plans"][0] == case["plans"][1]
        if first is not None and second is not None and not case["same"]:
            options = SearchOptions(time_limit_s=20.0, num_workers=1, layouts=[first.layout])
            kept = search(real, cluster, batch, options)  # of the layout, with its best split
            case["regret"] = kept.step.total_us / second.step.total_us - 1
        cases.append(case)
    return cases


def counts(cases: list[dict[str, Any]], count: int, scatter: float) -> dict[str, Any]:
    """Return how many of the first ``count`` cases have the same plan, and how many of the decided ones the layout."""
    decided = [case for case in cases if case["gap"] > scatter]
    return {
        "same plans": f"{sum(case['same'] for case in cases[:count])} of {count}",
        "decided, same plan": f"{sum(case['same'] for case in decided)} of {len(decided)}",
        "decided, same layout": f"{sum(case['same_layout'] for case in decided)} of {len(decided)}",
        "regrets": [round(case.get("regret", 0.0), 4) for case in cases],
        "gaps": [round(case["gap"], 4) for case in cases],
    }


@pytest.mark.parametrize(("model", "count"), [("dense", 7), ("experts", 7), ("context", 6)])
def test_blocks_measured_alone_are_those_of_real_ranks(model: str, count: int, tmp_path: Path) -> None:
    found = compare(tmp_path, model)
    scatter = statistics.quantiles(found["scatter"], n=10)[-1]
    cases = same_plans(tmp_path, ("alone", "real"), count, scatter)
    ratios = sorted(found["ratios"])
    summary = {
        "model": model,
        "same bytes": f"{found['same_bytes']} of {found['bytes']}",
        "same work": f"{found['work'] - len(found['other_work'])} of {found['work']}",
        "alone / real, quartiles": [round(value, 3) for value in statistics.quantiles(ratios, n=4)],
        "alone / real, ends": [round(ratios[0], 3), round(ratios[-1], 3)],
        "within scatter": f"{found['overlap']} of {len(ratios)}",
        "scatter": round(scatter, 4),
        "alone beside real": counts(cases, count, scatter),
    }
    print("SUMMARY " + json.dumps(summary), flush=True)
    control = counts(same_plans(tmp_path, ("odd", "even"), count, scatter), count, scatter)
    print("CONTROL " + json.dumps({"model": model, "odd beside even repeats": control}))
    assert not found["other_bytes"], found["other_bytes"]
    assert all(error < 1e-3 for error, *_ in found["other_work"]), found["other_work"]
    assert 0.8 < statistics.median(ratios) < 1.25 and found["overlap"] >= 0.9 * len(ratios), summary
    assert statistics.median(case.get("regret", 0.0) for case in cases) < 0.03, summary
