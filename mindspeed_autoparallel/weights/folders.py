"""A result folder appears whole or not at all: it is made beside its place and renamed at the end."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError


def refuse_existing(target: Path, *, overwrite: bool) -> None:
    """``ConfigError`` if ``target`` exists and must not be replaced; call before any long work."""
    if target.exists() and not overwrite:
        raise ConfigError(f"{target} exists already. Choose another folder or add --overwrite to replace it.")
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target} is a file, not a folder. Choose another folder.")


@contextlib.contextmanager
def whole_folder(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields an empty folder to fill; at the end of the block it becomes ``target``, on an error it vanishes.

    A process that is killed leaves only a hidden ``.NAME.partial-PID`` beside ``target``, which nothing loads and
    which the next call for the same target removes. ``ConfigError`` on a full disk or missing rights.
    """
    target = target.absolute()
    refuse_existing(target, overwrite=overwrite)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        partial = target.parent / f".{target.name}.partial-{os.getpid()}"
        partial.mkdir()
    except OSError as error:
        raise ConfigError(f"cannot write beside {target}: {error.strerror or error}. Choose another folder.") from error
    try:
        yield partial
        _put_in_place(partial, target)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror or error}. Free space there.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _put_in_place(partial: Path, target: Path) -> None:
    if not target.exists():
        partial.replace(target)
        return
    replaced = target.parent / f".{target.name}.replaced-{os.getpid()}"
    target.replace(replaced)
    try:
        partial.replace(target)
    except OSError:
        replaced.replace(target)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _remove_leftovers(target: Path) -> None:
    for leftover in target.parent.glob(f".{target.name}.partial-*"):
        pid = leftover.name.rpartition("-")[2]
        if pid.isdigit() and not Path("/proc", pid).exists():
            shutil.rmtree(leftover, ignore_errors=True)
