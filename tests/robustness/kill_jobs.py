"""What is killed: conversions, a search, a tuning run and a training under hetero layouts, each with what it must give."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "qwen2vl_tiny"
sys.path.insert(0, str(ROOT / "tests" / "helpers"))
CLI = (sys.executable, "-m", "mindspeed_autoparallel")
STEPS = 4
"""Of the training, which writes a checkpoint after each."""
_VLM = f"""--use-mcore-models --num-layers 4 --hidden-size 64 --ffn-hidden-size 160 --num-attention-heads 4
    --micro-batch-size 1 --tokenizer-type NullTokenizer --vocab-size 512 --seq-length 128
    --max-position-embeddings 1024 --make-vocab-size-divisible-by 8 --normalization RMSNorm --swiglu --lr 1.0e-3
    --lr-decay-style constant --weight-decay 0 --clip-grad 1.0 --train-iters {STEPS} --seed 42
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --log-interval 1 --eval-interval 10000 --eval-iters 0
    --mm-data data.json --mm-tool {EXAMPLE / "tools.json"}""".split()
_SCRIPT = str(ROOT / "docs" / "examples" / "pretrain_vlm.py")
_NORM = re.compile(rf"iteration +{STEPS}/.*?grad norm: ([0-9.]+)")


@dataclass(frozen=True)
class Job:
    """A command in a folder, and what it gives."""

    name: str
    argv: tuple[str, ...]
    prepare: Callable[[Path], None]
    result: Callable[[Path], str]
    """What must be the same after a kill and the same command again."""
    again: tuple[str, ...] = ()
    """Words of the second command that the first has not."""
    finished: Callable[[Path], dict[str, bytes]] = lambda folder: {}
    """What the second command must find finished and leave as it is."""
    at_once: bool = False
    """Whether its target appears whole or not at all."""
    victim: str = ""
    """What a process that is killed has in its command line: torchrun's own end is not ours to survive."""


def conversions() -> list[Job]:
    """Into a layout, back, into another layout, and over an existing target."""
    back = ("--hf-dir", "hf")
    layers = ("--llm-pp-layers", "3,5", "--tp-size", "2")
    convert = (*CLI, "convert")
    over = ("--overwrite",)
    argv = {
        "hf-to-mm": (("hf-to-mm", "hf", "out", *layers), _model, over),
        "hf-to-mm over an old one": (("hf-to-mm", "hf", "out", *layers, *over), _old, ()),
        "mm-to-hf": (("mm-to-hf", "ck", "out", *back), _checkpoint, over),
        "resplit": (("resplit", "ck", "out", *back, "--llm-pp-layers", "8"), _checkpoint, over),
        "torch_dist": (("hf-to-mm", "hf", "out", "--format", "torch_dist"), _model, over),
    }
    return [
        Job(name, (*convert, *words), prepare, _weights, again, at_once=True)
        for name, (words, prepare, again) in argv.items()
    ]


def searches() -> list[Job]:
    """``--auto-parallel-mm``, which measures, and must measure nothing twice."""
    places = ("--auto-parallel-work-dir", "work", "--auto-parallel-output-dir", "out")
    cluster = ("--nproc-per-node", "1", "--simulated-nnodes", "1", "--simulated-nproc-per-node", "2")
    model = ("--mm-model", str(EXAMPLE / "model.json"), "--global-batch-size", "2", "--use-distributed-optimizer")
    search = (sys.executable, _SCRIPT, *_VLM, *model, "--auto-parallel-mm", *places, *cluster)
    return [Job("auto-parallel-mm", search, _data, _searched, finished=_measured)]


def tunings() -> list[Job]:
    """``--auto-tuning``, which traces and measures, and must do nothing of it twice."""
    from auto_tuning import GPT, SCRIPT

    tune = (sys.executable, str(SCRIPT), *GPT, "--auto-tuning-work-dir", "work")
    return [Job("auto-tuning", tune, _nothing, _tuned, finished=_measured)]


def trainings() -> list[Job]:
    """A training with ``--hetero-parallel`` that writes a checkpoint after every step and goes on from the last."""
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", _SCRIPT)
    own = ("--hetero-parallel", "--mm-model", "model.json", "--global-batch-size", "2", "--distributed-backend", "nccl")
    saved = ("--variable-seq-lengths", "--save", "ck", "--load", "ck", "--save-interval", "1")
    words = (*launch, *_VLM, *own, *saved)
    return [Job("hetero training", words, _hetero_model, _last_norm, finished=_checkpoints, victim=_SCRIPT)]


def _nothing(folder: Path) -> None:
    (folder / "out").mkdir()


def _data(folder: Path) -> None:
    """Write the example's data.json with paths that hold in every folder."""
    data = json.loads((EXAMPLE / "data.json").read_text())
    places = {"dataset_dir": str(EXAMPLE / "data"), "dataset": str(EXAMPLE / "data" / "pictures.json")}
    data["dataset_param"]["basic_parameters"].update(places)
    (folder / "data.json").write_text(json.dumps(data))


def _searched(folder: Path) -> str:
    """Validity and size of the plan: its times are measured, and differ from run to run."""
    from mindspeed_autoparallel.spec.plan import Plan

    plan = Plan.read(folder / "out" / "plan.json")
    result = json.loads((folder / "out" / "auto_parallel_search_optimal_config.json").read_text())
    layout = plan.layout
    assert (layout.pipeline_size, layout.tensor_size) == tuple(result["parallel_config"][key] for key in ("PP", "TP"))
    assert sorted(_measured(folder)), "nothing was measured"
    return f"{[module.num_layers for module in plan.model.modules]} {plan.cluster.num_devices} {len(_measured(folder))}"


def _tuned(folder: Path) -> str:
    """Number of answers and of what was traced and measured: which layouts lead depends on measured times."""
    result = json.loads((folder / "work" / "auto_tuning_result.json").read_text())
    return f"{len(result['top'])} of {sorted(_measured(folder))}"


def _measured(folder: Path) -> dict[str, bytes]:
    """Points that were traced or measured; every one must be whole. A trace that failed is no finished work."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in (folder / "work").rglob("TP*.json")}
    return {name: content for name, content in found.items() if json.loads(content).get("status") != "failed"}


def _hetero_model(folder: Path) -> None:
    model = json.loads((EXAMPLE / "model.json").read_text())
    model["image_encoder"]["vision_encoder"]["tp"] = 1
    model["text_decoder"]["tp"] = 2
    (folder / "model.json").write_text(json.dumps(model))
    _data(folder)


def _last_norm(folder: Path) -> str:
    """Gradient norm of the last step: Megatron prints the second loss after a start as the mean of the first two."""
    return f"{float(_NORM.findall((folder / 'printed').read_text(errors='replace'))[-1]):.3e}"


def _checkpoints(folder: Path) -> dict[str, bytes]:
    """Whole checkpoints with the times of their files, which a run that does not go on from the last one changes."""
    tracker = folder / "ck" / "latest_checkpointed_iteration.txt"
    last = int(tracker.read_text()) if tracker.exists() else 0
    files = [path for step in range(1, last + 1) for path in (folder / "ck" / f"iter_{step:07d}").rglob("*")]
    return {str(path): f"{path.stat().st_size} {path.stat().st_mtime_ns}".encode() for path in files if path.is_file()}


def _model(folder: Path) -> None:
    from random_model import write_random_model

    config = {
        "model_type": "qwen2", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096, "tie_word_embeddings": False,
    }  # fmt: skip
    write_random_model(folder / "hf", config)


def _checkpoint(folder: Path) -> None:
    _convert(folder, "ck", "--llm-pp-layers", "4,4")


def _old(folder: Path) -> None:
    _convert(folder, "out")


def _convert(folder: Path, target: str, *words: str) -> None:
    from mindspeed_autoparallel.cli.main import main

    _model(folder)
    with contextlib.redirect_stdout(io.StringIO()):
        code = main(["convert", "hf-to-mm", str(folder / "hf"), str(folder / target), *words])
    assert code == 0


def _weights(folder: Path) -> str:
    """A digest of every tensor of the target, by name; torch's files hold the time they were written."""
    import torch
    from safetensors.torch import load_file

    digest = hashlib.sha256()
    for path in sorted((folder / "out").rglob("*")):
        if path.suffix == ".safetensors":
            tensors = load_file(path)
        elif path.name == "model_optim_rng.pt":
            tensors = torch.load(path, weights_only=True)["model"]
        else:
            digest.update(str(path.name).encode())
            digest.update(path.read_bytes() if path.suffix in (".json", ".txt", ".distcp") else b"")
            continue
        for name in sorted(tensors):
            digest.update(f"{path.relative_to(folder)}:{name}".encode() + tensors[name].numpy().tobytes())
    return digest.hexdigest()
