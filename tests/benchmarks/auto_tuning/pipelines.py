"""Pipelines as ``--auto-tuning`` predicts them against trainings that run by them, with and without what the host adds.

python tests/benchmarks/auto_tuning/pipelines.py OUT [--runs 3] [--again]

The example of docs/auto-tuning.md on two CPU processes. The first search measures; of the others each is held to two
stages of one chunk or of two, and its three best configurations are trained for 90 steps, of which the later half
counts. OUT keeps the work dir; --again only trains once more. Quiet cores make the times mean something.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "docs/examples/pretrain_gpt.py"
MODEL = (
    "--use-mcore-models --num-layers 4 --hidden-size 64 --ffn-hidden-size 160 --num-attention-heads 4 "
    "--seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 8 "
    "--tokenizer-type NullTokenizer --vocab-size 512 --make-vocab-size-divisible-by 8 --lr 1e-3 --train-iters 4 "
    "--eval-interval 1000 --eval-iters 0 --transformer-impl local --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-persist-layer-norm --no-rope-fusion --num-workers 0 --normalization RMSNorm "
    "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope --bf16 "
    "--use-distributed-optimizer --auto-tuning --auto-tuning-ranks 2 --nproc-per-node 2"
)
NUM_STEPS = 90
"""More than --auto-tuning-verify runs: a machine that is shared has slow seconds."""
HELD = "HOLD_PIPELINE_TO_CHUNKS"
"""Variable of a search that is held to a number of chunks."""


def main() -> int:
    """Measure, search twice per run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--again", action="store_true")
    arguments = parser.parse_args()
    work = arguments.out.resolve() / "work"
    if not arguments.again:
        _search(work, 0)
        result = json.loads((work / "auto_tuning_result.json").read_text(encoding="utf-8"))
        print(f"{result['num_device_launches']} launch on devices", flush=True)
    print(
        f"{'run':>3s} {'layout':48s} {'microbatches':>12s} {'predicted_ms':>12s} {'without_ms':>10s} "
        f"{'measured_ms':>11s} {'error':>7s} {'without':>8s}"
    )
    for run in range(arguments.runs):
        shutil.rmtree(work / "verify", ignore_errors=True)
        for chunks in (1, 2):
            _search(work, chunks)
            for row in json.loads((work / f"held_{chunks}.json").read_text(encoding="utf-8")):
                errors = [row[name] / row["measured_ms"] - 1 for name in ("predicted_ms", "without_ms")]
                print(
                    f"{run:3d} {row['layout']:48s} {row['num_microbatches']:12d} {row['predicted_ms']:12.1f} "
                    f"{row['without_ms']:10.1f} {row['measured_ms']:11.1f} {errors[0]:+7.1%} {errors[1]:+8.1%}",
                    flush=True,
                )
    return 0


def _search(work: Path, chunks: int) -> None:
    words = [*MODEL.split(), "--auto-tuning-work-dir", str(work), *(["--auto-tuning-verify"] if chunks else [])]
    environment = {"OMP_NUM_THREADS": "1", "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu", HELD: str(chunks)}
    command = [sys.executable, __file__, *words] if chunks else [sys.executable, str(SCRIPT), *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **environment})


def _held(chunks: int) -> None:
    """The search of this process takes pipelines of two stages of ``chunks`` chunks only, and keeps its rows."""
    import runpy

    from mindspeed_autoparallel.runtime.features.auto_tuning import search as recommending
    from mindspeed_autoparallel.runtime.features.auto_tuning import verify as verification

    sys.path.insert(0, str(SCRIPT.parent))
    sys.argv[0] = str(SCRIPT)
    enumerate_space, plan_of, compared = recommending.enumerate_space, verification._plan_of, verification._compared
    without: list[float] = []
    rows: list[dict[str, Any]] = []

    def enumerated(*args: Any, **kwargs: Any) -> Any:
        space = enumerate_space(*args, **kwargs)
        layouts = [(item, item.candidate.layout) for item in space.configurations]
        space.configurations[:] = [item for item, at in layouts if (at.pipeline_size, at.virtual_size) == (2, chunks)]
        return space

    def planned(request: Any, pick: Any, layout: Any, batch: int) -> Any:
        profile = pick.found.configuration.variant.profile
        kept = (
            "memory_capacity_bytes",
            "runtime_overhead_bytes",
            "intra",
            "inter",
            "optimizer_step_us_per_byte",
            "optimizer_step_fixed_us",
            "operation_overhead_us",
        )
        device = type(profile.device)(**{name: getattr(profile.device, name) for name in kept})
        variant = replace(pick.found.configuration.variant, profile=replace(profile, device=device))
        found = replace(pick.found, configuration=replace(pick.found.configuration, variant=variant))
        without.append(plan_of(request, replace(pick, found=found), layout, batch).step.total_us / 1000)
        return plan_of(request, pick, layout, batch)

    def kept(plan: Any, ranks: Any, wanted: Any) -> Any:
        result = compared(plan, ranks, wanted)
        layers = "+".join(map(str, plan.layers_of(plan.model.modules[0].name)))
        rows.append(
            {
                "layout": f"{plan.layout.label()} layers {layers}",
                "without_ms": without[-1],
                "num_microbatches": plan.layout.num_microbatches(plan.global_batch_size),
                "predicted_ms": result["predicted_step_ms"],
                "measured_ms": result["measured_step_ms"],
            }
        )
        work = Path(sys.argv[sys.argv.index("--auto-tuning-work-dir") + 1])
        (work / f"held_{chunks}.json").write_text(json.dumps(rows), encoding="utf-8")
        return result

    recommending.enumerate_space, verification._plan_of, verification._compared = enumerated, planned, kept
    verification._NUM_STEPS = NUM_STEPS
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    if os.environ.get(HELD, "0") != "0":
        _held(int(os.environ[HELD]))
    else:
        sys.exit(main())
