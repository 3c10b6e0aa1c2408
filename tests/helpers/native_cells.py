"""Run MindSpeed-MM's native FSDP2 trainer itself on CPU processes (README.md names the sources and the interpreter)."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from mindspeed_autoparallel.hosts.yaml_edit import Value, with_values
from mindspeed_autoparallel.runtime.launch.ports import reserved_port
from mindspeed_autoparallel.spec.sharded import GroupChoice, ShardedDecisions, ShardSizes

HERE = Path(__file__).parents[1] / "hosts"
SOURCES = ("MINDSPEED_MM_SOURCES", "MINDSPEED_SOURCES", "NATIVE_FSDP2_PYTHON")
OWN_PLUGIN = "    - mindspeed_autoparallel.plugin\n"
TRANSFORMERS_5, TRANSFORMERS_5_2 = "NATIVE_FSDP2_PYTHON_5_0", "NATIVE_FSDP2_PYTHON_5_2"
"""The same environment with transformers 5.0, which Qwen3-Omni needs, and with 5.2 and triton for Qwen3.5."""


@dataclass(frozen=True)
class Kind:
    """One model of the host: its registered name, the folder of its code, and what stands in the file for it."""

    model_id: str
    module: str
    python: str = SOURCES[2]
    template: str = "qwen3_vl_nothink"
    collate: str = "qwen3vl"
    prefixes: tuple[str, str] = ("model.visual", "model.language_model")
    attention: str = "sdpa"
    recomputes_tower: bool = True
    """Whether the trainer can recompute blocks of the tower: it hands MiMo's a cache that they do not take."""

    blocks: str = "blocks"
    head: str = "lm_head"
    dataset: str = "huggingface"


MEDIA = {
    "text": "",
    "pictures": "images: images, ",
    "sounds": "images: images, audios: audios, ",
    "speech": "audios: audio, ",
}
KINDS = {
    "moe": Kind("qwen3_vl_moe", "qwen3vl"),
    "dense": Kind("", "qwen3vl"),  # the trainer registers none: without a name it takes transformers' own class
    "omni": Kind("qwen3_omni_moe", "qwen3omni", TRANSFORMERS_5, "qwen3_omni_nothink", "qwen3omni", ("visual", "model")),
    "linear": Kind("qwen3_5", "qwen3_5", TRANSFORMERS_5_2),
    "linear-moe": Kind("qwen3_5_moe", "qwen3_5_moe", TRANSFORMERS_5_2),
    "mimo": Kind(
        "mimo_v25",
        "mimov2_5",
        TRANSFORMERS_5_2,
        prefixes=("visual", "model"),
        attention="eager",
        recomputes_tower=False,
    ),
    "asr": Kind(
        "qwen3_asr",
        "qwen3_asr",
        TRANSFORMERS_5_2,
        "qwen3_asr",
        "qwen3asr",
        ("thinker.audio_tower", "thinker.model"),
        blocks="layers",
        head="thinker.lm_head",
        dataset="qwen3_asr",
    ),
}


def decisions(policies: tuple[str, ...], reshard: bool = True, prefetch: int = 0, **sizes: int) -> ShardedDecisions:
    """Return decisions about Qwen3's modules whose decoder layers have ``policies``; sizes default to one replica."""
    num_devices = sizes["num_devices"]
    sizes = {"fully_shard_size": num_devices, "expert_shard_size": num_devices // sizes.get("expert_size", 1), **sizes}
    tower, decoder = KINDS["moe"].prefixes
    parts = (tower, f"{tower}.blocks.{{*}}", decoder, f"{decoder}.embed_tokens", f"{decoder}.layers.{{*}}", "lm_head")
    groups = tuple(
        GroupChoice(
            pattern=pattern, reshard_after_forward=reshard, forward_prefetch=prefetch, backward_prefetch=prefetch
        )
        for pattern in (*parts, "")
    )
    return ShardedDecisions(sizes=ShardSizes(**sizes), groups=groups, policies={parts[4]: policies})


def renamed(decided: ShardedDecisions, kind: str) -> ShardedDecisions:
    """Return ``decided`` about the modules of another kind of model."""

    def name(pattern: str) -> str:
        for old, new in zip(KINDS["moe"].prefixes, KINDS[kind].prefixes, strict=True):
            pattern = pattern.replace(old, new)
        own = KINDS[kind]
        return own.head if pattern == "lm_head" else pattern.replace(".blocks.", f".{own.blocks}.")

    groups = tuple(replace(group, pattern=name(group.pattern)) for group in decided.groups)
    return replace(decided, groups=groups, policies={name(key): row for key, row in decided.policies.items()})


KEEP, PARTLY = ("keep",) * 4, ("recompute", "recompute", "keep", "recompute")
OFFLOADED = ("recompute-offload", "recompute-offload", "recompute", "keep")
PLANS = {
    "2 devices, layers 0, 1 and 3 recomputed": decisions(PARTLY, num_devices=2, accumulation=2),
    "4 devices, HSDP of 2 shards, kept": decisions(KEEP, False, num_devices=4, fully_shard_size=2),
    "2 devices, Ulysses 2, offload": decisions(OFFLOADED, num_devices=2, ulysses_size=2, accumulation=4),
    "2 devices, EP 2, prefetch 1": decisions(PARTLY, True, 1, num_devices=2, expert_size=2, accumulation=2),
    "4 devices, EP 2, HSDP 2, offload": decisions(OFFLOADED, num_devices=4, expert_size=2, fully_shard_size=2),
    "2 devices, prefetch 2, offload": decisions(OFFLOADED, True, 2, num_devices=2, accumulation=2),
}
SHARDED, HYBRID, ULYSSES, EXPERTS, EXPERTS_HYBRID, PREFETCHED = PLANS


@dataclass(frozen=True)
class NativeRun:
    """How a launch ended: worst exit status, the first rank's output, (loss, gradient norm) of each step."""

    status: int
    output: str

    @property
    def steps(self) -> list[tuple[float, float]]:
        """Return loss and gradient norm of each step, with all digits."""
        return [(float(loss), float(norm)) for loss, norm in re.findall(r"^exact \d+ (\S+) (\S+)$", self.output, re.M)]


def needs_sources() -> list[Any]:
    """Return the marks of tests of the host, which skip where its folders are not given."""
    missing = [name for name in SOURCES if not os.environ.get(name)]
    reason = f"set {', '.join(missing)} (tests/hosts/README.md)"
    return [
        pytest.mark.torch,
        pytest.mark.distributed,
        pytest.mark.timeout(3000),
        pytest.mark.skipif(bool(missing), reason=reason),
    ]


def environment() -> dict[str, str]:
    """Return the environment of the host's interpreter: stand-ins first, then this package and the host."""
    host, mindspeed, _ = (os.environ[name] for name in SOURCES)
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join(
        [str(HERE / "native_stand_ins"), str(HERE.parents[1]), host, mindspeed, *filter(None, given)]
    )
    return {
        **os.environ,
        "PYTHONPATH": path,
        "LD_LIBRARY_PATH": os.environ.get("NATIVE_FSDP2_LIBRARIES", ""),
        "NON_MEGATRON": "true",
        "OMP_NUM_THREADS": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "USE_TF": "FALSE",
    }


def write_model(folder: Path, kind: str) -> None:
    """Write model and data by the host's own libraries."""
    command = [os.environ[KINDS[kind].python], str(HERE / "tiny_native.py"), str(folder), kind]
    variables = environment()
    if kind not in ("mimo", "asr"):  # the others are transformers' own classes, which the trainer's patches are not for
        variables |= {"PYTHONPATH": str(HERE / "native_stand_ins"), "NON_MEGATRON": ""}
    subprocess.run(command, check=True, env=variables, capture_output=True)


def write_config(folder: Path, kind: str, values: Mapping[str, Value], plugin: bool = True, data: str = "text") -> Path:
    """Write the configuration of a model that ``write_model`` wrote, with ``values`` set."""
    text, own = (HERE / "native_host.yaml").read_text("utf-8"), KINDS[kind]
    words = {"FOLDER": str(folder), "MODEL_ID": own.model_id, "MODULE": own.module, "TEMPLATE": own.template}
    words |= {"dataset_type: huggingface": f"dataset_type: {own.dataset}", "- lm_head": f"- {own.head}"}
    words |= {
        "visual.blocks": f"visual.{own.blocks}",
        "COLLATE": own.collate,
        "DATA": data,
        "MEDIA, ": MEDIA[data],
        "sdpa": own.attention,
    }
    for word, replacement in words.items():
        text = text.replace(word, replacement)
    text = text if own.recomputes_tower else text.replace("      - model.visual.blocks.{*}  # of the tower, too\n", "")
    text = text.replace("model.visual", own.prefixes[0]).replace("model.language_model", own.prefixes[1])
    text = text if plugin else text.replace(OWN_PLUGIN, "")
    path = folder / "config.yaml"
    path.write_text(with_values(text, values, "native_host.yaml"), "utf-8")
    return path


def run_native_host(size: int, config: Path, *words: str, python: str = SOURCES[2]) -> NativeRun:
    """Train on ``size`` processes with ``words`` behind the YAML; ``python`` names the interpreter's variable."""
    script = Path(os.environ[SOURCES[0]]) / "mindspeed_mm" / "fsdp" / "train" / "trainer.py"
    with reserved_port() as port:
        running = []
        for rank in range(size):
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            ranks |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
            log = (config.parent / f"rank{rank}.log").open("w+")
            command = [os.environ[python], "-W", "ignore", str(script), str(config), *words]
            variables = {**environment(), **{name: str(value) for name, value in ranks.items()}}
            running.append(
                (subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=variables, cwd=config.parent), log)
            )
        statuses = [abs(process.wait(timeout=900)) for process, _ in running]
        logs = []
        for _, log in running:
            log.seek(0)
            logs.append(log.read())
            log.close()
    worst = max(range(size), key=lambda rank: statuses[rank])
    return NativeRun(max(statuses), logs[worst] if statuses[worst] else logs[0])
