"""Device catalogue: datasheet figures with their source, measured efficiencies with their provenance.

One JSON file per device lies in ``catalogue_data``; a user's own file of the same form is read with ``read_device``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_json

SCHEMA_VERSION = 1
_FOLDER = Path(__file__).parent / "catalogue_data"


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """How much of the datasheet a software stack reaches. Fitted ones carry where the measurements came from."""

    gemm_fraction: float
    """Share of the peak that a large matrix product reaches."""
    gemm_inner_half: float
    """Inner dimension, in elements, at which a product runs at half of its speed (pipeline fill)."""
    small_tile_fraction: float
    """Speed of the small tile relative to the large one; decides wave quantisation."""
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
    """Added host time of one forward pass of a layer with tensor parallelism."""
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
    corrections: tuple[tuple[float, ...], ...] = ()
    """Rows (log2 tokens, log2 hidden, log2 tensor size, log2 heads per rank, log correction) from measured layers."""


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
    efficiencies: Mapping[str, Efficiency] = field(default_factory=dict)
    """Per software stack: ``megatron-2021`` (unfused attention, no sequence parallelism) or ``megatron-core``."""

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
    data = dict(values)
    data["corrections"] = tuple(tuple(float(x) for x in row) for row in data.get("corrections", ()))
    try:
        return Efficiency(**data)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}.") from error


def read_device(path: Path) -> Device:
    """The device in ``path``; raises ``ConfigError`` naming the file and key."""
    data = read_json(path, "device file")
    if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(f"device file {path} must be an object with schema_version {SCHEMA_VERSION}.")
    try:
        device = Device(
            name=str(data["name"]),
            aliases=tuple(data["aliases"]),
            peak_tflops=float(data["peak_tflops"]),
            memory_gib=float(data["memory_gib"]),
            memory_bandwidth_gb_per_s=float(data["memory_bandwidth_gb_per_s"]),
            num_cores=int(data["num_cores"]),
            link_gb_per_s=float(data["link_gb_per_s"]),
            network_gbit_per_s=float(data["network_gbit_per_s"]),
            source=str(data["source"]),
            efficiencies={
                stack: _read_efficiency(values, f"{path}: efficiencies.{stack}")
                for stack, values in data["efficiencies"].items()
            },
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"device file {path}: missing or wrong key {error}.") from error
    positive = ("peak_tflops", "memory_gib", "memory_bandwidth_gb_per_s", "num_cores", "link_gb_per_s")
    for name in positive:
        if getattr(device, name) <= 0:
            raise ConfigError(f"device file {path}: {name} is {getattr(device, name)}, must be above 0.")
    if not device.efficiencies:
        raise ConfigError(f"device file {path}: efficiencies is empty, give at least one software stack.")
    return device


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
    raise ConfigError(f"unknown device {name!r}. Known: {names}. Describe others with --device-file.")
