"""Peak memory of the three memory modes: the reference training on CPU, one image per microbatch, an encoder whose
activations outweigh the rest.

python tests/benchmarks/hetero/memory.py [microbatches, 8 by default]
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "docs" / "examples" / "qwen2vl_tiny"
TRAINING = [
    "--micro-batch-size=1",
    "--num-layers=4",
    "--hidden-size=64",
    "--num-attention-heads=4",
    "--vocab-size=512",
    "--tokenizer-type=NullTokenizer",
    "--seq-length=320",
    "--max-position-embeddings=1024",
    "--lr=1e-3",
    "--lr-decay-style=constant",
    "--lr-decay-iters=100",
    "--train-iters=2",
    "--make-vocab-size-divisible-by=8",
    "--variable-seq-lengths",
    "--no-gradient-accumulation-fusion",
    "--log-interval=1",
    "--eval-interval=1000",
    "--eval-iters=0",
    "--distributed-backend=nccl",
]


def prepare(folder: Path) -> list[str]:
    """A wide and deep image encoder DP2 over a text decoder PP2; pictures of at least 448 x 448."""
    model = json.loads((EXAMPLE / "model.json").read_text())
    model["image_encoder"]["vision_encoder"].update(
        num_layers=12, pipeline_num_layers=[12], hidden_size=128, ffn_hidden_size=512, tp=1
    )
    model["image_encoder"]["vision_projector"]["input_size"] = 128
    model["text_decoder"].update(pp=2, pipeline_num_layers=[2, 2])
    data = json.loads((EXAMPLE / "data.json").read_text())
    data["dataset_param"]["preprocess_parameters"].update(image_min_pixels=448**2, image_max_pixels=500**2)
    samples = json.loads((EXAMPLE / "data" / "pictures.json").read_text())
    (folder / "pictures.json").write_text(json.dumps([s for s in samples if len(s.get("images", [])) == 1]))
    data["dataset_param"]["basic_parameters"].update(
        dataset=str(folder / "pictures.json"), dataset_dir=str(EXAMPLE / "data")
    )
    (folder / "model.json").write_text(json.dumps(model))
    (folder / "data.json").write_text(json.dumps(data))
    return ["--mm-model", str(folder / "model.json"), "--mm-data", str(folder / "data.json")]


def peak_mib(files: list[str], mode: str, num_microbatches: int) -> tuple[float, list[str]]:
    """Largest resident size of a process of the job, and the losses it printed."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(ROOT / "docs" / "examples" / "pretrain_vlm.py"),
        *TRAINING,
        *files,
        f"--global-batch-size={num_microbatches}",
        "--hetero-parallel",
        "--hetero-encoder-mbs-scale=2",
        f"--hetero-memory={mode}",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu"}
    with tempfile.TemporaryFile("w+") as output:
        job = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
        _, status, usage = os.wait4(job.pid, 0)
        output.seek(0)
        text = output.read()
    if status:
        sys.exit(text[-3000:])
    # The kernel hands the largest size of all descendants up with the launcher's.
    return usage.ru_maxrss / 1024, re.findall(r"lm loss: (\S+)", text)


def main() -> None:
    num_microbatches = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    with tempfile.TemporaryDirectory() as folder:
        files = prepare(Path(folder))
        print(f"E DP2 / L PP2, scale 2 of {num_microbatches} microbatches; largest process, MiB")
        for mode in ("upfront", "recompute", "window"):
            mib, losses = peak_mib(files, mode, num_microbatches)
            print(f"  {mode:10s} {mib:7.0f}   losses {' '.join(losses)}", flush=True)


main()
