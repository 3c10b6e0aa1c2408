"""How many drawn problems a test tries: some of them by default, all with ``LONG=1``, as ``tests/run.sh`` takes it."""

from __future__ import annotations

import os


def how_many(some: int, every: int) -> int:
    """Return ``every`` where ``LONG`` is set, else ``some``."""
    return every if os.environ.get("LONG") else some
