"""The result of a check, and findings as text, JSON and ``export`` lines."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

OK, ADVICE, PROBLEM, UNKNOWN = "ok", "advice", "problem", "unknown"

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Finding:
    """``status``: ``ok``; ``advice`` (works, could be better); ``problem`` (will fail or be wrong); ``unknown``."""

    check: str
    status: str
    what: str
    """The observation, with its numbers."""
    why: str = ""
    """Why it matters; empty when all is well."""
    remedy: str = ""
    """The remedy, if it is not a variable to set."""
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


def as_text(findings: Sequence[Finding]) -> str:
    """Return one line per finding, with the reason, the remedy and variables to set below it, if there are any."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:8s} {finding.check:20s} {finding.what}")
        indent = " " * 30
        if finding.why:
            lines.append(f"{indent}why: {finding.why}")
        if finding.remedy:
            lines.append(f"{indent}do:  {finding.remedy}")
        lines += [f"{indent}set: {line}" for line in export_lines([finding])]
    every = [finding.status for finding in findings]
    counts = {status: every.count(status) for status in (PROBLEM, ADVICE, UNKNOWN, OK)}
    lines.append(", ".join(f"{count} {status}" for status, count in counts.items()))
    return "\n".join(lines)


def as_json(findings: Sequence[Finding]) -> dict[str, object]:
    """Return ``{"schema_version": 1, "findings": [...], "exports": {...}}``."""
    return {
        "schema_version": SCHEMA_VERSION,
        "findings": [{**asdict(finding), "exports": dict(finding.exports)} for finding in findings],
        "exports": _exports(findings),
    }


def export_lines(findings: Sequence[Finding]) -> list[str]:
    """Return ``export NAME=value`` for everything that should be set, quoted for the shell."""
    return [f"export {name}={shlex.quote(value)}" for name, value in _exports(findings).items()]


def _exports(findings: Sequence[Finding]) -> dict[str, str]:
    return {name: value for finding in findings for name, value in finding.exports.items()}
