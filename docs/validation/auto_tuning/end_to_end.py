"""``--auto-tuning`` on the example training, then layers of layouts that it did not measure against their prediction.

python docs/validation/auto_tuning/end_to_end.py OUT [--moe]

OUT keeps the work dir; delete it for a cold run. Two CPU processes; quiet cores make the times mean something.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.profiles.knowledge import KnowledgeBase
from mindspeed_autoparallel.runtime.launch import LaunchSpec
from mindspeed_autoparallel.runtime.launch.coordinator import free_port
from mindspeed_autoparallel.runtime.launch.processes import run_local_processes
from mindspeed_autoparallel.runtime.measuring.task import MeasureTask
from mindspeed_autoparallel.tuning.traced.host import Anchor, fit_host
from mindspeed_autoparallel.tuning.traced.links import fitted_tiers
from mindspeed_autoparallel.tuning.traced.pricing import DIRECTIONS, Prices

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "docs/examples/pretrain_gpt.py"
MODEL = (
    "--use-mcore-models --num-layers 4 --hidden-size 256 --ffn-hidden-size 640 --num-attention-heads 4 "
    "--seq-length 256 --max-position-embeddings 256 --micro-batch-size 1 --global-batch-size 8 "
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
    words = [*model.split(), "--auto-tuning", "--auto-tuning-ranks", str(NUM_PROCESSES),
             "--nproc-per-node", str(NUM_PROCESSES), "--auto-tuning-work-dir", str(work)]  # fmt: skip
    for turn in ("cold", "warm"):
        subprocess.run([sys.executable, str(SCRIPT), *words], check=True, stdout=subprocess.DEVNULL)
        result = json.loads((work / "auto_tuning_result.json").read_text(encoding="utf-8"))
        print(f"{turn}: {result['num_device_launches']} launches on devices", flush=True)
    traces = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in work.glob("traces/*/TP*.json")}
    anchors = {path.stem for path in work.glob("measurements/*/TP*.json")}
    measured = _measure(arguments.out.resolve() / "measured", words, [MeasuredAt(**t["at"]) for t in traces.values()])
    _compare(work, traces, anchors, measured)
    return 0


def _measure(folder: Path, words: list[str], points: list[MeasuredAt]) -> dict[str, dict]:
    task = MeasureTask(
        points=tuple(points), result_dir=str(folder), num_layers={"text_decoder": 2}, model_file=None, num_repeats=15
    )
    spec = LaunchSpec(launch_id="all", argv=(str(SCRIPT), *words), task={
        "kind": "calibrate", "measure": task.to_json(), "measure_points": True, "operators": [], "collectives": [],
        "sizes": [],
    })  # fmt: skip
    outcome = run_local_processes(
        spec, node_rank=0, num_processes=NUM_PROCESSES, num_nodes=1, master_addr="localhost", master_port=free_port(),
        log_dir=folder,
    )  # fmt: skip
    print(f"every layout measured whole: {outcome.status.value}")
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("TP*.json")}
    return {name: result for name, result in found.items() if result["status"] == "ok"}


def _compare(work: Path, traces: dict[str, dict], anchors: set[str], measured: dict[str, dict]) -> None:
    base = KnowledgeBase(work / "knowledge.sqlite")
    ((device, software, _),) = base.fingerprints()
    tiers = fitted_tiers(base, device, software)
    prices = Prices(base=base, device=device, software=software, tiers={"inter": tiers["intra"], **tiers},
                    devices_per_node=NUM_PROCESSES)  # fmt: skip
    blocks = {
        (name, block, direction): Anchor(
            block=block, direction=direction,
            sums=prices.sums(traces[name]["variants"]["|none"], traces[name]["variants"]["|none"]["modules"][0], block,
                             direction),
            measured_us=result["modules"][0]["blocks"][block][f"{direction}_us"],
        )
        for name, result in measured.items() for block in ("pre", "layer", "post") for direction in DIRECTIONS
    }  # fmt: skip
    host = fit_host([anchor for (name, _, _), anchor in blocks.items() if name in anchors], asynchronous=False)
    print(f"host {host.per_call_us:.1f} us per call, kernels x {host.scale:.2f}, from {len(anchors)} layouts")
    header = f"{'layout':28s} {'layer':8s} {'predicted_us':>12s} {'measured_us':>12s} {'error':>7s}"
    print(f"{header} {'saved_bytes':>12s} (traced - measured)")
    errors = []
    for (name, block, direction), anchor in sorted(blocks.items()):
        if block != "layer":
            continue
        predicted = host.block_us(block, direction, anchor.sums)
        error = predicted / anchor.measured_us - 1
        trace, real = (
            source["modules"][0]["blocks"][block]["saved_bytes"]
            for source in (traces[name]["variants"]["|none"], measured[name])
        )
        if name not in anchors:
            errors.append(abs(error))
        print(
            f"{name:28s} {direction:8s} {predicted:12.0f} {anchor.measured_us:12.0f} {error:+7.1%} {trace:12.0f} "
            f"{trace - real:+.0f}{'' if name not in anchors else ' (in the fit)'}"
        )
    if errors:
        print(f"layouts not in the fit: mean {sum(errors) / len(errors):.1%}, worst {max(errors):.1%} of {len(errors)}")


if __name__ == "__main__":
    sys.exit(main())
