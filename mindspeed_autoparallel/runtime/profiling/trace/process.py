"""Starts tracing processes and caches their results by content."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError, LaunchError
from mindspeed_autoparallel.files import read_json, write_json_atomic
from mindspeed_autoparallel.runtime.launch.children import child_environment
from mindspeed_autoparallel.runtime.profiling.trace.request import BlockResult, TraceRequest

_COMMAND = ("-m", "mindspeed_autoparallel.runtime.profiling.trace", "fake")
_PREFIX = "TRACE "
_NUM_ERROR_LINES = 5


def trace(request: TraceRequest, cache: Path | None = None, timeout_s: float = 300) -> BlockResult:
    """Return the trace of ``request`` (see ``running.trace``), from ``cache`` if it was traced before.

    Raises ``LaunchError`` with the reason when the block cannot be built or run in that layout, or hangs.
    """
    digest = hash_of_tracing_code()
    digest.update(request.key().encode())
    stored = None if cache is None else cache / f"{digest.hexdigest()[:32]}.json"
    if stored is not None and stored.exists():
        found: BlockResult = read_json(stored, "stored trace")
        return found
    (result,) = trace_all([request], timeout_s)
    if "error" in result:
        raise LaunchError(f"this {request.block} cannot be traced; measure it instead. Reason:\n{result['error']}")
    if stored is not None:
        write_json_atomic(stored, result)
    return result


def trace_all(requests: Sequence[TraceRequest], timeout_s: float = 600) -> list[BlockResult]:
    """Return the traces of ``requests``, in their order, by one process; a failed one has only ``error``.

    Raises ``LaunchError`` if the process dies, or exceeds ``timeout_s``.
    """
    # Ranks and torchrun's addresses of a surrounding job must not reach a world of fake process groups.
    environment = child_environment(os.environ, {})
    try:
        done = subprocess.run(
            [sys.executable, *_COMMAND],
            input=json.dumps([dataclasses.asdict(item) for item in requests]),
            capture_output=True,
            text=True,
            env=environment,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"tracing did not end within {timeout_s:.0f} s; measure this layout instead.") from error
    answers = [json.loads(line[len(_PREFIX) :]) for line in done.stdout.splitlines() if line.startswith(_PREFIX)]
    if len(answers) < len(requests):
        last = "\n".join(done.stderr.strip().splitlines()[-_NUM_ERROR_LINES:])
        raise LaunchError(f"tracing failed (exit code {done.returncode}); measure instead. Last lines:\n{last}")
    for answer in answers:
        del answer["index"]
    return answers


_RUNTIME = Path(__file__).parents[2]
_TRACING_FOLDERS = tuple(
    (_RUNTIME / name).resolve()
    for name in (
        "profiling",
        "profiling/trace",
        "profiling/measure",
        "profiling/calibrate",
        "attention",
        "devices/cpu",
        "megatron",
        "../patching",
        "../profiles/knowledge",
    )
)


def hash_of_tracing_code() -> hashlib._Hash:
    """Return a hash of the modules in this package's tracing folders, and of the releases of torch and Megatron."""
    return _hash_of(_TRACING_FOLDERS)


def hash_of_sources(script: Path) -> hashlib._Hash:
    """Return ``hash_of_tracing_code`` with the files in the folder of ``script``, which usually contain custom layers.

    Folders and dangling links named ``*.py`` are skipped; a ``ConfigError`` names a file that may not be read.
    """
    return _hash_of((script.resolve().parent, *_TRACING_FOLDERS))


def _hash_of(folders: Iterable[Path]) -> hashlib._Hash:
    releases = [_release_of("torch"), _release_of("megatron-core"), os.environ.get("PYTHONPATH", "")]
    digest = hashlib.sha256(" ".join(releases).encode())
    for folder in folders:
        for path in sorted(one for one in folder.glob("*.py") if one.is_file()):
            try:
                digest.update(path.read_bytes())
            except OSError as error:
                raise ConfigError(
                    f"cannot read {path}: {error.strerror}. A trace depends on the Python files in the script's "
                    "folder; make it readable or move it away."
                ) from error
    return digest


def _release_of(package: str) -> str:
    """Return the release of a package; ``none`` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
