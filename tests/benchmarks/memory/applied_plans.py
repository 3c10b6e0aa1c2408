"""Predicted against tracked peak memory of every stage, in real CPU trainings by plans of different kinds.

python tests/benchmarks/memory/applied_plans.py OUT_DIR   (about five minutes on two cores, the second time two)

Measures the tiny example once per frozen and trainable encoder, predicts each plan with the planner's own model, trains
three steps by it on gloo, and prints the table of docs/validation/memory.md.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "docs/examples/qwen2vl_tiny"
SCRIPT = ROOT / "docs/examples/pretrain_vlm.py"
BATCH = 8


@dataclass(frozen=True)
class Case:
    """One plan: layers per stage of both modules, recomputed layers of the decoder, TP, frozen encoder."""

    vit: list[int]
    llm: list[int]
    recompute: list[int]
    tensor_size: int = 1
    frozen: bool = False


CASES = (
    Case([4], [4], [0]),
    Case([4], [4], [4]),
    Case([4, 0], [1, 3], [0, 0]),
    Case([4, 0], [1, 3], [1, 2]),
    Case([4, 0], [2, 2], [0, 1], tensor_size=2),
    Case([4, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]),
    Case([2, 2, 0, 0], [0, 1, 2, 1], [0, 1, 1, 0]),
    Case([4, 0], [2, 2], [0, 0], frozen=True),
    Case([4, 0], [1, 3], [1, 3], frozen=True),
)


def flags(model: Path, data: Path) -> list[str]:
    """Megatron's flags of the example, with every sample of one size."""
    return f"""--use-mcore-models --num-layers 4 --hidden-size 64 --ffn-hidden-size 160 --num-attention-heads 4
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --micro-batch-size 1 --global-batch-size {BATCH}
    --tokenizer-type NullTokenizer --vocab-size 512 --seq-length 1024 --max-position-embeddings 1024
    --make-vocab-size-divisible-by 1 --normalization RMSNorm --swiglu --lr 1.0e-3 --weight-decay 0 --clip-grad 1.0
    --train-iters 4 --rerun-mode disabled --auto-parallel-check-steps 4 --seed 42
    --use-distributed-optimizer --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --log-interval 1 --eval-interval 10000 --eval-iters 0 --distributed-backend nccl
    --mm-data {data} --mm-model {model} --mm-tool {EXAMPLE / "tools.json"}""".split()


def write_inputs(out: Path, frozen: bool) -> tuple[Path, Path]:
    """model.json with or without a frozen encoder, and a data set that repeats one sample."""
    model = json.loads((EXAMPLE / "model.json").read_text())
    model["image_encoder"]["vision_encoder"]["freeze"] = frozen
    model["image_encoder"]["vision_projector"]["freeze"] = frozen
    model_file = out / f"model_{'frozen' if frozen else 'trained'}.json"
    model_file.write_text(json.dumps(model))
    records = json.loads((EXAMPLE / "data/pictures.json").read_text())
    one = next(record for record in records if len(record.get("images", [])) == 1)
    (out / "same.json").write_text(json.dumps([one] * 16))
    data = json.loads((EXAMPLE / "data.json").read_text())
    basic = data["dataset_param"]["basic_parameters"]
    basic["dataset_dir"] = str(ROOT / basic["dataset_dir"])
    basic["dataset"] = str(out / "same.json")
    (out / "data.json").write_text(json.dumps(data))
    return model_file, out / "data.json"


def run(command: list[str], environment: dict[str, str]) -> str:
    """Its output; a failure ends with the last lines."""
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:6])} ... failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def main() -> None:
    """Measure, predict, train, compare."""
    from mindspeed_autoparallel.planner.evaluate import evaluate
    from mindspeed_autoparallel.planner.placement import ModulePlacement
    from mindspeed_autoparallel.profiles import read_profile
    from mindspeed_autoparallel.spec import Cluster, Layout, Plan

    out = Path(sys.argv[1]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu"}
    errors = []
    print(f"{'plan':58s} stage  predicted_MiB  measured_MiB  error")
    for frozen in (False, True):
        model, data = write_inputs(out, frozen)
        work = out / ("frozen" if frozen else "trained")
        search = "--auto-parallel-mm --nproc-per-node 2 --simulated-nnodes 1 --simulated-nproc-per-node 4"
        places = ["--auto-parallel-work-dir", str(work), "--auto-parallel-output-dir", str(work)]
        run([sys.executable, str(SCRIPT), *flags(model, data), *search.split(), *places], environment)
        profile = read_profile(work / "profile.json")
        best = Plan.read(work / "plan.json")
        for case in (case for case in CASES if case.frozen is frozen):
            from dataclasses import replace

            size = len(case.vit)
            layout = Layout(pipeline_size=size, tensor_size=case.tensor_size)
            cluster = Cluster(num_nodes=1, devices_per_node=layout.num_devices)
            placement = ModulePlacement(
                layers={"image_encoder": tuple(case.vit), "text_decoder": tuple(case.llm)},
                recompute={"text_decoder": {"full": tuple(case.recompute)}},
            )
            evaluation = evaluate(profile, cluster, layout, placement, BATCH)
            plan = replace(
                best,
                layout=layout,
                cluster=cluster,
                stages=evaluation.stages,
                memory=evaluation.memory,
                step=evaluation.step,
                global_batch_size=BATCH,
                num_microbatches=BATCH,
            )
            file = out / f"case_{CASES.index(case)}.json"
            plan.write(file)
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            launch += ["--nproc-per-node", str(layout.num_devices), str(SCRIPT), *flags(model, data)]
            text = run([*launch, "--auto-parallel-plan", str(file)], environment)
            rows = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+)   [+-]", text, re.MULTILINE)
            label = f"{layout.label()} vit {case.vit} llm {case.llm} re {case.recompute}{' frozen' if frozen else ''}"
            for stage, predicted, measured in rows:
                error = (float(predicted) - float(measured)) / float(measured) * 100
                errors.append(error)
                print(f"{label:58s} {stage:>5s} {predicted:>14s} {measured:>13s}  {error:+.1f} %", flush=True)
    sizes = [abs(error) for error in errors]
    print(f"{len(errors)} stages: mean error {statistics.fmean(sizes):.2f} %, worst {max(sizes):.2f} %")


if __name__ == "__main__":
    main()
