"""Start the FSDP2 trainers of other projects on CPU processes, by their shipped files with small sizes (tests/hosts/README.md)."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from mindspeed_autoparallel.runtime.launch.ports import reserved_port

HERE = Path(__file__).parents[1] / "hosts"
EAGER = "".join(
    f"\n    {name}_implementation: eager"
    for name in ("moe", "cross_entropy_loss", "rms_norm", "swiglu_mlp", "rotary_pos_emb", "load_balancing_loss")
)
FP32 = "param_dtype: float32, reduce_dtype: float32, output_dtype: float32"


@dataclass(frozen=True, kw_only=True)
class TrainerHost:
    """A trainer: where it is, which of its files is trained, and what becomes small in that."""

    sources: tuple[str, ...]
    """Variables that name its checkout and those that it needs."""
    python: str
    """Variable that names its interpreter."""
    file: str
    edits: tuple[tuple[str, str], ...]
    """Text of the shipped file, and what stands in its place; FOLDER is the folder of model and data."""
    script: tuple[str, ...]
    """Words in front of the file."""
    words: tuple[str, ...] = ()
    """Words behind the file."""
    plan_words: tuple[str, ...] = ()
    """Words of ``plan`` for what the file lacks."""
    alone: tuple[tuple[str, str], ...] = ()
    """Further edits for one process."""
    four: tuple[tuple[str, str], ...] = ()
    """The same for four, where the file has the accumulation in place of the global batch."""
    starts_alone: bool = True

    @property
    def missing(self) -> list[str]:
        """Return the variables that are not set."""
        return [name for name in (*self.sources, self.python) if not os.environ.get(name)]


AUTOMODEL = TrainerHost(
    sources=("AUTOMODEL_SOURCES",),
    python="AUTOMODEL_PYTHON",
    file="examples/llm_finetune/llama3_2/llama3_2_1b_squad.yaml",
    edits=(
        ("global_batch_size: 64", "global_batch_size: 8"),
        ("local_batch_size: 8", "local_batch_size: 1"),
        ("num_epochs: 1\n", "num_epochs: 1\n  max_steps: 3\n\ncheckpoint: {enabled: false}\n"),
        ("val_every_steps: 10 ", "val_every_steps: 100 "),
        ("backend: nccl\n  timeout_minutes: 1", "backend: gloo\n  timeout_minutes: 30"),
        ("meta-llama/Llama-3.2-1B", "FOLDER/model\n  torch_dtype: float32\n  attn_implementation: sdpa"),
        ("rajpurkar/squad", "FOLDER/squad"),
        ("limit_dataset_samples: 64", "limit_dataset_samples: 4"),
        ("lr: 1.0e-5", "lr: 1.0e-3"),
        (
            "  cp_size: 1\n",
            f"  cp_size: 1\n  mp_policy: {{_target_: torch.distributed.fsdp.MixedPrecisionPolicy, {FP32}}}\n",
        ),
    ),
    script=("nemo_automodel/recipes/llm/train_ft.py", "-c"),
    plan_words=("--seq-length", "128"),
)
VEOMNI = TrainerHost(
    sources=("VEOMNI_SOURCES",),
    python="VEOMNI_PYTHON",
    file="configs/text/qwen3.yaml",
    edits=(
        ("Qwen3-8B-Base\n  ops", "FOLDER/model\n  ops"),
        ("flash_attention_2", f"flash_attention_2{EAGER}"),
        ("tulu-3-sft-mixture", "FOLDER/talks.jsonl"),
        (
            "max_seq_len: 2048",
            "max_seq_len: 128\n  dataloader: {num_workers: 0, pin_memory: false, prefetch_factor: null}",
        ),
        ("train_size: 750000", "train_size: 8000"),
        ("enable: true\n    offload", "enable: true\n        param_dtype: float32\n    offload"),
        ("bsz_warmup_ratio: 0.007", "bsz_warmup_ratio: 0\n  dyn_bsz: false\n  max_steps: 3"),
        ("output_dir: Qwen3-8B-Base-sft-tulu", "output_dir: FOLDER/out"),
        ("save_steps: 100", "save_steps: 0"),
        ("save_epochs: 1", "save_epochs: 0"),
        ("save_hf_weights: true", "save_hf_weights: false"),
        ("num_train_epochs: 3", "num_train_epochs: 1"),
        ("lr: 1.0e-4", "lr: 1.0e-3"),
        ("wandb:\n", "wandb:\n    enable: false\n"),
    ),
    script=("tasks/train_text.py",),
    starts_alone=False,
)
MINDSPEED_LLM = TrainerHost(
    sources=("MINDSPEED_LLM_FSDP2_SOURCES", "MINDSPEED_LLM_FSDP2_MINDSPEED"),
    python="NATIVE_FSDP2_PYTHON_5_2",
    file="examples/fsdp2/qwen3/tune_qwen3_8b_4k_fsdp2_A2.yaml",
    edits=(
        ("/home/data/Qwen3-8B/", "FOLDER/model"),
        ("dataset: alpaca_full", "dataset: alpaca_full\n  dataset_dir: FOLDER"),
        ("cutoff_len: 4096", "cutoff_len: 128"),
        ("fsdp_size: 8", "fsdp_size: 2\n  param_dtype: fp32"),
        ("dataloader_num_workers: 4", "dataloader_num_workers: 0\n  dataloader_pin_memory: false"),
        ("max_steps: 2000", "max_steps: 3"),
        ("save_steps: 500", "save_steps: 0\n  save_epochs: 0\n  save_hf_weights: false"),
        ("gradient_accumulation_steps: 1", "gradient_accumulation_steps: 4"),
        ("lr: 1e-05", "lr: 1e-03"),
    ),
    script=("train_fsdp2.py",),
    alone=(("  fsdp_size: 2", "  fsdp_size: 1"), ("accumulation_steps: 4", "accumulation_steps: 8")),
    four=(("accumulation_steps: 4", "accumulation_steps: 2"),),
)
VERL = TrainerHost(
    sources=("VERL_SOURCES",),
    python="VERL_PYTHON",
    file="verl/trainer/config/engine/fsdp.yaml",
    edits=(
        ("dtype: bfloat16", f"mixed_precision: {{{FP32}}}\ndtype: bfloat16".replace("output", "buffer")),
        ("torch_compile: true", "torch_compile: false"),
    ),
    alone=(("strategy: fsdp\n", "strategy: fsdp2\n"),),
    script=("-m", "verl.trainer.sft_trainer", "--config-path"),
    words=(
        *("data.train_files=FOLDER/talks.parquet", "data.train_batch_size=8", "data.use_dynamic_bsz=False"),
        *(
            "data.pad_mode=no_padding",
            "data.max_length=128",
            "data.micro_batch_size_per_gpu=1",
            "model.path=FOLDER/model",
        ),
        *("model.use_remove_padding=False", "+model.override_config.attn_implementation=sdpa", "optim.lr=1e-3"),
        *("trainer.logger=[console]", "trainer.total_training_steps=3", "trainer.total_epochs=1"),
        *("trainer.resume_mode=disable", "trainer.save_freq=-1"),
    ),
    plan_words=("--global-batch-size", "8", "--seq-length", "128"),
)
HOSTS = {"NeMo Automodel": AUTOMODEL, "VeOmni": VEOMNI, "MindSpeed-LLM": MINDSPEED_LLM, "verl": VERL}


def environment(host: TrainerHost) -> dict[str, str]:
    """Return the environment of the trainer's interpreter: stand-ins first, then its checkouts and this package."""
    folders = [
        HERE / "trainer_stand_ins",
        *(os.environ[name] for name in host.sources),
        HERE.parents[1],
        HERE / "stand_ins",
    ]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, folders if host is MINDSPEED_LLM else folders[:-1])),
        "LD_LIBRARY_PATH": os.environ.get("NATIVE_FSDP2_LIBRARIES", ""),
        "OMP_NUM_THREADS": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "TRAINING_BACKEND": "mindspeed_fsdp",
    }


def write_model(host: TrainerHost, folder: Path) -> None:
    """Write model and data by the trainer's own libraries."""
    command = [os.environ[host.python], str(HERE / "tiny_trainers.py"), str(folder)]
    subprocess.run(command, check=True, env={**environment(host), "PYTHONPATH": ""}, capture_output=True)


def write_config(host: TrainerHost, folder: Path, size: int = 2) -> Path:
    """Write the shipped file with the trainer's edits for ``size`` processes."""
    shipped = Path(os.environ[host.sources[0]]) / host.file
    text = shipped.read_text("utf-8")
    for old, new in (*host.edits, *{1: host.alone, 4: host.four}.get(size, ())):
        assert old in text, old
        text = text.replace(old, new)
    path = folder / f"config_{size}.yaml"
    path.write_text(text.replace("FOLDER", str(folder)), "utf-8")
    return path


def train(host: TrainerHost, size: int, config: Path, *more: str) -> list[tuple[float, float]]:
    """Train on ``size`` processes and return (loss, gradient norm) of each step."""
    folder, root = config.parent, Path(os.environ[host.sources[0]])
    script = [str(root / host.script[0]) if host.script[0].endswith(".py") else host.script[0], *host.script[1:]]
    given, words = config, list(more)
    if host is VERL:  # its file is one of a folder that Hydra composes
        given = folder / "config"
        shutil.copytree(root / "verl" / "trainer" / "config", given, dirs_exist_ok=True)
        shutil.copy(config, given / "engine" / "fsdp.yaml")
        # A plan has the words of the trainer of policies; fine-tuning has the same settings elsewhere.
        words = [word.replace("actor_rollout_ref.actor.ppo_", "data.") for word in words]
        words = [word.removeprefix("actor_rollout_ref.") for word in words]
    behind = [word.replace("FOLDER", str(folder)) for word in host.words]
    command = [os.environ[host.python], "-W", "ignore", *script, str(given), *behind, *words]
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    running = []
    with reserved_port() as port:
        for rank in range(size):
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            ranks |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
            variables = {**environment(host), **{name: str(value) for name, value in ranks.items()}}
            log = (folder / f"rank{rank}.log").open("w")
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=variables, cwd=folder)
            running.append((process, log))
        statuses = [process.wait(timeout=900) for process, _ in running]
        for _, log in running:
            log.close()
    outputs = [(folder / f"rank{rank}.log").read_text("utf-8") for rank in range(size)]
    worst = max(range(size), key=lambda rank: abs(statuses[rank]))
    assert statuses[worst] == 0, outputs[worst][-3000:]
    if host is AUTOMODEL:
        rows = map(json.loads, (folder / "checkpoints" / "training.jsonl").read_text("utf-8").splitlines())
        return [(row["loss"], row["grad_norm"]) for row in rows]
    return mean_steps(outputs)


def mean_steps(outputs: list[str]) -> list[tuple[float, float]]:
    """Return the mean over ranks of what each printed; a rank may print nothing."""
    found = [re.findall(r"exact \d+ (\S+) (\S+)", output) for output in outputs]
    rows = [[(float(loss), float(norm)) for loss, norm in one] for one in found if one]
    return [(sum(loss for loss, _ in step) / len(step), step[0][1]) for step in zip(*rows, strict=True)]
