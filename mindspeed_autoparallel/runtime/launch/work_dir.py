"""The folder in which a run keeps its measurements: private, its own, and named where it cannot be used."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import shown
from mindspeed_autoparallel.runtime.launch.work_dir_lock import LOCK_FILE

_LOGS = "logs"
"""What an agent makes, perhaps before node 0 has been there."""


def private_work_dir(name: str, flag: str) -> Path:
    """Make the folder that ``flag`` names, readable by this user only; ``ConfigError`` where others use it, too."""
    try:
        work_dir = Path(name).resolve()
        if work_dir.exists() and not work_dir.is_dir():
            raise ConfigError(f"{flag} {work_dir} is a file; name a folder.")
        if work_dir.is_dir() and work_dir.stat().st_uid != os.geteuid():
            raise ConfigError(f"{flag} {work_dir} belongs to another user. Name a folder of your own.")
        if work_dir.is_dir() and not _is_ours(work_dir):
            # Making it private would lock its other users out.
            raise ConfigError(
                f"{flag} {work_dir} is open to others and holds other things. Name a folder of its "
                "own, such as one inside it; it will be readable by you only."
            )
        work_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        work_dir.chmod(0o700)
        # Nameless: another node may do the same in the same folder at this moment.
        with tempfile.TemporaryFile(dir=work_dir) as probe:
            probe.write(b"probe")
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"cannot write to the work dir {shown(name, 200)}: {getattr(error, 'strerror', None) or error}. Free space "
            f"there, or choose another with {flag}."
        ) from error
    return work_dir


def _is_ours(folder: Path) -> bool:
    private = not folder.stat().st_mode & 0o077
    return private or (folder / LOCK_FILE).exists() or {path.name for path in folder.iterdir()} <= {_LOGS}
