"""The errors this package raises for users: what is wrong, the numbers, and how to fix it.

Every message is one a user can act on. ``ConfigError`` and its siblings end a command with exit code 2,
``InfeasiblePlan`` with exit code 3; neither prints a traceback.
"""

import contextlib
import sys
from collections.abc import Iterator


class AutoParallelError(Exception):
    """Base of every error raised on purpose by this package."""

    exit_code = 2


class ConfigError(AutoParallelError, ValueError):
    """User input (flags, files, sizes) that cannot be right; names the file and key, the value, the allowed range."""


class ProfileError(AutoParallelError):
    """A profile or measurement that is missing, foreign, broken or of another version."""


class PlanError(AutoParallelError):
    """A plan file that is broken or belongs to another model, host or version."""


class InfeasiblePlan(AutoParallelError):
    """No plan fits; the message names the tightest constraint and the smallest relaxation that helps."""

    exit_code = 3


class PatchError(AutoParallelError):
    """A Megatron function that a requested feature needs is missing, changed, or from an unsupported release."""


class LaunchError(AutoParallelError):
    """Processes that were started did not come up, failed or hung; carries their last lines."""


def flag_of(destination: str) -> str:
    """Return the flag of an argument's destination, as messages name it: ``--seq-length`` of ``seq_length``."""
    return "--" + destination.replace("_", "-")


def destination_of(flag: str) -> str:
    """Return the destination of a flag: the inverse of ``flag_of``."""
    return flag.lstrip("-").replace("-", "_")


def first_line(error: BaseException) -> str:
    """Return the first line of the message of ``error``, or the name of its class: ``MemoryError`` has no message."""
    text = str(error).strip()
    return text.splitlines()[0].strip() if text else type(error).__name__


@contextlib.contextmanager
def told_in_a_line() -> Iterator[None]:
    """End the process with the error's message alone, without a traceback: users read it in a training log."""
    try:
        yield
    except AutoParallelError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
