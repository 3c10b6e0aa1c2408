"""One fault in one rank of whatever is started with this folder on ``PYTHONPATH``.

``FAULT_FOLDER`` gets a file ``rank-N`` for the N-th rank process that starts, with its process id, the processor seconds
at which it joined its process group, and those at its last sign of life. ``FAULT=kind:N:seconds:step`` makes that
rank meet the fault once it has used so many processor seconds and, with a step, once the checkpoint of that step is
whole; the file ``happened`` then exists. Python imports this module before the script.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

STOPPED_S = 30.0
_LOOK_S = 0.05
_TRACKER = Path("ck", "latest_checkpointed_iteration.txt")


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    raise ValueError("the fault that was put here")


def _no_memory(number: int, frame: FrameType | None) -> NoReturn:
    raise MemoryError


def _stop() -> None:
    """Stop this process for ``STOPPED_S``; a child of it, outside of its session, lets it go on."""
    own = os.getpid()
    if os.fork() == 0:
        os.setsid()
        time.sleep(STOPPED_S)
        with contextlib.suppress(ProcessLookupError):
            os.kill(own, signal.SIGCONT)
        os._exit(0)
    os.kill(own, signal.SIGSTOP)


def _fill_disk() -> None:
    """Leave no byte free in the folder that the run writes to."""
    place = next(folder for folder in (Path("work"), Path("ck")) if folder.is_mount())
    with (place / "filler").open("wb", buffering=0) as stream:
        for size in (2**20, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    stream.write(bytes(size))


def _happen(kind: str, folder: Path) -> None:
    try:
        (folder / "happened").touch(exist_ok=False)
    except FileExistsError:
        return
    print(f"fault: {kind}", flush=True)
    match kind:
        case "exit":
            os._exit(3)
        case "abort":
            os.abort()
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            _stop()
        case "disk":
            _fill_disk()
        case _:
            os.kill(os.getpid(), signal.SIGUSR1)  # its handler raises in the main thread


def _joined() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and getattr(distributed, "is_initialized", bool)()


def _saved() -> int:
    try:
        return int(_TRACKER.read_text())
    except (OSError, ValueError):
        return 0


def _watch(place: Path, kind: str, seconds: float, step: int) -> None:
    """Record this rank's life in ``place``, and let the fault happen at its moment."""
    joined = None
    while True:
        used = time.process_time()
        if joined is None and _joined():
            joined = used
        if kind and used >= seconds and _saved() >= step:
            _happen(kind, place.parent)
            return
        if not kind:
            whole = place.with_name(f"new-{place.name}")
            whole.write_text(json.dumps([os.getpid(), joined, used]))
            whole.replace(place)
        time.sleep(_LOOK_S)


def _claim(folder: Path) -> tuple[int, Path]:
    for number in itertools.count():
        place = folder / f"rank-{number}"
        with contextlib.suppress(FileExistsError), place.open("x") as stream:
            json.dump([os.getpid(), None, 0.0], stream)
            return number, place
    raise AssertionError


if "RANK" in os.environ and "FAULT_FOLDER" in os.environ and "FAULT_SEEN" not in os.environ:
    os.environ["FAULT_SEEN"] = "1"  # helper processes of a rank inherit RANK and are none
    _number, _place = _claim(Path(os.environ["FAULT_FOLDER"]))
    _kind, _rank, _seconds, _step = os.environ.get("FAULT", ":-1:0:0").split(":")
    if not _kind or (int(_rank) == _number and not (_place.parent / "happened").exists()):
        signal.signal(signal.SIGUSR1, _no_memory if _kind == "memory" else _raise)
        threading.Thread(target=_watch, args=(_place, _kind, float(_seconds), int(_step)), daemon=True).start()
