"""The first rank of a launch, which prints for all."""

from __future__ import annotations

import os
import sys


def is_first_rank() -> bool:
    """Return whether this process is rank 0 of its launch; so is a process that no launcher has started."""
    return os.environ.get("RANK", "0") == "0"


def print_once(text: str, *, to_stderr: bool = False) -> None:
    """Print ``text`` on the first rank alone, at once."""
    if is_first_rank():
        print(text, file=sys.stderr if to_stderr else sys.stdout, flush=True)
