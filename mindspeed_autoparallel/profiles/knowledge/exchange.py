"""Export and import, so that a team shares one knowledge base."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError, ProfileError
from mindspeed_autoparallel.files import read_json, shown, write_json_atomic
from mindspeed_autoparallel.profiles.knowledge.base import KnowledgeBase, Operator, Sample
from mindspeed_autoparallel.profiles.knowledge.signature import Signature

EXPORT_SCHEMA_VERSION = 2
_READ = (1, EXPORT_SCHEMA_VERSION)
"""Version 1 has signatures as text."""


def export_knowledge(base: KnowledgeBase, path: Path) -> int:
    """Write all samples to ``path`` as JSON; returns how many."""
    entries = [
        {
            "device": device,
            "software": software,
            "name": operator.name,
            "signature": operator.signature.json(),
            "sizes": list(operator.sizes),
            **dataclasses.asdict(sample),
        }
        for device, software, operator, sample in base.entries()
    ]
    write_json_atomic(path, {"schema_version": EXPORT_SCHEMA_VERSION, "samples": entries})
    return len(entries)


def import_knowledge(base: KnowledgeBase, path: Path) -> int:
    """Read an export into ``base``; nothing is stored when any entry is broken. Returns how many were read."""
    document = read_json(path, "knowledge export")
    if not isinstance(document, dict) or document.get("schema_version") not in _READ:
        version = document.get("schema_version") if isinstance(document, dict) else None
        raise ConfigError(
            f"knowledge export {path} has schema_version {version}, this release reads {', '.join(map(str, _READ))}."
        )
    grouped: dict[tuple[str, str], list[tuple[Operator, Sample]]] = defaultdict(list)
    samples = document.get("samples")
    if not isinstance(samples, list):
        raise ConfigError(f"knowledge export {path} has no list of samples.")
    for index, entry in enumerate(samples):
        try:
            grouped[str(entry["device"]), str(entry["software"])].append(_entry(entry))
        except (KeyError, TypeError, ValueError, OverflowError, ProfileError) as error:
            reason = shown(str(error) if isinstance(error, ProfileError) else repr(error), 200)
            raise ProfileError(f"knowledge export {path}: sample {index} is broken: {reason}.") from error
    for (device, software), entries in grouped.items():
        base.record(device, software, entries)
    return len(samples)


def _entry(entry: dict[str, Any]) -> tuple[Operator, Sample]:
    operator = Operator(
        name=str(entry["name"]),
        signature=Signature.of_json(entry["signature"]),
        sizes=tuple(int(size) for size in entry["sizes"]),
    )
    sample = Sample(
        median_us=float(entry["median_us"]),
        p10_us=float(entry["p10_us"]),
        p90_us=float(entry["p90_us"]),
        num_runs=int(entry["num_runs"]),
        source=str(entry["source"]),
        measured_at=float(entry["measured_at"]),
    )
    if not 0 < sample.p10_us <= sample.median_us <= sample.p90_us:
        raise ValueError(f"p10 {sample.p10_us}, median {sample.median_us}, p90 {sample.p90_us} us")
    return operator, sample
