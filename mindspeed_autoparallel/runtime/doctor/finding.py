"""The result of a check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

OK, ADVICE, PROBLEM, UNKNOWN = "ok", "advice", "problem", "unknown"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """``status``: ``ok``; ``advice`` (works, could be better); ``problem`` (will fail or be wrong); ``unknown``."""

    check: str
    status: str
    what: str
    """What was seen, with the numbers."""
    why: str = ""
    """Why it matters; empty when all is well."""
    remedy: str = ""
    """What to do, where it is not a variable to set."""
    exports: Mapping[str, str] = field(default_factory=dict)
    """Environment variables to set."""


def fine(check: str, what: str) -> Finding:
    return Finding(check=check, status=OK, what=what)


def unknown(check: str, what: str) -> Finding:
    return Finding(check=check, status=UNKNOWN, what=what)


def advice(check: str, what: str, why: str, remedy: str = "", **exports: str) -> Finding:
    return Finding(check=check, status=ADVICE, what=what, why=why, remedy=remedy, exports=exports)


def problem(check: str, what: str, why: str, remedy: str = "", **exports: str) -> Finding:
    return Finding(check=check, status=PROBLEM, what=what, why=why, remedy=remedy, exports=exports)
