"""Environment and log of a child process: the user's variables without the launcher's, and a private file."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from mindspeed_autoparallel.redaction import MASK, is_secret_variable, known_values, with_encoded

_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_", "SLURM_STEP", "OOTB_OPTIMIZER_")
_LAUNCHER_NAMES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
        *("ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_TASK_PID"),
        *("SLURM_GTIDS", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
    }
)
"""Variables that torchrun, mpirun and srun set for their processes; child processes must not inherit them."""

_SHORTEST_SECRET = 6
"""Shorter values are not masked: they may be ordinary words and numbers of a log."""

_CHUNK = 65536


def child_environment(parent: Mapping[str, str], additions: Mapping[str, str]) -> dict[str, str]:
    """Return ``parent`` without its launcher's variables, plus ``additions``; ``parent`` itself does not change.

    The children run the user's script, which needs its variables (paths, switches, the token of its tokenizer). Logs
    mask secrets (``secret_variables``).
    """
    kept = {
        name: value
        for name, value in parent.items()
        if name not in _LAUNCHER_NAMES and not name.startswith(_LAUNCHER_PREFIXES)
    }
    return {**kept, **additions}


def secret_variables(environment: Mapping[str, str]) -> frozenset[str]:
    """Return the values of ``environment`` that are secret by their name or form, as they are and in base64, to be
    masked in logs."""
    named = {value for name, value in environment.items() if is_secret_variable(name)}
    formed = {found for value in environment.values() for found in known_values(value)}
    return with_encoded(value for value in named | formed if len(value) >= _SHORTEST_SECRET)


class Log(NamedTuple):
    """The output of a process; close ``stream`` once the process has started, join ``copier`` after its end."""

    stream: IO[bytes]
    copier: threading.Thread | None


def private_log(path: Path, secrets: frozenset[str]) -> Log:
    """Open ``path`` for a process to write to, readable by the user only and never through a link.

    With ``secrets`` the stream is a pipe, and a thread masks them before they reach the file, so that the file never
    contains them even if the coordinator is killed.
    """
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    stream = os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0)
    if not secrets:
        return Log(stream, None)
    reading, writing = os.pipe()
    words = sorted((secret.encode(errors="surrogateescape") for secret in secrets), key=len, reverse=True)
    copier = threading.Thread(target=_copy, args=(reading, stream, words), daemon=True)
    copier.start()
    return Log(os.fdopen(writing, "wb", buffering=0), copier)


def _copy(reading: int, stream: Any, secrets: list[bytes]) -> None:
    """Copy until the last writer closes its end; a possible beginning of a secret is held back until the rest
    arrives."""
    waiting = b""
    with os.fdopen(reading, "rb", buffering=0) as source, stream:
        while part := source.read(_CHUNK):
            waiting = _masked(waiting + part, secrets)
            kept = _unfinished(waiting, secrets)
            stream.write(waiting[: len(waiting) - kept])
            waiting = waiting[len(waiting) - kept :]
        stream.write(waiting)


def _masked(text: bytes, secrets: list[bytes]) -> bytes:
    # ``secrets`` come longest first: one may be part of another.
    for secret in secrets:
        text = text.replace(secret, MASK.encode())
    return text


def _unfinished(text: bytes, secrets: list[bytes]) -> int:
    """Count how many bytes at the end of ``text`` may begin a secret."""
    longest = max(len(secret) for secret in secrets)
    for length in range(min(longest - 1, len(text)), 0, -1):
        if any(secret.startswith(text[-length:]) for secret in secrets):
            return length
    return 0
