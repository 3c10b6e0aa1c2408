"""Device catalogue: datasheet figures with their source, measured efficiencies with their provenance.

One JSON file per device lies in ``catalogue_data``; a user's own file of the same form is read with ``read_device``.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_json

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
_OPTIONAL_SHARES = ("tensor_exposed", "overlapped_exposed", "expert_fraction", "replica_fraction", "fp8_fraction")
_OPTIONAL = ("corrections", "intervals", "measured_recompute", "measured_features", *_OPTIONAL_SHARES)
_OPTIONAL_FIGURES = ("host_link_gb_per_s", "workspace_mib", "peak_fp8_tflops")
_OPTIONAL_COUNTS = ("mesh_peers", "link_domain")


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """How much of the datasheet a software stack reaches. Fitted ones carry where the measurements came from."""

    gemm_fraction: float
    """Share of the peak that a large matrix product reaches."""
    gemm_inner_half: float
    """Inner dimension, in elements, at which a product runs at half of its speed (pipeline fill)."""
    attention_fraction: float
    """Share of the peak in attention."""
    memory_fraction: float
    """Share of the memory bandwidth that elementwise kernels reach."""
    softmax_passes: float
    """Passes over the attention matrix per forward, where attention is not fused."""
    head_passes: float
    """Passes over the logits per microbatch (loss, casts)."""
    launch_us: float
    """Host time of one forward pass of a layer; a backward pass costs twice that."""
    tensor_launch_us: float
    """Added host time of one forward pass of a layer per further tensor rank: all of them wait for the slowest."""
    unfused_softmax_us: float
    """Added host time of one forward pass where the fused softmax refuses the shape."""
    overlap_norm: float
    """Exponent that joins host and device time: large means max(host, device), 1 means their sum."""
    link_fraction: float
    """Share of the node's link bandwidth that a large collective reaches."""
    link_latency_us: float
    """Latency of one collective step inside a node, times log2 of the ranks."""
    inter_fraction: float
    """Share of the network bandwidth that a collective across nodes reaches."""
    inter_latency_us: float
    point_to_point_us: float
    """Fixed cost of one pipeline boundary per microbatch."""
    gradient_exposed: float
    """Share of the gradient communication that is not hidden."""
    optimizer_fraction: float
    """Share of the memory bandwidth that the optimizer reaches."""
    step_us: float
    """Fixed cost of one step (logging, clipping, data)."""
    relative_error: float
    """Mean absolute error of a step on held-out rows; a stated guess where ``provenance`` says estimated."""
    provenance: str
    tensor_exposed: float = 1.0
    """Share of the collectives of tensor parallelism that products do not hide."""
    overlapped_exposed: float = 0.3
    """The same in runs that overlap them with products; seven published on H100 say 0.28."""
    replica_fraction: float = 1.0
    """Share of a node's network that the reduction of gradients reaches where the node holds several replicas."""
    fp8_fraction: float = 0.75
    """What of their efficiency in two bytes products in eight bits keep of the eight-bit peak."""
    expert_fraction: float = 0.6
    """Share of a single product's speed that the grouped products of experts reach; decision 0078 has its runs."""
    corrections: tuple[tuple[float, ...], ...] = ()
    """Rows (log2 tokens, log2 hidden, log2 tensor size, log2 heads per rank, log correction) from measured layers; a
    correction of 0 says that the shape was measured and the formulas stand."""
    intervals: Mapping[str, float] = field(default_factory=dict)
    """Relative half widths that held nine of ten held-out steps, by what of them was never measured; the kinds are
    those of ``tuning.confidence``. Kinds that are not named get twice ``relative_error``."""
    measured_recompute: tuple[str, ...] = ()
    """Recompute of the measured steps; empty where nothing was measured."""
    measured_features: tuple[str, ...] = ()
    """What beyond dense pretraining the measured steps had; names as in ``predict.confidence.features``."""

    @functools.cached_property
    def _correction_table(self) -> Mapping[tuple[float, ...], float]:
        return {tuple(round(value, 6) for value in row[:-1]): row[-1] for row in self.corrections}

    def correction_of(self, key: tuple[float, ...]) -> float | None:
        """Return the log correction of a measured layer shape, or ``None`` where that shape was not measured."""
        return self._correction_table.get(tuple(round(value, 6) for value in key))


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator."""

    name: str
    aliases: tuple[str, ...]
    peak_tflops: float
    """Dense fp16/bf16."""
    memory_gib: float
    memory_bandwidth_gb_per_s: float
    num_cores: int
    """Units among which tiles are dealt out: streaming multiprocessors, AI cores, CPU cores."""
    link_gb_per_s: float
    """One direction, per device, inside a node."""
    network_gbit_per_s: float
    """Per node, where the request does not say."""
    source: str
    host_link_gb_per_s: float | None = None
    """One direction, between a device and its host; unknown where no datasheet says."""
    peak_fp8_tflops: float | None = None
    """Dense, in eight bits; unknown where the device has none."""
    link_domain: int = 0
    """Devices that share the links of a node beyond it, as a rack's; 0: a node's own only."""
    mesh_peers: int = 0
    """Peers of a node to each of which a device has a link of its own; 0: links meet in a switch."""
    workspace_mib: float = 0.0
    """What libraries of matrix products take from the allocator once and keep."""
    efficiencies: Mapping[str, Efficiency] = field(default_factory=dict)
    """Per software stack: ``megatron-2021`` (unfused attention, no sequence parallelism) or ``megatron-core``."""

    @property
    def workspace_bytes(self) -> int:
        """``workspace_mib`` in bytes."""
        return int(self.workspace_mib * 2**20)

    def efficiency(self, stack: str) -> Efficiency:
        """The figures for ``stack``, or those of the nearest stack the file has."""
        if stack in self.efficiencies:
            return self.efficiencies[stack]
        return next(iter(self.efficiencies.values()))


def _read_efficiency(values: Any, where: str) -> Efficiency:
    if not isinstance(values, dict):
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
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == _CORRECTION_COLUMNS for row in rows):
        raise ConfigError(f"{where}.corrections must be a list of rows of {_CORRECTION_COLUMNS} numbers.")
    data["corrections"] = tuple(
        tuple(_number(value, f"{where}.corrections", lowest=-math.inf) for value in row) for row in rows
    )
    intervals = values.get("intervals", {})
    if not isinstance(intervals, dict):
        raise ConfigError(f"{where}.intervals must be an object of half widths.")
    data["intervals"] = {kind: _number(width, f"{where}.intervals.{kind}") for kind, width in intervals.items()}
    for name in ("measured_recompute", "measured_features"):
        names = values.get(name, [])
        if not isinstance(names, list) or not all(isinstance(item, str) for item in names):
            raise ConfigError(f"{where}.{name} must be a list of names.")
        data[name] = tuple(names)
    for name in set(_OPTIONAL_SHARES) & set(values):
        data[name] = _number(values[name], f"{where}.{name}")
    return Efficiency(**data)


def _number(value: Any, where: str, lowest: float = 0.0) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not lowest <= value < math.inf:
        raise ConfigError(f"{where} is {value!r}, must be a number{'' if lowest else ' of at least 0'}.")
    return float(value)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{where} is {value!r}, must say where the figures come from.")
    return value


def read_device(path: Path) -> Device:
    """The device in ``path``; raises ``ConfigError`` naming the file and key."""
    data = read_json(path, "device file")
    if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(f"device file {path} must be an object with schema_version {SCHEMA_VERSION}.")
    missing = [item.name for item in fields(Device) if item.name not in {*data, *_OPTIONAL_FIGURES, *_OPTIONAL_COUNTS}]
    if missing:
        raise ConfigError(f"device file {path} lacks {', '.join(missing)}; copy a file of the catalogue and change it.")
    unknown = sorted(set(data) - {item.name for item in fields(Device)} - {"schema_version"})
    if unknown:
        raise ConfigError(f"device file {path} has unknown keys {', '.join(unknown)}.")
    aliases, stacks = data["aliases"], data["efficiencies"]
    if not isinstance(aliases, list) or not all(isinstance(alias, str) and alias for alias in aliases):
        raise ConfigError(f"device file {path}: aliases must be a list of names.")
    if not isinstance(stacks, dict) or not stacks:
        raise ConfigError(f"device file {path}: efficiencies is empty, give at least one software stack.")
    device = Device(
        name=_text(data["name"], f"device file {path}: name"),
        aliases=tuple(aliases),
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


def _positive(data: Mapping[str, Any], name: str, path: Path) -> float:
    value = _number(data[name], f"device file {path}: {name}")
    if value == 0:
        raise ConfigError(f"device file {path}: {name} is 0, must be above 0.")
    return value


@functools.lru_cache(maxsize=1)
def known_devices() -> tuple[Device, ...]:
    """All devices shipped with the package."""
    return tuple(read_device(path) for path in sorted(_FOLDER.glob("*.json")))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def find_device(name: str, extra: tuple[Device, ...] = ()) -> Device:
    """The device called ``name`` (``A100``, ``A100-SXM4-40GB``, ``910B``, ...); raises ``ConfigError`` listing all.

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
            if plain in wanted and len(plain) > 2 and (best is None or len(plain) > best[0]):
                best = (len(plain), device)
    if best is not None:
        return best[1]
    names = ", ".join(device.name for device in (*extra, *known_devices()))
    raise ConfigError(
        f"unknown device {name!r}. Known: {names}. Describe others with --device-file (--profile-device-file on a "
        "training script)."
    )
