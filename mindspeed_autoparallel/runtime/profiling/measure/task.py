"""The task of a measuring launch, and the files of its results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mindspeed_autoparallel.files import read_json
from mindspeed_autoparallel.profiles import LinkTier, MeasuredAt
from mindspeed_autoparallel.profiles.records import PointResult, record_of


@dataclass(frozen=True, kw_only=True)
class PlayedWorld:
    """A world whose first rank runs alone in one process, and the links that price its collectives."""

    num_ranks: int
    devices_per_node: int
    tiers: dict[str, LinkTier]
    """``intra`` and ``inter``."""
    links_from: str
    """Source of the links' figures, for display."""


@dataclass(frozen=True, kw_only=True)
class MeasureTask:
    """The layouts that one launch measures, one after the other."""

    points: tuple[MeasuredAt, ...]
    result_dir: str
    """Global rank 0 writes ``<label>.json`` here as soon as a point is finished."""
    num_layers: dict[str, int]
    """Layers of the reduced model per module."""
    model: dict[str, object] | None
    """The content of the reduced model.json, or None if flags describe the model."""
    num_warmup: int = 2
    num_repeats: int = 5
    with_steps: bool = False
    """Whether whole steps are timed as well."""
    with_lengths: bool = False
    """Whether layers are timed at several lengths as well."""
    kinds: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Kind of every layer of the whole model, by stack; empty if it is unknown which compute alike."""

    played: PlayedWorld | None = None
    """``None``: every rank is a process, and collectives are measured."""

    def to_json(self) -> dict[str, object]:
        """Return plain JSON with the kind on which ``runtime.megatron.features`` dispatches."""
        return {"kind": "measure", **asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> MeasureTask:
        """Read the result of ``to_json``."""
        return record_of(data, "measuring task", cls)

    def begun_file(self) -> Path:
        """Return the file that holds the current point of the launch."""
        return Path(self.result_dir) / "begun.json"

    def result_file(self, point: MeasuredAt) -> Path:
        """Return the file for the result of ``point``."""
        return Path(self.result_dir) / f"{point.label().replace(' ', '_')}.json"


def read_point(path: Path) -> PointResult | None:
    """Return the measurement in ``path``; ``None`` if it is missing, or the layout could not be measured."""
    if not path.exists():
        return None
    values = read_json(path, "measurement")
    return record_of(values, f"measurement {path}", PointResult) if values["status"] == "ok" else None
