"""The tail of ranks after the pipeline, as rows of a split problem: linear in layers, and below every plan's tail."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_autoparallel.cost.buckets import in_buckets, most_buckets
from mindspeed_autoparallel.cost.memory import PlacedBlock
from mindspeed_autoparallel.cost.step import post_pipeline_time
from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.split import PostPipelineTime, Segment
from mindspeed_autoparallel.planner.stage_times import NS_PER_US
from mindspeed_autoparallel.profiles import BlockCost, DeviceCost
from mindspeed_autoparallel.spec import Layout


@dataclass(frozen=True, kw_only=True)
class _Row:
    """The shares of a stage's tail that a row counts."""

    reduce: float
    gather: float
    first_only: bool = False
    hides: bool = False
    """Less a backward in which everything is recomputed."""


def tail_rows(
    candidate: Candidate, segments: list[Segment], blocks: list[BlockCost], unit: int
) -> tuple[PostPipelineTime, ...]:
    """Return rows below a rank's tail, each the tail of a block times their number, rounded down to whole units."""
    layout, cluster, device = candidate.layout, candidate.cluster, candidate.profile.device
    placed = [[[PlacedBlock(name="", cost=block)] * number for block in blocks] for number in (1, 2)]
    ones, twos = ([post_pipeline_time(held, layout, cluster, device) for held in some] for some in placed)
    rows = []
    for row in _rows(layout, device, segments, blocks):
        each, fixed = [], []
        for one, two, segment in zip(ones, twos, segments, strict=True):
            whole = one.optimizer_us + bool(row.reduce) * one.reduce_us + bool(row.gather) * one.gather_us
            reduce_us, gather_us = two.reduce_us - one.reduce_us, two.gather_us - one.gather_us
            optimizer_us = two.optimizer_us - one.optimizer_us
            more = optimizer_us + bool(row.reduce) * reduce_us + bool(row.gather) * gather_us
            counted = optimizer_us + row.reduce * reduce_us + row.gather * gather_us
            hidden = segment.backward + max(kind.extra_backward for kind in segment.kinds) if row.hides else 0
            if whole or hidden:
                # A stage of frozen layers alone has no collective, and may still run backward.
                fixed.append(whole - more)
            each.append(int((counted * NS_PER_US - hidden) // unit) * unit)
        rows.append(
            PostPipelineTime(
                by_segment=tuple(each),
                fixed=max(0, int(min(fixed, default=0.0) * NS_PER_US // unit) * unit),
                first_only=row.first_only,
            )
        )
    return tuple(rows)


def _rows(layout: Layout, device: DeviceCost, segments: list[Segment], blocks: list[BlockCost]) -> list[_Row]:
    """Return what surely shows.

    In buckets a stage behind the first hides its collectives while the stages before it still run, all but the
    optimizer. Nothing runs after the first stage's last backward. Where its reduction overlaps that backward, the last
    bucket shows, at least one of as many as the whole model has (with virtual stages: of a chunk unknown, so nothing
    counts); and of the whole reduction what a backward with everything recomputed does not hide.
    """
    if not in_buckets(layout, device):
        return [_Row(reduce=1.0, gather=1.0)]
    rows = [_Row(reduce=0.0, gather=0.0)]
    if not layout.overlap_gradient_reduce:
        return [*rows, _Row(reduce=1.0, gather=1.0, first_only=True)]
    counts = [segment.num_layers for segment in segments]
    share = 1.0 / most_buckets(list(zip(blocks, counts, strict=True)), layout) if layout.virtual_size == 1 else 0.0
    gather = share if layout.overlap_parameter_gather else 1.0
    return [
        *rows,
        _Row(reduce=share, gather=gather, first_only=True),
        _Row(reduce=1.0, gather=gather, first_only=True, hides=True),
    ]
