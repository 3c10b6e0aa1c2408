"""The first rank of a launch, which prints for all ranks."""

from __future__ import annotations

import os
import sys


def is_first_rank() -> bool:
    """Return whether this process is rank 0 of its launch; ``True`` without a launcher."""
    return os.environ.get("RANK", "0") == "0"


def print_once(text: str, *, to_stderr: bool = False) -> None:
    """Print ``text`` on the first rank only, and flush."""
    if is_first_rank():
        print(text, file=sys.stderr if to_stderr else sys.stdout, flush=True)
