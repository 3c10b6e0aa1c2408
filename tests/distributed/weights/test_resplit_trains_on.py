"""What Megatron saved, resplit to another layout or written as torch_dist, it loads again and trains on alike."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from megatron_releases import marks_of_trainings
from ranks import run_ranks

pytestmark = marks_of_trainings()

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "docs" / "examples" / "qwen2vl_tiny"
CONFIG: dict[str, Any] = {
    "model_type": "qwen2_vl",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "tie_word_embeddings": False,
    "vision_config": {"depth": 4, "embed_dim": 32, "hidden_size": 64, "num_heads": 4},
}
WEIGHTS_ONLY = ("--finetune", "--no-load-optim", "--no-load-rng", "--no-save-optim")
# The learning rate is constant: its schedule, which ends with the first run, need not be continued.
RESUMED = ("--no-load-rng", "--override-opt-param-scheduler")


def description(folder: Path, name: str, vision: Any, text: Any) -> Path:
    model = json.loads((EXAMPLE / "model.json").read_text())
    model["image_encoder"]["vision_encoder"]["pipeline_num_layers"] = vision
    model["text_decoder"]["pipeline_num_layers"] = text
    (folder / name).write_text(json.dumps(model))
    return folder / name


def train(
    model: Path,
    load: Path,
    *,
    tensor: int,
    pipeline: int,
    until: int,
    save: Path | None = None,
    save_interval: int | None = None,
    file_format: str = "torch",
    state: tuple[str, ...] = WEIGHTS_ONLY,
) -> list[str]:
    """Losses up to iteration ``until``, as printed. ``state``: flags that say what is loaded and saved beside the weights."""
    words = [
        "--mm-model",
        str(model),
        "--mm-data",
        str(EXAMPLE / "data.json"),
        "--tensor-model-parallel-size",
        str(tensor),
        "--pipeline-model-parallel-size",
        str(pipeline),
        "--micro-batch-size",
        "1",
        "--global-batch-size",
        "2",
        "--seq-length",
        "512",
        "--max-position-embeddings",
        "1024",
        "--num-layers",
        "4",
        "--hidden-size",
        "64",
        "--num-attention-heads",
        "4",
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        "511",
        "--make-vocab-size-divisible-by",
        "1",
        "--train-iters",
        str(until),
        "--lr",
        "1e-3",
        "--min-lr",
        "1e-3",
        "--lr-decay-style",
        "constant",
        "--log-interval",
        "1",
        "--eval-interval",
        "1000",
        "--eval-iters",
        "0",
        "--distributed-backend",
        "gloo",
        "--no-gradient-accumulation-fusion",
        "--no-masked-softmax-fusion",
        "--no-persist-layer-norm",
        "--load",
        str(load),
        "--ckpt-format",
        file_format,
        *state,
    ]
    if save is not None:
        words += ["--save", str(save), "--save-interval", str(save_interval or until)]
    ranks = run_ranks(
        tensor * pipeline,
        ROOT / "docs" / "examples" / "pretrain_vlm.py",
        *words,
        python_path=[ROOT],
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        timeout_s=400,
        cwd=ROOT,
    )
    losses = [loss for rank in ranks for loss in re.findall(r"lm loss: ([0-9.E+-]+)", rank.stdout)]
    assert losses, ranks[-1].stdout[-4000:]
    return losses


@pytest.mark.parametrize("chunks", [1, 2], ids=["PP2 to TP2", "PP2 VPP2 to TP2 PP2"])
def test_a_saved_checkpoint_resplit_to_another_layout_trains_on_with_the_same_losses(
    chunks: int, tmp_path: Path
) -> None:
    from random_model import write_random_model

    from mindspeed_autoparallel.weights import conversion
    from mindspeed_autoparallel.weights.architecture import TEXT, VISION, read_architecture
    from mindspeed_autoparallel.weights.layouts import make_layout

    # Layers by chunk and stage, before and after.
    if chunks == 1:
        before, after = {VISION: [[4, 0]], TEXT: [[1, 3]]}, {VISION: [[4]], TEXT: [[4]]}
    else:
        before, after = {VISION: [[4, 0], [0, 0]], TEXT: [[0, 1], [1, 2]]}, {VISION: [[3, 1]], TEXT: [[0, 4]]}
    write_random_model(tmp_path / "hf", CONFIG, scale=0.05)
    architecture = read_architecture(tmp_path / "hf")
    first = make_layout(architecture, layers=before, tensor_sizes={})
    second = make_layout(architecture, layers=after, tensor_sizes={TEXT: 2})
    model_a = description(tmp_path, "a.json", *(before[name] if chunks > 1 else before[name][0] for name in before))
    model_b = description(tmp_path, "b.json", *(after[name][0] for name in after))
    interleaved = WEIGHTS_ONLY
    if chunks > 1:
        interleaved += ("--num-virtual-stages-per-pipeline-rank", str(chunks))

    conversion.huggingface_to_checkpoint(tmp_path / "hf", tmp_path / "start", first)
    train(model_a, tmp_path / "start", tensor=1, pipeline=2, until=2, save=tmp_path / "saved", state=interleaved)
    conversion.resplit(tmp_path / "saved", tmp_path / "hf", tmp_path / "other", second)
    on_a = train(model_a, tmp_path / "saved", tensor=1, pipeline=2, until=2, state=interleaved)
    on_b = train(model_b, tmp_path / "other", tensor=2, pipeline=len(after[TEXT][0]), until=2)
    assert [float(loss) for loss in on_b] == pytest.approx([float(loss) for loss in on_a], rel=1e-5)
    assert on_a[0] != on_a[1]


def test_megatron_loads_what_is_written_as_torch_dist(tmp_path: Path) -> None:
    from random_model import write_random_model

    from mindspeed_autoparallel.weights import conversion
    from mindspeed_autoparallel.weights.architecture import read_architecture
    from mindspeed_autoparallel.weights.layouts import make_layout

    write_random_model(tmp_path / "hf", CONFIG, scale=0.05)
    whole = make_layout(read_architecture(tmp_path / "hf"), layers={}, tensor_sizes={})
    model = description(tmp_path, "model.json", [4], [4])
    losses = {}
    for ours, theirs in (("mm", "torch"), ("torch_dist", "torch_dist")):
        conversion.huggingface_to_checkpoint(tmp_path / "hf", tmp_path / ours, whole, file_format=ours)
        losses[ours] = train(
            model, tmp_path / ours, tensor=1, pipeline=1, until=2, file_format=theirs, save=tmp_path / f"{ours}-saved"
        )
    assert losses["torch_dist"] == losses["mm"]
    # What Megatron saves in that format is resplit to it again and loaded.
    saved, again = tmp_path / "torch_dist-saved", tmp_path / "again"
    conversion.resplit(saved, tmp_path / "hf", again, whole, file_format="torch_dist")
    trained_on = [
        train(model, folder, tensor=1, pipeline=1, until=1, file_format="torch_dist") for folder in (saved, again)
    ]
    assert trained_on[0] == trained_on[1]
    # And it can be read back, to the bit what it saved as rank folders.
    for name in losses:
        conversion.checkpoint_to_huggingface(tmp_path / f"{name}-saved", tmp_path / "hf", tmp_path / f"{name}-back")
    first, second = (tmp_path / f"{name}-back" / "model.safetensors" for name in losses)
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes() != (tmp_path / "hf" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param((), id="whole", marks=pytest.mark.long),
        pytest.param(("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"), id="distributed"),
    ],
)
def test_optimizer_state_goes_along_to_another_layout(optimizer: tuple[str, ...], tmp_path: Path) -> None:
    from random_model import write_random_model

    from mindspeed_autoparallel.weights import conversion
    from mindspeed_autoparallel.weights.architecture import TEXT, VISION, read_architecture
    from mindspeed_autoparallel.weights.layouts import make_layout

    write_random_model(tmp_path / "hf", CONFIG, scale=0.05)
    architecture = read_architecture(tmp_path / "hf")
    whole = make_layout(architecture, layers={}, tensor_sizes={})
    piped = make_layout(architecture, layers={VISION: ((4, 0),), TEXT: ((1, 3),)}, tensor_sizes={})
    model_a = description(tmp_path, "a.json", [4], [4])
    model_b = description(tmp_path, "b.json", [4, 0], [1, 3])
    kind, resumed = "torch_dist", (*RESUMED, *optimizer)
    conversion.huggingface_to_checkpoint(tmp_path / "hf", tmp_path / "start", whole, file_format=kind)
    anew = ("--finetune", "--no-load-optim", "--no-load-rng", *optimizer)
    never_stopped = train(
        model_a,
        tmp_path / "start",
        tensor=1,
        pipeline=1,
        until=5,
        save=tmp_path / "saved",
        save_interval=2,
        file_format=kind,
        state=anew,
    )
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("2")
    conversion.resplit(tmp_path / "saved", tmp_path / "hf", tmp_path / "other", piped, file_format=kind)
    on_a = train(model_a, tmp_path / "saved", tensor=1, pipeline=1, until=5, file_format=kind, state=resumed)
    on_b = train(model_b, tmp_path / "other", tensor=1, pipeline=2, until=5, file_format=kind, state=resumed)
    forgotten = train(
        model_b,
        tmp_path / "other",
        tensor=1,
        pipeline=2,
        until=5,
        file_format=kind,
        state=(*resumed, "--no-load-optim"),
    )
    assert [float(loss) for loss in on_b] == pytest.approx([float(loss) for loss in on_a], rel=1e-5)
    # Megatron prints the second loss of a run as the mean of its first two: iterations 3 and 5 are what they are.
    assert on_a[::2] == never_stopped[2::2]
    assert forgotten[2] != on_b[2]
