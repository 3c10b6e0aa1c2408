"""Starts the tracing process and keeps its results by content."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import LaunchError
from mindspeed_autoparallel.files import read_json, write_json_atomic
from mindspeed_autoparallel.runtime.tracing.request import TraceRequest

_MODULE = "mindspeed_autoparallel.runtime.tracing"
_PREFIX = "TRACE "
_FORGOTTEN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NUM_ERROR_LINES = 5


def release_of(package: str) -> str:
    """Of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _code_hash() -> Any:
    """Hash of the code a trace runs through, torch and Megatron."""
    runtime = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for folder in ("tracing", "attention", "devices/cpu", "tuning"):
        for path in sorted((runtime / folder).glob("*.py")):
            digest.update(path.read_bytes())
    digest.update(f"{release_of('torch')} {release_of('megatron-core')} {os.environ.get('PYTHONPATH', '')}".encode())
    return digest


def trace(request: TraceRequest, cache: Path | None = None, timeout_s: float = 300) -> dict[str, Any]:
    """The trace of ``request`` (see ``running.trace``); from ``cache`` when the same was traced before.

    Raises ``LaunchError`` with the reason when the block cannot be built or run in that layout, or hangs.
    """
    (result,) = trace_all([request], cache, timeout_s)
    if "error" in result:
        raise LaunchError(f"this {request.block} cannot be traced; measure it instead. Reason:\n{result['error']}")
    return result


def trace_all(
    requests: Sequence[TraceRequest], cache: Path | None = None, timeout_s: float = 600, num_processes: int = 1
) -> list[dict[str, Any]]:
    """The traces of ``requests``, in their order; one that is not possible has ``error`` and nothing else.

    ``num_processes`` share what the cache lacks. Raises ``LaunchError`` when a process dies or does not end in time.
    """
    code = _code_hash()

    def stored(request: TraceRequest) -> Path | None:
        if cache is None:
            return None
        digest = code.copy()
        digest.update(request.key().encode())
        return cache / f"{digest.hexdigest()[:32]}.json"

    results: dict[TraceRequest, dict[str, Any]] = {}
    for request in requests:
        path = stored(request)
        if path is not None and path.exists():
            results[request] = read_json(path, "stored trace")
    # Neighbours share process groups; a layout's requests stay together.
    missing = sorted({request for request in requests if request not in results}, key=_layout)
    size = -(-len(missing) // num_processes) or 1
    parts = [missing[start : start + size] for start in range(0, len(missing), size)]
    workers = [_start(part) for part in parts]
    try:
        for part, worker in zip(parts, workers, strict=True):
            for request, result in zip(part, _collect(worker, len(part), timeout_s), strict=True):
                results[request] = result
                path = stored(request)
                if path is not None and "error" not in result:
                    write_json_atomic(path, result)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return [results[request] for request in requests]


def _layout(request: TraceRequest) -> tuple[int, ...]:
    return (request.num_ranks, request.rank, request.tensor, request.context, request.expert, request.pipeline)


def _start(requests: Sequence[TraceRequest]) -> subprocess.Popen[str]:
    # Ranks and torchrun's addresses of a surrounding job must not reach a world that is pretended.
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _FORGOTTEN and not name.startswith("TORCHELASTIC_")
    }
    worker = subprocess.Popen(
        [sys.executable, "-m", _MODULE, "fake"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert worker.stdin is not None
    worker.stdin.write(json.dumps([dataclasses.asdict(request) for request in requests]))
    worker.stdin.close()
    worker.stdin = None  # communicate() would flush it again
    return worker


def _collect(worker: subprocess.Popen[str], count: int, timeout_s: float) -> list[dict[str, Any]]:
    try:
        output, errors = worker.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"tracing did not end within {timeout_s:.0f} s; measure this layout instead.") from error
    found = [json.loads(line[len(_PREFIX) :]) for line in output.splitlines() if line.startswith(_PREFIX)]
    if worker.returncode or len(found) != count:
        last = "\n".join(errors.strip().splitlines()[-_NUM_ERROR_LINES:])
        raise LaunchError(f"tracing failed (exit code {worker.returncode}); measure instead. Last lines:\n{last}")
    return [{key: value for key, value in result.items() if key != "index"} for result in found]
