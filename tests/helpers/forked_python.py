"""A ``python`` whose programs are forked from a process that has imported torch: ``[forked_python(), "train.py", ...]``.

Reading torch and what Megatron needs of it takes longer than most of what is tested; a program forked from here
starts in some milliseconds and imports Megatron and this project itself, in its own order. ``sys.executable`` of such
a program is the same stand-in, so what it launches is forked as well. Tests that are about a start itself (what an
import costs, a hash seed, variables of torch) use ``sys.executable``. Workers of pytest-xdist are such programs, and share
the server with the programs of their tests.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import functools
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_HERE = Path(__file__).parent
_NOT_TAKEN = ("PYTHON", "LD_", "OMP_", "MKL_", "TORCH", "MALLOC_")


_SHARED = "FORKED_PYTHON_OF_ALL_WORKERS"
"""The variable that names the stand-in whose server the workers of one run share."""
_folders: set[Path] = set()


def server_seconds() -> float:
    """Return the processor seconds of the programs of this process's tests that have ended, and of their templates' imports."""
    seconds = array.array("d")
    for folder in _folders:
        with contextlib.suppress(OSError):
            seconds.frombytes((folder / f"seconds-{os.environ.get('PYTEST_XDIST_WORKER', '')}").read_bytes())
    return sum(seconds)


def share_forked_python() -> str:
    """Return ``forked_python()`` and have the test processes that this process starts use the same server."""
    os.environ[_SHARED] = forked_python()
    return os.environ[_SHARED]


def take_interpreter() -> None:
    """Make ``sys.executable`` the interpreter again in a process that was started as ``forked_python()``."""
    with contextlib.suppress(OSError):
        sys.executable = str(Path(sys.executable).with_name("real").readlink())
        multiprocessing.set_executable(sys.executable)


@functools.cache
def forked_python(also: tuple[str, ...] = ()) -> str:
    """Return the path of the stand-in for ``python``; its server lives as long as this process, or as the one that shares it.

    ``also``: modules that the server imports beside torch, in this order and on the CPU device, where a program is about
    something else than its imports.
    """
    client = os.environ[_SHARED] if _SHARED in os.environ and not also else _start(also)
    _folders.add(Path(client).parent)
    return client


def _start(also: tuple[str, ...]) -> str:
    """Start a server and return its stand-in."""
    folder = Path(tempfile.mkdtemp(prefix="python-"))
    client = folder / "python"
    (folder / "real").symlink_to(sys.executable)
    client.write_text(f"#!{sys.executable} -IS\n" + (_HERE / "python_client.py").read_text())
    client.chmod(0o700)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_TAKEN)}
    if also:
        environment["MINDSPEED_AUTOPARALLEL_DEVICE"] = "cpu"
    server = subprocess.Popen(
        [sys.executable, str(_HERE / "python_server.py"), str(folder / "socket"), str(client), *also],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**environment, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"},
        start_new_session=True,
    )
    atexit.register(_end, server, folder)
    assert server.stdout is not None
    if server.stdout.readline() != b"ready\n":
        raise RuntimeError("the server of forked programs did not start")
    return str(client)


def program_of(client: int) -> int:
    """Return the process that runs what ``[forked_python(), ...]`` was started for as process ``client``; ``client`` itself
    where it runs it alone."""
    with contextlib.suppress(OSError, ValueError):
        if forked_python().encode() in Path(f"/proc/{client}/cmdline").read_bytes().split(b"\0"):
            return int(Path(forked_python()).with_name(str(client)).read_text())
    return client


def _end(server: subprocess.Popen[bytes], folder: Path) -> None:
    server.communicate()
    shutil.rmtree(folder, ignore_errors=True)
