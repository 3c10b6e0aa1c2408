"""Starts tracing processes and caches their results by content."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import os
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError, LaunchError
from mindspeed_autoparallel.files import read_json, write_json_atomic
from mindspeed_autoparallel.line_process import LineProcess
from mindspeed_autoparallel.runtime.profiling.trace.request import BlockResult, TraceRequest

_COMMAND = ("-m", "mindspeed_autoparallel.runtime.profiling.trace", "fake")
_PREFIX = "TRACE "
_FORGOTTEN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NUM_ERROR_LINES = 5
_MOST_LOST = 3
"""Failed requests without any success after which tracing stops: the cause is not in the requests."""


def _code_hash() -> Any:
    """Return a hash of the tracing code and of the releases of torch and Megatron."""
    digest = hash_of_tracing_code()
    digest.update(f"{release_of('torch')} {release_of('megatron-core')} {os.environ.get('PYTHONPATH', '')}".encode())
    return digest


def trace(request: TraceRequest, cache: Path | None = None, timeout_s: float = 300) -> BlockResult:
    """Return the trace of ``request`` (see ``running.trace``), from ``cache`` if it was traced before.

    Raises ``LaunchError`` with the reason when the block cannot be built or run in that layout, or hangs.
    """
    (result,) = trace_all([request], cache, timeout_s)
    if "error" in result:
        raise LaunchError(f"this {request.block} cannot be traced; measure it instead. Reason:\n{result['error']}")
    return result


def trace_all(
    requests: Sequence[TraceRequest], cache: Path | None = None, timeout_s: float = 600, num_processes: int = 1
) -> list[BlockResult]:
    """Return the traces of ``requests``, in their order; a failed one has only ``error``.

    ``num_processes`` trace the requests that ``cache`` lacks; a request whose process dies is retried once. Raises
    ``LaunchError`` if processes die at every request, or exceed ``timeout_s``.
    """
    code = _code_hash()

    def stored(request: TraceRequest) -> Path | None:
        if cache is None:
            return None
        digest = code.copy()
        digest.update(request.key().encode())
        return cache / f"{digest.hexdigest()[:32]}.json"

    results: dict[TraceRequest, BlockResult] = {}
    for request in requests:
        path = stored(request)
        if path is not None and path.exists():
            results[request] = read_json(path, "stored trace")
    missing = sorted({request for request in requests if request not in results}, key=_layout)
    # Neighbours share process groups, so a layout's requests stay together. A free process takes the next layout: the
    # time of a layout (experts per rank) is not known in advance.
    layouts = deque(list(same) for _, same in itertools.groupby(missing, key=_layout))
    workers = [_Worker() for _ in range(min(num_processes, len(layouts)))]
    watch = threading.Timer(timeout_s, _kill, (workers,))
    try:
        watch.start()
        with ThreadPoolExecutor(max(1, len(workers))) as pool:
            for found in pool.map(lambda worker: worker.trace_from(layouts), workers):
                results.update(found)
    except LaunchError as error:
        if watch.finished.is_set():
            raise LaunchError(f"tracing did not end within {timeout_s:.0f} s; measure this layout instead.") from error
        raise
    finally:
        watch.cancel()
        _kill(workers)
    for request in missing:
        path = stored(request)
        if path is not None and "error" not in results[request]:
            write_json_atomic(path, results[request])
    return [results[request] for request in requests]


def _layout(request: TraceRequest) -> tuple[int, ...]:
    return (request.num_ranks, request.rank, request.tensor, request.context, request.expert, request.pipeline)


class _Worker:
    """A tracing process for one layout after the other, replaced if it dies."""

    def __init__(self) -> None:
        # Ranks and torchrun's addresses of a surrounding job must not reach a world of fake process groups.
        self._environment = {
            name: value
            for name, value in os.environ.items()
            if name not in _FORGOTTEN and not name.startswith("TORCHELASTIC_")
        }
        self._ended = False
        self._has_answered = False
        self._start()

    def _start(self) -> None:
        self._process = LineProcess(_COMMAND, self._environment)
        if self._ended:  # by another thread, meanwhile
            self.kill()

    def trace_from(self, layouts: deque[list[TraceRequest]]) -> dict[TraceRequest, BlockResult]:
        """Process ``layouts`` until none is left; a request at which a process died twice gets ``error``.

        Raises ``LaunchError`` when processes die at every request, or after ``kill``.
        """
        found: dict[TraceRequest, BlockResult] = {}
        while True:
            try:
                requests = layouts.popleft()
            except IndexError:
                return found
            died_at = None
            while requests:
                answers = self._answers(requests)
                found.update(zip(requests, answers, strict=False))
                requests = requests[len(answers) :]
                if requests:
                    reason = self._last_words()
                    if self._ended:
                        raise LaunchError(reason)
                    if requests[0] == died_at:
                        found[requests.pop(0)] = {"error": reason}
                        if len(found) == _MOST_LOST and not self._has_answered:
                            raise LaunchError(reason)
                    else:
                        died_at = requests[0]
                    self._start()

    def _answers(self, requests: list[TraceRequest]) -> list[BlockResult]:
        """Return the results, fewer than ``requests`` if the process died."""
        answers: list[BlockResult] = []
        self._process.send(json.dumps([dataclasses.asdict(item) for item in requests]))
        while len(answers) < len(requests) and (line := self._process.receive()):
            if line.startswith(_PREFIX):
                answer = json.loads(line[len(_PREFIX) :])
                del answer["index"]
                answers.append(answer)
                self._has_answered = True
        return answers

    def _last_words(self) -> str:
        code, last = self._process.last_words(_NUM_ERROR_LINES)
        return f"tracing failed (exit code {code}); measure instead. Last lines:\n{last}"

    def kill(self) -> None:
        self._ended = True
        self._process.end()


def _kill(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.kill()


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
    """Return a hash of the modules in this package's tracing folders."""
    return _hash_of(_TRACING_FOLDERS)


def hash_of_sources(script: Path) -> hashlib._Hash:
    """Return a hash of the files beside ``script``, which usually contain custom layers, and of the tracing code.

    Folders and dangling links named ``*.py`` are skipped; a ``ConfigError`` names a file that may not be read.
    """
    return _hash_of((script.resolve().parent, *_TRACING_FOLDERS))


def _hash_of(folders: Iterable[Path]) -> hashlib._Hash:
    digest = hashlib.sha256()
    for folder in folders:
        for path in _python_files(folder):
            try:
                digest.update(path.read_bytes())
            except OSError as error:
                raise ConfigError(
                    f"cannot read {path}: {error.strerror}. A trace depends on the Python files beside the script; "
                    "make it readable or move it away."
                ) from error
    return digest


def _python_files(folder: Path) -> Iterable[Path]:
    return (path for path in sorted(folder.glob("*.py")) if path.is_file())


def release_of(package: str) -> str:
    """Return the release of a package; ``none`` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
