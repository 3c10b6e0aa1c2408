"""Tiny models and data for MindSpeed-MM's scripts of Qwen2-VL and Qwen2.5-VL, whose own files name their users' disks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import tiny_qwen2vl
from shrink import flags_of

_LENGTH = 256
"""Tokens that a picture and its talk fit in."""


def with_tiny_model(words: Sequence[str], program: str, checkout: Path, folder: Path) -> tuple[str, ...]:
    """Return ``words`` with the files of a tiny model of the same family, which are written below ``folder`` once;
    unchanged where there is no such family."""
    flags = flags_of(tuple(words))
    family = re.search(r"qwen2(\.5)?vl", "".join(flags.get("--mm-model", [])).lower())
    if family is None or program != "pretrain_vlm.py":
        return tuple(words)
    own = folder / f"{checkout.name} {family[0]}"
    if not (own / "model.json").is_file():
        tiny_qwen2vl.write(own, checkout, family[0])
    flags |= {
        "--mm-model": [str(own / "model.json")],
        "--mm-data": [str(own / "data.json")],
        "--seq-length": [str(_LENGTH)],
        "--vocab-size": ["512"],
    }
    return tuple(word for name, values in flags.items() for word in (name, *values))
