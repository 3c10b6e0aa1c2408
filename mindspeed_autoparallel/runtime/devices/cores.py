"""Whether processes that stand for devices share this machine's cores: then their times say nothing of a device."""

from __future__ import annotations

import os


def shared_cores(num_processes: int, num_cores: int | None = None) -> str:
    """Return ``4 processes share 2 cores`` where there are more processes than cores, else an empty string.

    ``num_cores``: of the machine that the processes ran on; by default this one's.
    """
    cores = num_cores or os.cpu_count() or 1
    return f"{num_processes} processes share {cores} cores" if num_processes > cores else ""
