"""Numbers on a command line. Whole ones have a bound: larger sizes than any cluster has would exhaust memory or never
finish."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from mindspeed_autoparallel.files import shown

MOST = 2**20
"""Upper bound of counts: nodes, devices, layers, seconds."""
LARGEST = 2**31 - 1
"""Upper bound of samples, tokens, MiB, steps and seeds."""
MOST_MEMORY_MIB = 2**30
"""Upper bound of the memory of a device."""


@dataclass(frozen=True, kw_only=True)
class WholeNumber:
    """The argparse type of an integer flag; values stay between ``least`` and ``most``."""

    most: int = MOST
    least: int | None = None
    """``None``: ``-most``; the command itself then refuses values that are too small."""

    def __call__(self, text: str) -> int:
        """Return the integer in ``text``; raises argparse's error if it is not an integer, or out of bounds."""
        try:
            value: int | None = int(text)
        except ValueError:  # also more digits than Python converts
            value = None
        if (reason := self.refusal(value)) is not None:
            # For other exceptions argparse prints the function's name only.
            raise argparse.ArgumentTypeError(f"{reason}, got {shown(repr(text))}")
        assert value is not None
        return value

    def refusal(self, value: int | None) -> str | None:
        """Return the requirement that ``value`` violates, if it is out of bounds or not a number."""
        if value is None or (self.least is not None and value < self.least):
            return "must be a whole number" + ("" if self.least is None else f" of at least {self.least}")
        if value > self.most:
            return f"must be at most {self.most}"
        return f"must be at least {-self.most}" if value < -self.most else None


def number(text: str) -> float:
    """Return the number in ``text``; raises argparse's error if it is not a number."""
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a number, got {shown(repr(text))}") from error


@dataclass(frozen=True)
class Positive:
    """The argparse type of a flag whose number is finite, above 0 and at most ``most``."""

    most: float = math.inf

    def __call__(self, text: str) -> float:
        """Return the number in ``text``; raises argparse's error if it is none, or out of bounds."""
        if not 0 < (value := number(text)) <= self.most or value == math.inf:
            bound = "" if self.most == math.inf else f" and at most {self.most}"
            raise argparse.ArgumentTypeError(f"must be above 0{bound}, got {shown(repr(text))}")
        return value


POSITIVE = Positive()
MEMORY_MIB = Positive(MOST_MEMORY_MIB)
LARGE = WholeNumber(most=LARGEST)
COUNT, LARGE_COUNT = WholeNumber(least=1), WholeNumber(least=1, most=LARGEST)
