"""Device catalogue: datasheet figures with their source, measured efficiencies with their provenance.

One JSON file per device lies in ``catalogue_data``; a user's own file of the same form is read with ``read_device``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mindspeed_autoparallel.cost.analytic.fields import is_section
from mindspeed_autoparallel.cost.device import Device, Efficiency
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_json, write_json_atomic
from mindspeed_autoparallel.spec.codec import from_json

SCHEMA_VERSION = 1
_FOLDER = Path(__file__).parent / "catalogue_data"
_CORRECTION_COLUMNS = 5
_SHARES = (
    *("gemm_fraction", "attention_fraction", "memory_fraction", "link_fraction", "inter_fraction"),
    *("optimizer_fraction", "expert_fraction", "replica_fraction", "fp8_fraction"),
)
"""Efficiencies that are shares of a datasheet's figure: above 0, at most 1."""
_OPTIONAL = (
    *("counted_gib", "host_link_gb_per_s", "workspace_mib", "peak_fp8_tflops", "peak_fp4_tflops"),
    *("mesh_peers", "link_domain"),
)
"""Figures of a device that its file omits if they are unknown."""
_MOST = 1e18
"""Upper limit on a device's figures, so that their products do not overflow."""


def read_device(path: Path) -> Device:
    """Return the device in ``path``; raises ``ConfigError`` naming the file and key."""
    data, where = read_json(path, "device file"), f"device file {path}"
    if not is_section(data) or data.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(f"{where} must be an object with schema_version {SCHEMA_VERSION}.")
    figures = {key: value for key, value in data.items() if key not in ("schema_version", "observations")}
    device = from_json(Device, figures, where)
    _check_figures(device, where)
    for name in vars(device):
        if name in figures and getattr(device, name) == 0:
            raise ConfigError(f"{where}.{name} is 0, must be above 0.")
    if not device.efficiencies:
        raise ConfigError(f"{where}.efficiencies is empty, give at least one software stack.")
    for stack, efficiency in device.efficiencies.items():
        _check_efficiency(efficiency, f"{where}.efficiencies.{stack}")
    return device


def _check_efficiency(efficiency: Efficiency, where: str) -> None:
    _check_figures(efficiency, where)
    for name in _SHARES:
        if not 0 < getattr(efficiency, name) <= 1:
            raise ConfigError(
                f"{where}.{name} is {getattr(efficiency, name)}, must be above 0 and at most 1: a share of the "
                "datasheet's figure."
            )
    if efficiency.overlap_norm < 1:
        raise ConfigError(f"{where}.overlap_norm must be at least 1.")
    if any(len(row) != _CORRECTION_COLUMNS for row in efficiency.corrections):
        raise ConfigError(f"{where}.corrections must be a list of rows of {_CORRECTION_COLUMNS} numbers.")


def _check_figures(record: Device | Efficiency, where: str) -> None:
    for name, value in vars(record).items():
        for number in value.values() if name in ("intervals", "uncertainty") else (value,):
            if isinstance(number, (int, float)) and not 0 <= number <= _MOST:
                raise ConfigError(f"{where}.{name} is {number!r}, must be a number of at least 0, at most {_MOST:g}.")
        if name in ("name", "source", "provenance") and not value.strip():
            raise ConfigError(f"{where}.{name} is {value!r}, must name the source of the figures.")


def write_device(path: Path, device: Device, observations: Sequence[object] = ()) -> None:
    """Write ``device`` as a device file, atomically; ``observations``: the measurements behind its figures."""
    document = {"schema_version": SCHEMA_VERSION, **asdict(device)}
    for name in _OPTIONAL:
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
