"""Bytes of a plan's pipeline ranks, by the factors of the microbatches in a rank's window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from numpy.lib.stride_tricks import sliding_window_view

from mindspeed_autoparallel.cost.memory import PlacedBlock
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.placement import ModulePlacement, boundary_bytes, placed_blocks
from mindspeed_autoparallel.planner.rank_memory import point_of
from mindspeed_autoparallel.planner.spread.draws import Array
from mindspeed_autoparallel.planner.spread.scaled import scaled_profile
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.schedule import Program, make_program
from mindspeed_autoparallel.spec import Plan

_MAGNIFIED = 64


@dataclass(frozen=True, kw_only=True)
class RankBytes:
    """Bytes of one pipeline rank: ``fixed`` + sum over its window of ``held`` x factor + ``passing`` x
    largest factor."""

    pipeline_rank: int
    fixed: int
    """Model states and runtime."""
    held: tuple[int, ...]
    """Activations of a reference microbatch on all chunks, by module."""
    passing: int
    """Bytes of the largest microbatch of a window beside its activations: transients, messages, the batch."""
    window: int
    limit: int

    def peak(self, factors: Array) -> Array:
        """Return an upper bound ``[...]`` in bytes of the peak over the windows of steps ``factors [..., microbatch,
        module]``."""
        held = factors @ numpy.array(self.held, dtype=numpy.float64)
        width = min(self.window, held.shape[-1])
        sums, largest = (sliding_window_view(one, width, axis=-1) for one in (held, factors.max(axis=-1)))
        peaks: Array = self.fixed + (sums.sum(axis=-1) + self.passing * largest.max(axis=-1)).max(axis=-1)
        return peaks


def rank_bytes(profile: Profile, plan: Plan) -> tuple[RankBytes, ...]:
    """Return the bytes of every pipeline rank of ``plan`` under ``profile``, as measured."""
    layout, placement = plan.layout, ModulePlacement.of_plan(plan)
    measurement = point_of(profile, layout)
    assert measurement is not None  # it was planned
    names = [module.name for module in profile.model.modules]
    # Large enough that activations, not the optimizer step, determine the peak: their contribution is linear.
    scaled = scaled_profile(
        profile, {layout.micro_batch_size: (dict.fromkeys(names, 1.0), dict.fromkeys(names, float(_MAGNIFIED)))}
    )
    found = evaluate(scaled, plan.cluster, layout, placement, plan.global_batch_size, with_timeline=False)
    sent = [*boundary_bytes(profile.model, measurement, placement), 0]
    blocks = placed_blocks(profile.model, measurement, placement)
    program = make_program(*layout.program_sizes(plan.num_microbatches))
    ranks = []
    for memory, window in zip(found.memory, windows(program), strict=True):
        rank, size = memory.pipeline_rank, layout.pipeline_size
        held = [0] * len(names)
        for block in (block for v in range(rank, len(blocks), size) for block in blocks[v]):
            held[names.index(block.module)] += block.recompute.saved_bytes
        states = sum(memory.terms.get(name, 0) for name in ("parameters", "gradients", "optimizer"))
        fixed = states + memory.terms.get("runtime_overhead", 0)
        rest = -(-(memory.peak_bytes - fixed) // _MAGNIFIED) if "transient" in memory.terms else 0
        # Outputs that were sent count as held: they are smaller for smaller samples.
        passing = rest + window * (sum(sent[rank::size]) - sum(held))
        passing = max(passing, _largest_transient(blocks, rank, size))
        ranks.append(
            RankBytes(
                pipeline_rank=rank,
                fixed=fixed,
                held=tuple(held),
                passing=passing,
                window=window,
                limit=memory.limit_bytes,
            )
        )
    return tuple(ranks)


def peaks_of_equal(profile: Profile, plan: Plan, factors: Array) -> tuple[int, ...]:
    """Return the peak of every pipeline rank, in bytes, if all microbatches have the byte factors ``factors
    [module]``."""
    names = [module.name for module in profile.model.modules]
    sizes = dict(zip(names, factors.tolist(), strict=True))
    scaled = scaled_profile(profile, {plan.layout.micro_batch_size: (dict.fromkeys(names, 1.0), sizes)})
    placement = ModulePlacement.of_plan(plan)
    found = evaluate(scaled, plan.cluster, plan.layout, placement, plan.global_batch_size, with_timeline=False)
    return tuple(memory.peak_bytes for memory in found.memory)


def _largest_transient(blocks: Sequence[Sequence[PlacedBlock]], rank: int, size: int) -> int:
    return max(
        max(block.recompute.forward_peak_bytes, block.recompute.backward_peak_bytes)
        for v in range(rank, len(blocks), size)
        for block in blocks[v]
    )


def windows(program: Program) -> tuple[int, ...]:
    """Return by stage the most microbatches, from the oldest to the newest one held, whose activations live at once."""
    widths = []
    for actions in program:
        held: dict[int, int] = {}
        width = 0
        for action in actions:
            held[action.microbatch] = held.get(action.microbatch, 0) + (1 if action.kind == "F" else -1)
            if not held[action.microbatch]:
                del held[action.microbatch]
            if held:
                width = max(width, max(held) - min(held) + 1)
        widths.append(width)
    return tuple(widths)
