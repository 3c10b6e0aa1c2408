"""The readable state of a machine. Checks read only a ``Node``, so tests can pass a fake one."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.hosts.script import Script
from mindspeed_autoparallel.runtime.launch.ports import check_port_is_free

ASCEND, NVIDIA, NO_DEVICE = "ascend", "nvidia", "none"
_DEVICES = {ASCEND: "dev/davinci[0-9]*", NVIDIA: "dev/nvidia[0-9]*"}


@dataclass(frozen=True, kw_only=True)
class Node:
    """``root``: where /proc, /sys, /dev are; ``run(words)`` gives a program's output, None if it is missing or fails;
    ``release_of(distribution)`` gives its version or ""; ``port_is_free(port)``; ``free_bytes(path)``."""

    environment: Mapping[str, str] = field(default_factory=dict)
    script: Script = field(default_factory=Script)
    root: Path = Path("/")
    run: Callable[[Sequence[str]], str | None] = lambda words: None
    release_of: Callable[[str], str] = lambda distribution: ""
    port_is_free: Callable[[int], bool] = lambda port: True
    free_bytes: Callable[[Path], int | None] = lambda path: None
    now_s: Callable[[], float] = lambda: 0.0
    peers: tuple[str, ...] = ()

    def variable(self, name: str) -> str | None:
        """Return the value that a program started by the script would have: the script's exports override the
        environment."""
        return self.script.exports.get(name, self.environment.get(name))

    def read(self, path: str) -> str | None:
        """Return the text of a file under ``root``; None if it is missing."""
        try:
            return (self.root / path.lstrip("/")).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def matching(self, pattern: str) -> list[str]:
        """Return the names of the files under ``root`` that match, in order."""
        return sorted(path.name for path in self.root.glob(pattern.lstrip("/")))

    def device_kind(self) -> str:
        return next((kind for kind, files in _DEVICES.items() if self.matching(files)), NO_DEVICE)

    def num_devices(self) -> int:
        return next((len(found) for files in _DEVICES.values() if (found := self.matching(files))), 0)


def this_node(script: Script | None = None, peers: Sequence[str] = (), root: Path = Path("/")) -> Node:
    """Return the machine of this process."""
    return Node(
        environment=dict(os.environ),
        script=script or Script(),
        root=root,
        run=_run,
        release_of=_release_of,
        port_is_free=_port_is_free,
        free_bytes=_free_bytes,
        now_s=time.time,
        peers=tuple(peers),
    )


def _run(words: Sequence[str]) -> str | None:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(list(words), capture_output=True, text=True, timeout=10, check=False)
        if done.returncode == 0:
            return done.stdout.strip()
    return None


def _release_of(distribution: str) -> str:
    if distribution == "megatron-core":
        from mindspeed_autoparallel.patching.releases import release_of

        return release_of(distribution)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return ""


def _port_is_free(port: int) -> bool:
    try:
        check_port_is_free(port)
    except ConfigError:
        return False
    return True


def _free_bytes(path: Path) -> int | None:
    path = path.absolute()
    while not os.path.exists(path) and path != path.parent:  # noqa: PTH110  # Path raises at names too long
        path = path.parent
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None
