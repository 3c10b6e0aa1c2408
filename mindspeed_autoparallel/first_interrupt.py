"""Ctrl-C at the command while it is still loading: one line and exit code 130, from the package's first line on.

A program that imports the package keeps its own handlers.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

_COMMAND = "mindspeed-autoparallel"


def end_at_once(number: int, frame: object) -> NoReturn:
    """End this process: nothing is open or started yet. An exception would print a traceback from inside an import."""
    os.write(2, b"interrupted\n")
    os._exit(128 + signal.SIGINT)


def handle_first_interrupt(package: str) -> None:
    """Install ``end_at_once`` if this process is the command, started by its script or as ``python -m package``."""
    if _is_command(package) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)


def leave_interrupts_to_the_command() -> None:
    """Give Ctrl-C back to Python once the command handles its ``KeyboardInterrupt``."""
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_command(package: str) -> bool:
    words: list[str] = getattr(sys, "argv", [])
    if words[:1] == ["-m"]:
        # While Python looks for the module of -m, argv[0] is "-m" and the module's name comes right before its
        # arguments.
        return sys.orig_argv[-len(words)] in (package, f"-m{package}")
    return words[:1] != [] and os.path.basename(words[0]) in (_COMMAND, f"{_COMMAND}.exe")  # noqa: PTH119  # pathlib takes 10 ms
