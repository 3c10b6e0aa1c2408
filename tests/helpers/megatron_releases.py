"""Where the Megatron releases are that the tests run against."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

RELEASES = {"0.12": "0.12.1", "0.16": "0.16.1", "installed": ""}
"""Name in test ids -> release; ``installed`` is the one of this environment."""


def megatron_path(name: str) -> list[Path] | None:
    """Folders to put first on PYTHONPATH for release ``name``; None when it is not on this machine.

    ``MEGATRON_CORE_0_12`` and ``MEGATRON_CORE_0_16`` name the folders; else ``megatron-core/<release>`` inside the
    virtual environment, where tests/run.sh installs them.
    """
    release = RELEASES[name]
    if not release:
        return []
    given = os.environ.get(f"MEGATRON_CORE_{name.replace('.', '_')}")
    folder = Path(given) if given else Path(sys.prefix) / "megatron-core" / release
    return [folder] if (folder / "megatron" / "core" / "package_info.py").is_file() else None


def marks_of_trainings() -> list[pytest.MarkDecorator]:
    """Return the marks of tests whose programs train with Megatron.

    It is looked for in files: importing it here would come before this package's own import.
    """
    found = any((Path(folder) / "megatron" / "training").is_dir() for folder in sys.path)
    missing = pytest.mark.skipif(not found, reason="the training needs megatron.training")
    return [pytest.mark.distributed, pytest.mark.torch, pytest.mark.megatron, missing]
