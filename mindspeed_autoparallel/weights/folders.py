"""A result folder appears complete or not at all: it is made next to its final path and moved there in one step."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import shown

_OURS = re.compile(
    r"release|iter_[0-9]+|mp_rank_[0-9_]+|latest_.*\.txt|.*\.distcp|\.metadata|metadata\.json|common\.pt|modelopt_.*|"
    r"model.*\.safetensors(\.index\.json)?"
)
"""Names in a folder of checkpoints; those of a Hugging Face model's other files are free."""
_EXCHANGE = 2  # RENAME_EXCHANGE of Linux
_HERE = -100  # AT_FDCWD


def refuse_existing(target: Path, *, overwrite: bool, sources: Iterable[Path] = ()) -> None:
    """Raise ``ConfigError`` if ``target`` exists and must not be replaced; call before any long work.

    With ``overwrite`` only a checkpoint, a Hugging Face model or an empty folder is replaced, and never one that holds
    any of ``sources`` (folders that are read) or is inside one.
    """
    try:
        there = target.is_symlink() or target.exists()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise ConfigError(f"{shown(target, 200)} cannot be a folder: {error}. Choose another.") from error
    if not there:
        return
    if not overwrite:
        raise ConfigError(f"{target} exists already. Choose another folder or add --overwrite to replace it.")
    if target.is_symlink():
        raise ConfigError(f"{target} is a symbolic link, to {target.resolve()}. Give the folder itself.")
    if not target.is_dir():
        raise ConfigError(f"{target} is a file, not a folder. Choose another folder.")
    for source in sources:
        _refuse_source(target, source)
    _refuse_foreign(target)


def _refuse_source(target: Path, source: Path) -> None:
    """Raise ``ConfigError`` if replacing ``target`` would remove ``source``, or a file that ``source`` links to."""
    there = target.resolve()
    read = source.resolve()
    if read.is_relative_to(there) or there.is_relative_to(read):
        raise ConfigError(f"{target} cannot be replaced: {source} is read while it is written. Choose another folder.")
    for folder, _, files in os.walk(read):
        for name in files:
            path = Path(folder, name)
            if path.is_symlink() and path.resolve().is_relative_to(there):
                raise ConfigError(f"{target} cannot be replaced: {path}, which is read, is a link into it.")


def _refuse_foreign(target: Path) -> None:
    """Raise ``ConfigError`` if ``target`` holds files that belong to no checkpoint and no model."""
    names = sorted(path.name for path in target.iterdir())
    foreign = [name for name in names if not _OURS.fullmatch(name)]
    if "config.json" in names and any(name.endswith(".safetensors") for name in names):
        # Tokenizer files have any name; folders are not among them.
        foreign = [name for name in foreign if (target / name).is_dir()]
    if foreign:
        raise ConfigError(
            f"{target} is not only a checkpoint: it holds {shown(foreign[0])}. --overwrite replaces checkpoints and "
            "nothing else; choose another folder, or move that away."
        )


@contextlib.contextmanager
def whole_folder(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty folder to fill; at the end of the block it becomes ``target``, on an error it is removed.

    A process that is killed leaves only a hidden ``.NAME.partial-HOST-PID`` next to ``target``, which nothing loads and
    which the next call for the same target on that host removes. ``ConfigError`` on a full disk or missing rights.
    """
    target = target.absolute()
    refuse_existing(target, overwrite=overwrite)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _recover(target)
        partial = target.parent / f".{target.name}.partial-{_me()}"
        partial.mkdir()
    except OSError as error:
        raise ConfigError(
            f"cannot write in {target.parent}: {error.strerror or error}. Choose another folder."
        ) from error
    try:
        yield partial
        _put_in_place(partial, target)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror or error}. Free space there.") from error
    finally:
        # After an exchange this is the replaced folder.
        shutil.rmtree(partial, ignore_errors=True)


def _put_in_place(partial: Path, target: Path) -> None:
    if not target.exists():
        partial.replace(target)
        return
    if _exchange(partial, target):
        return
    # File systems without exchange (NFS): a kill between these two renames leaves no target, which _recover restores.
    replaced = target.parent / f".{target.name}.replaced-{_me()}"
    target.replace(replaced)
    try:
        partial.replace(target)
    except OSError:
        replaced.replace(target)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step, so that both names always exist; False if the system does not support it."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return rename is not None and rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0


def _recover(target: Path) -> None:
    """Remove the leftovers of killed conversions on this host, and restore a target that one had just moved away."""
    for leftover in sorted(target.parent.glob(f".{glob.escape(target.name)}.*-*")):
        match = re.fullmatch(r"\.(partial|replaced)-(?:(.*)-)?([0-9]+)", leftover.name.removeprefix(f".{target.name}"))
        if match is None or leftover.is_symlink() or match[2] not in (None, _host()):
            continue
        if Path("/proc", match[3]).exists():
            continue
        if match[1] == "replaced" and not target.exists():
            leftover.replace(target)
        else:
            shutil.rmtree(leftover, ignore_errors=True)


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())


def _me() -> str:
    return f"{_host()}-{os.getpid()}"
