"""The profile file: a model's block costs and a device's costs, with their provenance."""

from __future__ import annotations

import datetime
from collections.abc import Container
from dataclasses import dataclass, field, replace

from mindspeed_autoparallel.errors import ProfileError
from mindspeed_autoparallel.profiles.blocks import BlockCost, MeasuredAt, Measurement
from mindspeed_autoparallel.profiles.device import DeviceCost
from mindspeed_autoparallel.profiles.interpolation import interpolate
from mindspeed_autoparallel.spec.codec import JsonFile
from mindspeed_autoparallel.spec.layout import SENDS
from mindspeed_autoparallel.spec.model import Model
from mindspeed_autoparallel.spec.plan_records import ProfileRecord

PROFILE_SCHEMA_VERSION = 2
PROFILE_FORMAT = "mindspeed-autoparallel/profile"
SOURCES = ("measured", "analytic", "imported")


def utc_now() -> str:
    """Return the time to the second for ``Provenance.created_utc``."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The origin of a profile."""

    source: str
    """``measured`` on the device, ``analytic`` (computed, synthetic) or ``imported`` (another tool's file)."""
    device: str
    created_utc: str
    """ISO 8601, UTC; written with ``+00:00``."""
    model_hash: str = ""
    """Of the measured model description; a plan for another one is refused."""
    software: dict[str, str] = field(default_factory=dict)
    train: dict[str, object] = field(default_factory=dict)
    """Training switches that computed costs assume, as in the section ``train`` of a request."""
    command: str = ""
    links: str = ""
    """Origin of the figures of the links, as text."""

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ProfileError(f"source must be one of {', '.join(SOURCES)}, got {self.source!r}.")

    def as_record(self, sha256: str, notes: tuple[str, ...]) -> ProfileRecord:
        """Return it as a plan keeps it, with the hash of the profile and notes on its values."""
        return ProfileRecord(
            sha256=sha256,
            source=self.source,
            device=self.device,
            created_utc=self.created_utc,
            model_hash=self.model_hash,
            notes=notes,
            train=self.train,
        )


@dataclass(frozen=True, kw_only=True)
class VariableData:
    """Microbatches that differ: times relative to the measured block times, drawn together for all modules."""

    modules: tuple[str, ...]
    samples: tuple[tuple[float, ...], ...]
    """One row per observed microbatch, one factor per module of ``modules``; other modules have factor 1."""

    def __post_init__(self) -> None:
        if not self.samples or any(len(row) != len(self.modules) for row in self.samples):
            raise ProfileError(f"variable data: every sample needs {len(self.modules)} factors, one per module.")
        if any(factor < 0 for row in self.samples for factor in row):
            raise ProfileError("variable data: relative times must not be negative.")


@dataclass(frozen=True, kw_only=True)
class Profile(JsonFile):
    """Everything the planner needs; see docs/profile.md for the JSON."""

    WHAT, AGAIN, ERROR = "profile of this tool", "Measure again with this release.", ProfileError

    model: Model
    device: DeviceCost
    measurements: tuple[Measurement, ...]
    provenance: Provenance
    variable_data: VariableData | None = None
    time_by_rows: dict[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    """By module, of several microbatches: rows of a sample, and the time of the layers over that of the block costs."""
    memory_semantics: str = "program_points"
    """``program_points``: peaks at every block of forward and backward; ``mindspeed``: that tool's single formula."""
    interleaved_sends: str = "freed"
    """How the host's interleaved schedule treats its messages (see ``schedule.SENDS``); the default is that of
    Megatron-LM since April 2026."""
    overlaps_tensor_parallel: bool = False
    """Whether layers overlap collectives of tensor parallelism with products; plans turn the switch on then."""
    format: str = PROFILE_FORMAT
    schema_version: int = PROFILE_SCHEMA_VERSION

    def __post_init__(self) -> None:
        if not self.measurements:
            raise ProfileError("the profile has no measurements.")
        if self.memory_semantics not in ("program_points", "mindspeed"):
            raise ProfileError(f"unknown memory_semantics {self.memory_semantics!r}.")
        if self.interleaved_sends not in SENDS:
            raise ProfileError(f"unknown interleaved_sends {self.interleaved_sends!r}; known: {', '.join(SENDS)}.")
        for name, measured in self.time_by_rows.items():
            if any(rows <= 0 or time < 0 for rows, time in measured):
                raise ProfileError(f"time_by_rows of {name}: rows must be above 0 and times at least 0.")
        names = {module.name for module in self.model.modules}
        points = [measurement.at for measurement in self.measurements]
        if len(set(points)) != len(points):
            raise ProfileError("the profile measures the same (TP, CP, EP, MBS, SP) twice.")
        for name in self.variable_data.modules if self.variable_data is not None else ():
            if name not in names:
                raise ProfileError(
                    f"variable data: {name!r} is not a module; the model has {', '.join(sorted(names))}."
                )
        for measurement in self.measurements:
            if set(measurement.modules) != names:
                different = sorted(names ^ set(measurement.modules))
                where = f"{measurement.at.label()}: module {different[0]!r}"
                raise ProfileError(f"{where} is in the model or among the measurements, not in both.")
            for module in self.model.modules:
                pattern = measurement.modules[module.name].pattern
                if pattern and len(pattern) != module.num_layers:
                    raise ProfileError(
                        f"{measurement.at.label()}: the pattern of {module.name} has {len(pattern)} layers, the model "
                        f"{module.num_layers}."
                    )

    def at(self, point: MeasuredAt) -> Measurement | None:
        """Return costs at ``point``: measured, or interpolated and marked so, or ``None`` if the profile lacks them."""
        for measurement in self.measurements:
            if measurement.at == point:
                return measurement
        if self.memory_semantics == "mindspeed":
            return None
        return interpolate(self.measurements, point)

    def overhead_bytes(self, measurement: Measurement) -> int:
        """Return every rank's bytes outside the blocks: the device's overhead and the host's buffers."""
        return self.device.runtime_overhead_bytes + measurement.workspace_bytes

    def with_recompute(self, kinds: Container[str]) -> Profile:
        """Return the profile with the recompute policies ``kinds`` only."""

        def kept(_: str, layer: BlockCost) -> BlockCost:
            return replace(layer, recompute={kind: cost for kind, cost in layer.recompute.items() if kind in kinds})

        measurements = tuple(
            replace(one, modules={name: module.with_layers(kept) for name, module in one.modules.items()})
            for one in self.measurements
        )
        return replace(self, measurements=measurements)
