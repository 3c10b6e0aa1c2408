"""Processor seconds, clock and peak memory of converting a large model, beside ``cp -r`` of its safetensors.

    python tests/benchmarks/weights/speed.py FOLDER GIB [STEP ...]

A model of Llama 3 8B's shapes in bf16 with as many layers as GIB asks for, in four shards of FOLDER, which needs three
times as much room. Steps: make, cp, hf-to-mm (one rank's file), mm-to-hf, same (what came back against the model),
hf-to-dist, dist-to-hf, hf-to-ranks (PP4 TP2), ranks-to-hf, remove; all of them by default. Other work on the machine
changes processor seconds less than the clock, which counts until the disk has everything. A virtual machine gives freed
memory back to its host, and using it again costs as much as a copy: every step waits until that has happened, so that
all begin alike.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
LAYER_GIB, ENDS_GIB = 0.4063, 1.957
GIVEN_BACK_S = 15.0
"""After this, freed memory belongs to the host again."""
STEPS = (
    *("make", "cp", "hf-to-mm", "mm-to-hf", "same", "hf-to-dist", "dist-to-hf", "same"),
    *("hf-to-ranks", "ranks-to-hf", "same", "remove"),
)


def measured(name: str, command: list[str]) -> None:
    """Run ``command``; print its processor seconds, seconds on the clock, load of the machine and memory.

    Anonymous memory is what the process itself holds; the rest of its resident set are pages of the input files, which
    the kernel takes back whenever it needs them.
    """
    os.sync()
    time.sleep(GIVEN_BACK_S)
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    anonymous = 0
    while process.poll() is None:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        anonymous = max(anonymous, *(int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)
        time.sleep(0.05)
    if process.wait():
        raise SystemExit(f"{name} failed")
    os.sync()
    used, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - started
    processor = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    load = os.getloadavg()[0]
    print(f"{name:12s} CPU {processor:6.1f} s, clock {seconds:6.1f} s, load {load:4.1f}, {anonymous / 1024**2:.2f} GiB")
    sys.stdout.flush()


def make(model: Path, num_layers: int) -> None:
    """Write the model; its values are those of one random row, from another place in every tensor."""
    import json

    import torch

    sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))
    from random_model import shapes_of

    from mindspeed_autoparallel.weights.shard_writer import ShardWriter

    model.mkdir(parents=True)
    config = {**CONFIG, "num_hidden_layers": num_layers}
    (model / "config.json").write_text(json.dumps(config))
    shapes = [(name, torch.Size(shape)) for name, shape in shapes_of(config)]
    total = 2 * sum(shape.numel() for _, shape in shapes)
    row = torch.randn(2**24).to(torch.bfloat16).repeat(2 + max(shape.numel() for _, shape in shapes) // 2**24)
    writer = ShardWriter(model, total // 4 + 2**28, [name for name, _ in shapes])
    for number, (name, shape) in enumerate(shapes):
        begin = 12345 * number % 2**24
        writer.add(name, [row[begin : begin + shape.numel()].view(shape)])
    writer.finish()
    print(f"{total / 1024**3:.2f} GiB in {len(list(model.glob('*.safetensors')))} shards, {num_layers} layers")


def same(model: Path, back: Path) -> None:
    """Print how many tensors came back with other bits; remove what came back."""
    from mindspeed_autoparallel.weights.huggingface import shard_of_tensor
    from mindspeed_autoparallel.weights.tensors import same_bits

    before, after = shard_of_tensor(model), shard_of_tensor(back)
    assert before.keys() == after.keys()
    different = [name for name in before if not same_bits(before[name].read(name), after[name].read(name))]
    print(f"{len(before)} tensors, {len(different)} differ {different[:3]}", flush=True)
    shutil.rmtree(back)


def main() -> None:
    """Do the steps."""
    folder, num_layers = Path(sys.argv[1]), round((float(sys.argv[2]) - ENDS_GIB) / LAYER_GIB)
    model, back = folder / "hf", folder / "back"
    convert = [sys.executable, "-m", "mindspeed_autoparallel", "convert"]
    quarter = num_layers // 4
    layers = ",".join(map(str, (quarter, quarter, quarter, num_layers - 3 * quarter)))
    layouts = {
        "mm": ["--llm-pp-layers", str(num_layers)],
        "dist": ["--format", "torch_dist"],
        "ranks": ["--llm-pp-layers", layers, "--tp-size", "2"],
    }
    for step in sys.argv[3:] or STEPS:
        source, _, target = step.partition("-to-")
        if step == "make":
            make(model, num_layers)
        elif step == "same":
            same(model, back)
        elif step == "remove":
            shutil.rmtree(folder)
        elif step == "cp":
            measured(step, ["cp", "-r", str(model), str(folder / "copy")])
            shutil.rmtree(folder / "copy")
        elif source == "hf":
            measured(step, [*convert, "hf-to-mm", str(model), str(folder / target), *layouts[target]])
        else:
            measured(step, [*convert, "mm-to-hf", str(folder / source), str(back), "--hf-dir", str(model)])
            shutil.rmtree(folder / source)


if __name__ == "__main__":
    main()
