"""The task of a tracing process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from mindspeed_autoparallel.runtime.profiling.measure.task import MeasureTask


@dataclass(frozen=True, kw_only=True)
class TraceTask:
    """The layouts that a tracing process may claim, and the variants to trace each in."""

    measure: MeasureTask
    variants: Mapping[str, Mapping[str, object]]
    """Arguments of Megatron that a variant sets, by its name."""
    wanted: tuple[tuple[str, ...], ...]
    """Names of the variants that differ, by point; the script's own comes first."""
    world_size: int
    queue: str
    """Folder of the ``WorkQueue`` from which ``process`` and others take points."""
    process: int = 0
    headroom_bytes: int = 0
    """Memory within which a variant without recompute makes those with recompute unnecessary."""

    def to_json(self) -> dict[str, object]:
        """Return plain JSON with the kind on which ``runtime.megatron.features`` dispatches."""
        return {"kind": "trace", **asdict(self)}
