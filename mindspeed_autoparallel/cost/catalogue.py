"""Device catalogue: datasheet figures with their source, measured efficiencies with their provenance.

One JSON file per device lies in ``catalogue_data``; a user's own file of the same form is read with ``read_device``.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeGuard

from mindspeed_autoparallel.cost.device import Device, Efficiency
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_json, write_json_atomic

SCHEMA_VERSION = 1
_FOLDER = Path(__file__).parent / "catalogue_data"
_CORRECTION_COLUMNS = 5
_SHARES = (
    "gemm_fraction",
    "attention_fraction",
    "memory_fraction",
    "link_fraction",
    "inter_fraction",
    "optimizer_fraction",
    "expert_fraction",
    "replica_fraction",
    "fp8_fraction",
)
"""Efficiencies that divide: neither 0 nor above the datasheet's whole."""
_OPTIONAL_SHARES = (
    *("tensor_exposed", "overlapped_exposed", "expert_fraction", "replica_fraction", "fp8_fraction"),
    "dispatch_fraction",
)
_OPTIONAL = ("corrections", "intervals", "measured_recompute", "measured_features", "uncertainty", *_OPTIONAL_SHARES)
_OPTIONAL_FIGURES = ("host_link_gb_per_s", "workspace_mib", "peak_fp8_tflops", "peak_fp4_tflops")
_OPTIONAL_COUNTS = ("mesh_peers", "link_domain")


def _read_efficiency(values: Any, where: str) -> Efficiency:
    if not _is_object(values):
        raise ConfigError(f"{where} must be an object of efficiencies.")
    known = {item.name for item in fields(Efficiency)}
    if set(values) - known:
        raise ConfigError(f"{where} has unknown keys {sorted(set(values) - known)}; known: {sorted(known)}.")
    missing = sorted(item.name for item in fields(Efficiency) if item.name not in {*values, *_OPTIONAL})
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}; copy a file of the catalogue and change it.")
    data: dict[str, Any] = {
        name: _text(value, f"{where}.{name}") if name == "provenance" else _number(value, f"{where}.{name}")
        for name, value in values.items()
        if name not in _OPTIONAL
    }
    rows = values.get("corrections", [])
    if not _is_list(rows) or not all(_is_list(row) and len(row) == _CORRECTION_COLUMNS for row in rows):
        raise ConfigError(f"{where}.corrections must be a list of rows of {_CORRECTION_COLUMNS} numbers.")
    data["corrections"] = tuple(
        tuple(_number(value, f"{where}.corrections", lowest=-math.inf) for value in row)
        for row in filter(_is_list, rows)
    )
    data["uncertainty"] = _half_widths(values, "uncertainty", where)
    data["intervals"] = _half_widths(values, "intervals", where)
    for name in ("measured_recompute", "measured_features"):
        names = values.get(name, [])
        if not _is_list(names) or not all(isinstance(item, str) for item in names):
            raise ConfigError(f"{where}.{name} must be a list of names.")
        data[name] = tuple(names)
    for name in set(_OPTIONAL_SHARES) & set(values):
        data[name] = _number(values[name], f"{where}.{name}")
    return Efficiency(**data)


_MOST = 1e18
"""No figure of a device is larger, and products of such do not overflow."""


def _half_widths(values: dict[str, object], key: str, where: str) -> dict[str, float]:
    widths = values.get(key, {})
    if not _is_object(widths):
        raise ConfigError(f"{where}.{key} must be an object of half widths.")
    return {kind: _number(width, f"{where}.{key}.{kind}") for kind, width in widths.items()}


def _is_object(value: object) -> TypeGuard[dict[str, object]]:
    return isinstance(value, dict)


def _is_list(value: object) -> TypeGuard[list[object]]:
    return isinstance(value, list)


def _number(value: Any, where: str, lowest: float = 0.0) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not lowest <= value <= _MOST:
        least = "" if lowest else " of at least 0"
        raise ConfigError(f"{where} is {value!r}, must be a number{least}, at most {_MOST:g}.")
    return float(value)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{where} is {value!r}, must say where the figures come from.")
    return value


def read_device(path: Path) -> Device:
    """Return the device in ``path``; raises ``ConfigError`` naming the file and key."""
    data = read_json(path, "device file")
    if not _is_object(data) or data.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(f"device file {path} must be an object with schema_version {SCHEMA_VERSION}.")
    missing = [item.name for item in fields(Device) if item.name not in {*data, *_OPTIONAL_FIGURES, *_OPTIONAL_COUNTS}]
    if missing:
        raise ConfigError(f"device file {path} lacks {', '.join(missing)}; copy a file of the catalogue and change it.")
    unknown = sorted(set(data) - {item.name for item in fields(Device)} - {"schema_version", "observations"})
    if unknown:
        raise ConfigError(f"device file {path} has unknown keys {', '.join(unknown)}.")
    aliases, stacks = data["aliases"], data["efficiencies"]
    if not _is_list(aliases) or not all(isinstance(alias, str) and alias for alias in aliases):
        raise ConfigError(f"device file {path}: aliases must be a list of names.")
    if not _is_object(stacks) or not stacks:
        raise ConfigError(f"device file {path}: efficiencies is empty, give at least one software stack.")
    device = Device(
        name=_text(data["name"], f"device file {path}: name"),
        aliases=tuple(map(str, aliases)),
        source=_text(data["source"], f"device file {path}: source"),
        num_cores=int(_positive(data, "num_cores", path)),
        peak_tflops=_positive(data, "peak_tflops", path),
        memory_gib=_positive(data, "memory_gib", path),
        memory_bandwidth_gb_per_s=_positive(data, "memory_bandwidth_gb_per_s", path),
        link_gb_per_s=_positive(data, "link_gb_per_s", path),
        network_gbit_per_s=_positive(data, "network_gbit_per_s", path),
        link_domain=int(_positive(data, "link_domain", path)) if "link_domain" in data else 0,
        mesh_peers=int(_positive(data, "mesh_peers", path)) if "mesh_peers" in data else 0,
        **{name: _positive(data, name, path) for name in _OPTIONAL_FIGURES if name in data},
        efficiencies={
            stack: _read_efficiency(values, f"device file {path}: efficiencies.{stack}")
            for stack, values in stacks.items()
        },
    )
    for stack, efficiency in device.efficiencies.items():
        for name in _SHARES:
            if not 0 < getattr(efficiency, name) <= 1:
                raise ConfigError(
                    f"device file {path}: efficiencies.{stack}.{name} is {getattr(efficiency, name)}, must be above 0 "
                    "and at most 1: a share of the datasheet's figure."
                )
        if efficiency.overlap_norm < 1:
            raise ConfigError(f"device file {path}: efficiencies.{stack}.overlap_norm must be at least 1.")
    return device


def _positive(data: Mapping[str, object], name: str, path: Path) -> float:
    value = _number(data[name], f"device file {path}: {name}")
    if value == 0:
        raise ConfigError(f"device file {path}: {name} is 0, must be above 0.")
    return value


def write_device(path: Path, device: Device, observations: Sequence[object] = ()) -> None:
    """Write ``device`` as a device file, atomically; ``observations``: what its figures were calibrated from."""
    document = {"schema_version": SCHEMA_VERSION, **asdict(device)}
    for name in (*_OPTIONAL_FIGURES, *_OPTIONAL_COUNTS):
        if not document[name]:
            del document[name]
    write_json_atomic(path, {**document, "observations": list(observations)})


@functools.lru_cache(maxsize=1)
def known_devices() -> tuple[Device, ...]:
    """Return all devices shipped with the package."""
    return tuple(read_device(path) for path in sorted(_FOLDER.glob("*.json")))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _is_part(alias: str, name: str) -> bool:
    """Return whether ``alias``, without punctuation, is a part of ``name`` whose number ends there: H100 is one of
    ``NVIDIA H100 80GB``, not of ``H1000``."""
    spelled = r"[\W_]*".join(map(re.escape, alias))
    return re.search(spelled + (r"(?!\d)" if alias[-1:].isdigit() else ""), name, re.IGNORECASE) is not None


def find_device(name: str, extra: tuple[Device, ...] = ()) -> Device:
    """Return the device called ``name`` (``A100``, ``A100-SXM4-40GB``, ``910B``, ...); raises ``ConfigError`` listing
    all.

    Case and punctuation do not matter; the longest alias contained in ``name`` wins, so that a vendor prefix or a form
    factor may surround it.
    """
    wanted = _plain(name)
    best: tuple[int, Device] | None = None
    for device in (*extra, *known_devices()):
        for alias in (device.name, *device.aliases):
            plain = _plain(alias)
            if plain == wanted:
                return device
            if len(plain) > 2 and plain in wanted and _is_part(plain, name) and (best is None or len(plain) > best[0]):
                best = (len(plain), device)
    if best is not None:
        return best[1]
    names = ", ".join(device.name for device in (*extra, *known_devices()))
    raise ConfigError(
        f"unknown device {name!r}. Known: {names}. Describe others with --device-file (--profile-device-file on a "
        "training script)."
    )
