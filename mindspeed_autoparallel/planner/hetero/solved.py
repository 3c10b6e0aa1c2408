"""One solved choice of all layouts: the encoders' and the backbone's."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mindspeed_autoparallel.planner.hetero.backbone import BackboneSolver, Reserved
from mindspeed_autoparallel.planner.layouts.layout_solver import LayoutResult
from mindspeed_autoparallel.spec import Layout
from mindspeed_autoparallel.spec.hetero import HeteroRecord


@dataclass(frozen=True, kw_only=True)
class Solved:
    """A choice of all layouts with the backbone's split."""

    solver: BackboneSolver
    record: HeteroRecord
    result: LayoutResult
    step_us: float
    lower_bound_us: float

    @property
    def reserved(self) -> Reserved:
        """Return the memory that the encoders hold while the pipeline runs."""
        return reserved_by(self.record)

    @property
    def layout(self) -> Layout:
        """Return the backbone's layout with the encoders' own."""
        return with_modules(self.solver.candidate.layout, self.record)


def reserved_by(record: HeteroRecord) -> Reserved:
    """Return the memory that the encoders of ``record`` hold while the pipeline runs."""
    return Reserved(everywhere_bytes=record.reserved_bytes, first_stage_bytes=record.first_stage_bytes)


def with_modules(layout: Layout, record: HeteroRecord) -> Layout:
    """Return the backbone's layout with the encoders' own."""
    return replace(layout, modules={phase.module: phase.layout for phase in record.encoders})
