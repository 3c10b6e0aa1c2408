"""Compiles ``helpers_cpp``, the C++ part of Megatron's data sets, as a source checkout does when a training starts.

A wheel contains the compiled module and no Makefile. A checkout's Makefile takes the headers of Python and pybind11
from the ``python3`` on the path, which need not be the running interpreter; torch ships pybind11's headers, too.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sysconfig
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError

_NAME = "helpers_cpp"
_SOURCE = "helpers.cpp"
_NUM_LINES = 8


def compile_dataset_helpers(folder: Path) -> Path | None:
    """Compile ``helpers_cpp`` in ``folder`` unless it exists; return its path, or None without a Makefile or source.

    Processes that start together may all compile: each writes a separate file and renames it. Raises ``ConfigError``
    with the compiler's last lines if compilation fails.
    """
    compiled = folder / f"{_NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if compiled.exists():
        return compiled
    if not (folder / "Makefile").exists() or not (folder / _SOURCE).exists():
        return None
    own = folder / f"{os.getpid()}_{_NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"
    command = ["make", "-C", str(folder), f"OUT={own.name}", f"CPPFLAGS={_include_flags()}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0 and own.exists():
            own.replace(compiled)
            return compiled
        reason = done.stderr.strip() or done.stdout.strip()
    except OSError as error:
        reason = str(error)
    finally:
        with contextlib.suppress(OSError):
            own.unlink()
    last = "\n".join(reason.splitlines()[-_NUM_LINES:])
    raise ConfigError(
        f"{folder / _SOURCE} is not compiled, and compiling it failed; Megatron's data sets need it. Install make and "
        f"a C++ compiler, or run '{' '.join(command[:3])}' where they are. The last lines:\n{last}"
    )


def _include_flags() -> str:
    """Return the flags for this interpreter's headers and pybind11's, from its package or from torch's copy."""
    folders = [sysconfig.get_paths()["include"]]
    try:
        import pybind11

        folders.append(pybind11.get_include())
    except ImportError:
        import torch

        folders.append(str(Path(torch.__file__).parent / "include"))
    return " ".join(f"-I{folder}" for folder in folders)
