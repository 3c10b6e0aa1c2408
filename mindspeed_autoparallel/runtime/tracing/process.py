"""Starts the tracing process and keeps its results by content."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import LaunchError
from mindspeed_autoparallel.files import read_json, write_json_atomic
from mindspeed_autoparallel.runtime.tracing.request import LayerRequest

_MODULE = "mindspeed_autoparallel.runtime.tracing.layer"
_FORGOTTEN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _release(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def content_key(request: LayerRequest) -> str:
    """Hash of all that a trace depends on: the request, the tracing code, torch and Megatron."""
    folder = Path(__file__).parent
    attention = folder.parent / "attention"
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(request), sort_keys=True).encode())
    for path in sorted((*folder.glob("*.py"), *attention.glob("*.py"))):
        digest.update(path.read_bytes())
    digest.update(f"{_release('torch')} {_release('megatron-core')} {os.environ.get('PYTHONPATH', '')}".encode())
    return digest.hexdigest()[:32]


def trace(request: LayerRequest, cache: Path | None = None, timeout_s: float = 300) -> dict[str, Any]:
    """The trace of ``request`` (see ``layer.trace_layer``); from ``cache`` when the same was traced before.

    Raises ``LaunchError`` with the last lines when the layer cannot be built or run in that layout, or hangs.
    """
    stored = None if cache is None else cache / f"{content_key(request)}.json"
    if stored is not None and stored.exists():
        found: dict[str, Any] = read_json(stored, "stored trace")
        return found
    # Ranks and torchrun's addresses of a surrounding job must not reach a world that is pretended.
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _FORGOTTEN and not name.startswith("TORCHELASTIC_")
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", _MODULE, "fake"],
            input=json.dumps(dataclasses.asdict(request)),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"tracing did not end within {timeout_s:.0f} s; measure this layout instead.") from error
    lines = [line for line in done.stdout.splitlines() if line.startswith("TRACE ")]
    if done.returncode or not lines:
        last = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise LaunchError(
            f"this layer cannot be traced (exit code {done.returncode}); measure it instead. Last lines:\n{last}"
        )
    result: dict[str, Any] = json.loads(lines[-1][len("TRACE ") :])
    if stored is not None:
        write_json_atomic(stored, result)
    return result
