"""Former spellings of flags, which this release still accepts with a note, and the current ones."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

_GIB_PER_S_IN_GBIT_PER_S = 2**30 * 8 / 1e9
_PAGE = {"--html": ("--page", 1.0)}
_SEQUENCE = {"--sequence": ("--seq-length", 1.0)}
_STAGES_LINK = {"--p2p-gbps": ("--p2p-gbit-per-s", _GIB_PER_S_IN_GBIT_PER_S)}
_NETWORK = {"--inter-node-gbps": ("--network-gbit-per-s", 1.0)}
OLD: Mapping[str, Mapping[str, tuple[str, float]]] = {
    "calibrate": {"--devices-per-node": ("--nproc-per-node", 1.0)},
    "operators": {**_PAGE, **_SEQUENCE},
    "plan": {**_STAGES_LINK, **_NETWORK},
    "predict": {"--requests": ("--request", 1.0)},
    "report": _PAGE,
    "split": _STAGES_LINK,
    "trace": {
        **_SEQUENCE,
        "--tensor": ("--tp-size", 1.0),
        "--context": ("--cp-size", 1.0),
        "--expert": ("--ep-size", 1.0),
        "--expert-tensor": ("--etp-size", 1.0),
        "--pipeline": ("--pp-size", 1.0),
        "--virtual": ("--vpp-size", 1.0),
    },
}
"""By command: the former spelling, the current one, and the factor for its value."""


def with_new_spellings(words: Sequence[str]) -> list[str]:
    """Return a command line with current spellings; words after ``--`` belong to another program. Prints a note for
    each old spelling to standard error."""
    command = next((word for word in words if not word.startswith("-")), "")
    old: Mapping[str, tuple[str, float]] = OLD.get(command, {})
    result: list[str] = []
    pending = 1.0
    for index, word in enumerate(words):
        if word == "--":
            return [*result, *words[index:]]
        flag, equals, value = word.partition("=")
        if flag in old and word.startswith("--"):
            new, factor = old[flag]
            unit = f", times {factor:.6g}: its unit changed" if factor != 1.0 else ""
            print(f"note: {flag} is now {new}{unit}; the next release removes it", file=sys.stderr, flush=True)
            result.append(f"{new}={_times(value, factor)}" if equals else new)
            pending = 1.0 if equals else factor
            continue
        result.append(_times(word, pending))
        pending = 1.0
    return result


def _times(value: str, factor: float) -> str:
    if factor == 1.0:
        return value
    try:
        return repr(float(value) * factor)
    except ValueError:
        return value
