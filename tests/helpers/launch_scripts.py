"""Launch scripts of drawn plans, and the words that bash hands to torchrun."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.cli.main import main

_DENSE: dict[str, Any] = {
    "num_layers": 24,
    "hidden": 2048,
    "heads": 16,
    "kv_heads": 4,
    "head_size": 128,
    "ffn": 8192,
    "seq": 2048,
    "vocab": 32000,
    "swiglu": True,
}
_EXPERTS = {**_DENSE, "type": "moe", "num_experts": 64, "topk": 4, "moe_ffn": 512}
_SHARED = {**_EXPERTS, "shared_expert_ffn": 1024}
CASES: dict[str, tuple[dict[str, Any], int, dict[str, Any], dict[str, Any]]] = {
    "free": (_DENSE, 16, {}, {}),
    "sequence parallel": (_DENSE, 8, {"tp": 4}, {}),
    "uneven": ({**_DENSE, "num_layers": 13}, 8, {"pp": 4, "vpp": 1}, {}),
    "virtual": (_DENSE, 8, {"tp": 2, "pp": 4, "vpp": 2}, {"mbs": 1}),
    "context": ({**_DENSE, "seq": 16384}, 8, {"cp": 2, "pp": 2}, {}),
    "tied": ({**_DENSE, "tied_embeddings": True, "qk_norm": True}, 8, {"pp": 2}, {}),
    "experts": (_EXPERTS, 8, {"ep": 8}, {}),
    "experts across nodes": (_EXPERTS, 32, {"ep": 32, "tp": 1, "pp": 1}, {}),
    "experts and tensor": (_EXPERTS, 16, {"ep": 4, "tp": 2, "pp": 2}, {}),
}
MEGATRON_CASES = {
    **CASES,
    "shared experts": (_SHARED, 16, {"ep": 4, "tp": 2, "pp": 2}, {}),
    "prediction": ({**_DENSE, "mtp_layers": 1}, 8, {"pp": 4, "vpp": 1}, {}),
}
FURTHER = [
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "32000", "--train-iters", "10"),
    *("--lr", "1e-4", "--position-embedding-type", "rope", "--normalization", "RMSNorm", "--disable-bias-linear"),
]


def launched(script: Path, folder: Path) -> list[str]:
    """Return the words that ``script`` hands to torchrun."""
    stub = folder / "torchrun"
    stub.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    stub.chmod(0o755)
    found = {"PATH": f"{folder}:{os.environ['PATH']}", "NODE_RANK": "0", "MASTER_ADDR": "10.0.0.1"}
    done = subprocess.run(["bash", str(script), *FURTHER], env=found, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def drawn_launches(
    folder: Path, gpu: str, cases: dict[str, tuple[dict[str, Any], int, dict[str, Any], dict[str, Any]]]
) -> Iterator[tuple[str, list[str], int]]:
    """Yield by case the flags of the plan that ``tune`` finds, and its devices; the last one is illegal."""
    flags: list[str] = []
    for name, (model, devices, parallel, train) in cases.items():
        request, script = folder / "request.json", folder / "launch.sh"
        hardware = {"gpu": gpu, "num_gpus": devices}
        sections = {"model": model, "hw": hardware, "parallel": parallel, "train": {"gbs": 64, **train}}
        request.write_text(json.dumps(sections))
        assert main(["tune", "--request", str(request), "--script", str(script), "--time-limit-s", "0.5"]) == 0
        words = launched(script, folder)
        assert words[:4] == ["--nnodes", str(max(1, devices // 8)), "--nproc_per_node", "8"]
        flags = words[words.index("pretrain_gpt.py") + 1 :]
        yield name, flags, devices
    yield "illegal", [*flags, "--tensor-model-parallel-size", "3"], devices
