"""``--auto-tuning`` on the example training, then layers of layouts that it did not measure against their prediction.

python tests/benchmarks/auto_tuning/end_to_end.py OUT [--moe]

OUT keeps the work dir; delete it for a cold run. Two CPU processes; quiet cores make the times mean something. What is
fitted comes from the run's own launch; every layout is measured in two more launches, in opposite orders.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from mindspeed_autoparallel.planner.tuner.host import Anchor, fit_host
from mindspeed_autoparallel.planner.tuner.links import fitted_tiers
from mindspeed_autoparallel.planner.tuner.pricing import Prices
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.profiles.knowledge import KnowledgeBase
from mindspeed_autoparallel.profiles.records import DIRECTIONS, trace_of
from mindspeed_autoparallel.runtime.launch.outcome import LaunchSpec
from mindspeed_autoparallel.runtime.launch.processes import LocalRanks, run_local_processes
from mindspeed_autoparallel.runtime.profiling.measure.task import MeasureTask

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "docs/examples/pretrain_gpt.py"
MODEL = (
    "--use-mcore-models --num-layers 4 --hidden-size 256 --ffn-hidden-size 640 --num-attention-heads 4 "
    "--seq-length 256 --max-position-embeddings 256 --micro-batch-size 3 --global-batch-size 24 "
    "--tokenizer-type NullTokenizer --vocab-size 1024 --make-vocab-size-divisible-by 8 --lr 1e-3 --train-iters 4 "
    "--eval-interval 1000 --eval-iters 0 --transformer-impl local --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-persist-layer-norm --no-rope-fusion --num-workers 0 --normalization RMSNorm "
    "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope --bf16 "
    "--use-distributed-optimizer"
)
EXPERTS = " --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
NUM_PROCESSES = 2


def main() -> int:
    """Run, measure, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--moe", action="store_true")
    arguments = parser.parse_args()
    work = arguments.out.resolve() / "work"
    os.environ |= {"OMP_NUM_THREADS": "1", "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu"}
    model = MODEL + (EXPERTS if arguments.moe else "")
    words = [
        *model.split(),
        "--auto-tuning",
        "--auto-tuning-ranks",
        str(NUM_PROCESSES),
        "--nproc-per-node",
        str(NUM_PROCESSES),
        "--auto-tuning-work-dir",
        str(work),
    ]
    for turn in ("cold", "warm"):
        subprocess.run([sys.executable, str(SCRIPT), *words], check=True, stdout=subprocess.DEVNULL)
        result = json.loads((work / "auto_tuning_result.json").read_text(encoding="utf-8"))
        print(f"{turn}: {result['num_device_launches']} launches on devices", flush=True)
    traces, fitted = _results(work / "traces"), _results(work / "measurements")
    points = sorted((MeasuredAt(**trace["at"]) for trace in traces.values()), key=MeasuredAt.label)
    rounds = [
        _measure(arguments.out.resolve() / name, words, order)
        for name, order in (("first", points), ("second", points[::-1]))
    ]
    _compare(work, traces, fitted, rounds)
    return 0


def _results(folder: Path) -> dict[str, dict]:
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.rglob("TP*.json")}
    return {name: result for name, result in found.items() if result["status"] == "ok"}


def _measure(folder: Path, words: list[str], points: list[MeasuredAt]) -> dict[str, dict]:
    task = MeasureTask(
        points=tuple(points), result_dir=str(folder), num_layers={"text_decoder": 2}, model=None, num_repeats=15
    )
    spec = LaunchSpec(
        launch_id="all",
        argv=(str(SCRIPT), *words),
        task={
            "kind": "calibrate",
            "measure": task.to_json(),
            "measure_points": True,
            "operators": [],
            "collectives": [],
            "sizes": [],
            "pipelines": [],
        },
    )
    outcome = run_local_processes(spec, LocalRanks(num_processes=NUM_PROCESSES), log_dir=folder)
    print(f"every layout measured whole: {outcome.status.value}")
    return _results(folder)


def _compare(work: Path, traces: dict[str, dict], fitted: dict[str, dict], rounds: list[dict[str, dict]]) -> None:
    base = KnowledgeBase(work / "knowledge.sqlite")
    ((device, software, _),) = base.fingerprints()
    tiers = fitted_tiers(base, device, software)
    prices = Prices(
        base=base,
        device=device,
        software=software,
        tiers={"inter": tiers["intra"], **tiers},
        devices_per_node=NUM_PROCESSES,
    )
    known = [anchor for name, result in fitted.items() for anchor in _anchors(prices, traces[name], result)]
    host = fit_host(known, asynchronous=False)
    scales = ", ".join(f"{kind} x {scale:.2f}" for kind, scale in sorted(host.communication_scales.items()))
    print(
        f"host {host.per_call_us:.1f} us per call, kernels x {host.scale:.2f}, {scales}, from {len(fitted)} layouts, "
        f"each predicted from the others within {host.relative_error:.1%}"
    )
    header = f"{'layout':28s} {'layer':8s} {'predicted_us':>12s} {'measured_us':>12s} {'error':>7s} {'rounds':>7s}"
    print(f"{header} {'saved_bytes':>12s} (traced - measured)")
    outside, again, repeat, beyond = [], [], [], []
    for name in sorted(traces):
        first, second = (
            [a for a in _anchors(prices, traces[name], found[name]) if a.block == "layer"] for found in rounds
        )
        unseen = fit_host([a for a in known if _sharding(a.at) != _sharding(first[0].at)], asynchronous=False)
        for one, other in zip(first, second, strict=True):
            measured = math.sqrt(one.measured_us * other.measured_us)
            predicted = host.block_us(one.block, one.direction, one.at, one.sums)
            error, spread = predicted / measured - 1, other.measured_us / one.measured_us - 1
            repeat.append(abs(spread))
            (again if name in fitted else outside).append(abs(error))
            beyond.append(unseen.block_us(one.block, one.direction, one.at, one.sums) / measured - 1)
            trace, real = (
                found["modules"][0]["blocks"]["layer"]["saved_bytes"]
                for found in (traces[name]["variants"]["|none"], rounds[0][name])
            )
            print(
                f"{name:28s} {one.direction:8s} {predicted:12.0f} {measured:12.0f} {error:+7.1%} {spread:+7.1%} "
                f"{trace:12.0f} {trace - real:+.0f}{' (in the fit)' if name in fitted else ''}"
            )
    for title, errors in (
        ("layouts not in the fit", outside),
        ("layouts in the fit, measured again", again),
        ("the same layout in both launches", repeat),
        ("every layout, nothing of its sharding in the fit", [abs(error) for error in beyond]),
    ):
        if errors:
            print(f"{title}: mean {sum(errors) / len(errors):.1%}, worst {max(errors):.1%} of {len(errors)}")


def _anchors(prices: Prices, trace: dict, result: dict) -> list[Anchor]:
    variant, at = trace_of(trace, "trace").plain, MeasuredAt(**trace["at"])
    blocks = result["modules"][0]["blocks"]
    return [
        Anchor(
            block=block,
            direction=direction,
            at=at,
            sums=prices.sums(variant, variant.modules[0], block, direction),
            measured_us=blocks[block][f"{direction}_us"],
        )
        for block in ("pre", "layer", "post")
        for direction in DIRECTIONS
    ]


def _sharding(at: MeasuredAt) -> MeasuredAt:
    return replace(at, micro_batch_size=1)


if __name__ == "__main__":
    sys.exit(main())
