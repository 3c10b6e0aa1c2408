"""Peak memory of hetero steps, predicted and measured: the reference training on CPU by plans in every memory mode, one
equal image per microbatch, an encoder whose activations outweigh the rest.

python tests/benchmarks/hetero/memory.py [microbatches, 8 by default]
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_autoparallel.planner.hetero.assembly import Solved, assemble, reserved_by
from mindspeed_autoparallel.planner.hetero.backbone import BackboneSolver, backbone_profile
from mindspeed_autoparallel.planner.hetero.encoders import encoder_phase
from mindspeed_autoparallel.planner.hetero.space import costs_of
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions, enumerate_layouts
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.profiles.mindspeed import read_profile
from mindspeed_autoparallel.spec import Cluster, Layout, ModuleLayout, Plan
from mindspeed_autoparallel.spec.hetero import HeteroRecord
from mindspeed_autoparallel.spec.plan_records import SearchRecord

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "docs" / "examples" / "qwen2vl_tiny"
TRAINING = [
    "--use-mcore-models",
    "--tensor-model-parallel-size=1",
    "--pipeline-model-parallel-size=1",
    "--normalization=RMSNorm",
    "--swiglu",
    "--micro-batch-size=1",
    "--num-layers=4",
    "--hidden-size=64",
    "--ffn-hidden-size=160",
    "--num-attention-heads=4",
    "--vocab-size=512",
    "--tokenizer-type=NullTokenizer",
    "--seq-length=320",
    "--max-position-embeddings=1024",
    "--lr=1e-3",
    "--lr-decay-style=constant",
    "--lr-decay-iters=100",
    "--make-vocab-size-divisible-by=8",
    "--variable-seq-lengths",
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--log-interval=1",
    "--eval-interval=1000",
    "--eval-iters=0",
    "--distributed-backend=nccl",
]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout of the backbone, and one of the encoder with its memory mode."""

    backbone: Layout
    encoder: ModuleLayout
    memory: str

    @property
    def num_ranks(self) -> int:
        return self.backbone.pipeline_size * self.backbone.tensor_size * self.backbone.data_size

    def label(self) -> str:
        return f"E {self.encoder.label()} / L {self.backbone.label()}, {self.memory}"


PP2 = Layout(pipeline_size=2, distributed_optimizer=True)
CASES = (
    *(
        Case(backbone=PP2, encoder=ModuleLayout(data_size=2, micro_batch_scale=2), memory=memory)
        for memory in ("upfront", "recompute", "window")
    ),
    Case(backbone=PP2, encoder=ModuleLayout(data_size=2, micro_batch_scale=1), memory="window"),
    Case(backbone=PP2, encoder=ModuleLayout(pipeline_size=2, micro_batch_scale=1), memory="upfront"),
    Case(backbone=PP2, encoder=ModuleLayout(pipeline_size=2, micro_batch_scale=1), memory="recompute"),
    Case(backbone=PP2, encoder=ModuleLayout(tensor_size=2, micro_batch_scale=1), memory="upfront"),
    Case(
        backbone=Layout(tensor_size=2, distributed_optimizer=True),
        encoder=ModuleLayout(data_size=2, micro_batch_scale=2),
        memory="upfront",
    ),
    Case(
        backbone=Layout(data_size=2, distributed_optimizer=True),
        encoder=ModuleLayout(tensor_size=2, micro_batch_scale=1),
        memory="upfront",
    ),
)


def prepare(folder: Path) -> list[str]:
    """Write a wide and deep image encoder over a text decoder, and samples with one and the same picture of at least
    448 x 448; return the flags that name them."""
    model = json.loads((EXAMPLE / "model.json").read_text())
    model["image_encoder"]["vision_encoder"].update(
        num_layers=12, pipeline_num_layers=[12], hidden_size=128, ffn_hidden_size=512
    )
    model["image_encoder"]["vision_projector"]["input_size"] = 128
    data = json.loads((EXAMPLE / "data.json").read_text())
    data["dataset_param"]["preprocess_parameters"].update(image_min_pixels=448**2, image_max_pixels=500**2)
    samples = json.loads((EXAMPLE / "data" / "pictures.json").read_text())
    sample = next(s for s in samples if len(s.get("images", [])) == 1)
    (folder / "pictures.json").write_text(json.dumps([sample] * 16))
    data["dataset_param"]["basic_parameters"].update(
        dataset=str(folder / "pictures.json"), dataset_dir=str(EXAMPLE / "data")
    )
    (folder / "model.json").write_text(json.dumps(model))
    (folder / "data.json").write_text(json.dumps(data))
    return [
        *("--mm-model", str(folder / "model.json"), "--mm-data", str(folder / "data.json")),
        *("--mm-tool", str(EXAMPLE / "tools.json")),
    ]


def run(words: Sequence[str], *, num_ranks: int = 0) -> str:
    """Return what the reference training prints; without ranks it is one process, no launcher."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"] if num_ranks else []
    command = [sys.executable, *launcher, str(ROOT / "docs" / "examples" / "pretrain_vlm.py"), *TRAINING, *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def measured_profile(files: list[str], folder: Path, batch: int) -> Profile:
    """Return what a search on two processes measures."""
    run(
        [
            *files,
            f"--global-batch-size={batch}",
            "--train-iters=4",
            "--auto-parallel-mm",
            "--hetero-parallel",
            "--simulated-nnodes=1",
            "--simulated-nproc-per-node=2",
            "--nproc-per-node=2",
            f"--auto-parallel-work-dir={folder / 'work'}",
            f"--auto-parallel-output-dir={folder}",
        ]
    )
    return read_profile(folder / "work" / "profile.json")


def plan_of(profile: Profile, case: Case, batch: int) -> Plan:
    """Return the plan of ``case``, which no search would make."""
    cluster, backbone = Cluster(num_nodes=1, devices_per_node=case.num_ranks), backbone_profile(profile)
    (candidate,), _ = enumerate_layouts(backbone, cluster, batch, SpaceOptions(), [case.backbone])
    (costs,), _ = costs_of(
        profile, profile.model.modules[0], cluster, [case.encoder.tensor_size], [case.encoder.pipeline_size]
    )
    phase = encoder_phase(costs, case.encoder, candidate, memory=case.memory, balance="local")
    record = HeteroRecord(memory=case.memory, balance="local", encoders=(phase,))
    solver = BackboneSolver(candidate)
    result = solver.solve(reserved_by(record), 10.0)
    assert result.evaluation is not None
    step_us = result.evaluation.step.total_us + record.total_us
    solved = Solved(solver=solver, record=record, result=result, step_us=step_us, lower_bound_us=result.lower_bound_us)
    search = SearchRecord(
        status="feasible",
        lower_bound_us=result.lower_bound_us,
        gap_fraction=1 - result.lower_bound_us / step_us,
        num_configurations=1,
        num_solved=1,
        seconds=0.0,
    )
    return assemble(profile, solved, [], search)


def peaks_mib(files: list[str], plan: Plan, folder: Path, num_ranks: int) -> list[tuple[float, float]]:
    """Return predicted and measured peak of every stage."""
    plan.write(folder / "plan.json")
    printed = run(
        [
            *files,
            f"--global-batch-size={plan.global_batch_size}",
            "--train-iters=5",
            f"--auto-parallel-plan={folder / 'plan.json'}",
            "--auto-parallel-check-steps=5",
        ],
        num_ranks=num_ranks,
    )
    table = printed.split("plan against the first steps")[1].split("measured peak_MiB")[1]
    return [(float(a), float(b)) for a, b in re.findall(r"^ *\d+ +([\d.]+) +([\d.]+) +[+-]", table, re.M)]


def main() -> None:
    num_microbatches = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    only = sys.argv[2] if len(sys.argv) > 2 else ""
    print(
        f"| {num_microbatches} microbatches | stage | predicted MiB | measured MiB | error % |\n" + "| --- " * 5 + "|"
    )
    worst = 0.0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        files = prepare(folder)
        profile = measured_profile(files, folder, num_microbatches)
        for case in CASES:
            if only not in case.label():
                continue
            plan = plan_of(profile, case, num_microbatches * case.backbone.data_size)
            for stage, (predicted, measured) in enumerate(peaks_mib(files, plan, folder, case.num_ranks)):
                error = (predicted / measured - 1) * 100
                worst = max(worst, abs(error))
                print(
                    f"| {case.label().replace('|', '/')} | {stage} | {predicted:.1f} | {measured:.1f} | {error:+.2f} |",
                    flush=True,
                )
    print(f"largest error {worst:.2f} %")


if __name__ == "__main__":
    main()
