"""Lower bounds of the step time for given sizes, from sums of times only: cheap enough for every choice of sizes."""

from __future__ import annotations

from typing import NamedTuple

from mindspeed_autoparallel.planner.sharded.lowering import Lowering
from mindspeed_autoparallel.planner.sharded.memory import recomputation_ns
from mindspeed_autoparallel.planner.sharded.passes import ROUNDING_NS, Ends, ends_ns, forward_before_ns, passes_ns
from mindspeed_autoparallel.spec.sharded import MEGATRON_FSDP


class Sums(NamedTuple):
    """Times of a micro batch's two phases, in nanoseconds.

    The copy-out of the last unit's parameters in forward is the border: no gather of backward starts before it, and no
    gather of forward starts after it.
    """

    computing: int
    """Computation of both phases, without copies and recomputation."""
    before: int
    """Computation before the border."""
    after: int
    """Computation after the border, recomputation included."""
    whole: int
    """Computation of both phases: ``before`` plus ``after``."""
    later: int
    """Computation between the border and backward."""
    gathers: int
    gathers_again: int
    reduces: int
    """Reductions, and packing between them: computing waits for one reduction before it packs the next buffer."""
    all_reduces: int
    """All-reduces over replicas in the last micro batch."""
    crossing: int
    """Time by which prefetched units may move from one phase to the other."""


def step_bound_ns(lowering: Lowering, limit_bytes: int) -> int | None:
    """Return a lower bound of the step time under any policies, or ``None`` if no policies fit ``limit_bytes``."""
    again = _again_ns(lowering, limit_bytes)
    return None if again is None else _step_ns(lowering, _sums(lowering, again), ends_ns(lowering))


def units_bound_ns(finest: Lowering, coarsest: Lowering, limit_bytes: int) -> int | None:
    """Return a lower bound of the step time for every choice of units between ``coarsest`` and ``finest``.

    ``None`` if nothing fits ``limit_bytes``. Computation, copied bytes and sent bytes do not depend on the units. More
    units hold less at a time, so recomputation is that of ``finest``. More units also have more latencies and more
    gathers in backward, so transfers are those of ``coarsest``. The border between the phases is between those of the
    two.
    """
    again = _again_ns(coarsest if coarsest.parts > 1 else finest, limit_bytes)
    if again is None:
        # A unit holds its full gradients until they are reduced; if a shard takes more, a choice in between may fit.
        if finest.static_bytes > limit_bytes or shards_are_small(finest):
            return None
        again = 0
    sums = _sums(coarsest, again)
    latest = sums.whole if coarsest.parts > 1 else _sums(finest, again).before
    later, reduces = _later_ns(finest), _reduces_ns(coarsest, finest)
    rounding = ROUNDING_NS * len(finest.structure.modules) * finest.sizes.accumulation
    sums = sums._replace(after=max(0, sums.whole - latest), later=later, reduces=reduces)
    return max(0, _step_ns(coarsest, sums, ends_ns(finest, merged=True)) - rounding)


def shards_are_small(lowering: Lowering) -> bool:
    """Return whether no unit's full gradients take less memory than their shard."""
    return all(unit.gradient_bytes >= unit.sharded_gradient_bytes for unit, _ in lowering.kinds.values())


def _again_ns(lowering: Lowering, limit_bytes: int) -> int | None:
    return _forced_ns(lowering) if lowering.forced else recomputation_ns(lowering, limit_bytes)


def _sums(lowering: Lowering, again_ns: int) -> Sums:
    units = [(unit, count) for unit, count in lowering.kinds.values() if not unit.empty]
    reducing = [(unit, count) for unit, count in units if unit.has_gradients]
    # Backward frees every unit. Forward frees the resharded units, except the root in torch 2.7.
    gathered_again = [(unit, count) for unit, count in reducing if unit.reshard_after_forward and unit.name != "root"]
    before, after = _computing_ns(lowering)
    computing = before + after
    before += sum(unit.copy_out_ns * count for unit, count in units)
    after += again_ns + sum(unit.pack_ns * count for unit, count in reducing)
    after += sum(unit.copy_out_ns * count for unit, count in gathered_again)
    depth = max((max(one.forward_prefetch, one.backward_prefetch) for one in lowering.decisions.groups), default=0)
    return Sums(
        computing=computing,
        before=before,
        after=after,
        whole=before + after,
        later=_later_ns(lowering),
        gathers=sum(unit.gather_ns * count for unit, count in units),
        gathers_again=sum(unit.gather_ns * count for unit, count in gathered_again),
        reduces=_reduces_ns(lowering, lowering),
        all_reduces=sum(unit.all_reduce_ns * count for unit, count in reducing if unit.replicated),
        crossing=2 * (depth + 1) * max((unit.gather_ns for unit, _ in units), default=0),
    )


def _step_ns(lowering: Lowering, sums: Sums, ends: Ends) -> int:
    """Return the step time for ``sums``: each phase lasts at least as long as its gathers and its computation.

    It is also at least the computation without recomputation plus ``ends``.
    """
    forward, gathers = max(sums.before, sums.gathers) + sums.later, sums.gathers + sums.gathers_again
    phases = max(sums.whole, sums.before + sums.gathers_again, sums.gathers + sums.after, gathers)
    later = phases
    if lowering.problem.host.variant != "torch":
        # torch 2.7 may record a layer as the root of forward: prefetched units then cross the border of the phases.
        later = max(phases - sums.crossing, sums.whole, gathers)
    more = lowering.sizes.accumulation - 1
    if lowering.problem.host.variant == MEGATRON_FSDP:
        # Every queue runs all of its own work; parameters outside layers are gathered once per step.
        gathers += 2 * sums.gathers_again * more
        return max(sums.whole * (more + 1), gathers, sums.reduces * (more + 1)) + lowering.optimizer_ns
    if lowering.problem.host.stays_gathered or lowering.problem.host.defers_reduction:
        # All micro batches but one may run without gathers, copies and reductions.
        later = sums.computing
    # Reductions start in the first backward and may end in the next forward; those of the last step end in its own.
    begun = forward * (lowering.problem.host.variant == "torch" or not more)
    reductions = 1 if lowering.problem.host.defers_reduction else more + 1
    step = max(phases + later * more, forward + sums.reduces * reductions)
    step = max(step, later * more + begun + max(sums.reduces, sums.all_reduces))
    step = max(step, sums.computing * (more + 1) + ends.lead + ends.tail)
    return step + lowering.optimizer_ns


def _reduces_ns(lowering: Lowering, finest: Lowering) -> int:
    """Return the time of reductions and of packing between them; ``finest`` may have more units at a module.

    Units with hooks at one module do not wait for one another, and split experts pack first. Only in MindSpeed-MM does
    a unit wait for all units of another module.
    """
    variant = lowering.problem.host.variant
    reducing = [row for row in lowering.kinds.values() if row[0].has_gradients and not row[0].empty]
    total = sum(unit.reduce_ns * count for unit, count in reducing)
    if not lowering.decisions.hooks and variant != MEGATRON_FSDP:
        return total + sum(unit.pack_ns * count for unit, count in reducing)
    of, modules = lowering.structure.like, lowering.structure.modules
    for name, places in lowering.hooked.items() if variant == "mindspeed-mm" else ():
        first, alone = lowering.kinds[of[places[-1]]][0], len(finest.hooked.get(name, ())) == 1
        split = len(places) > 1 and modules[places[-1]].holds_experts and lowering.sizes.expert_size > 1
        total += first.pack_ns * ((alone or split) and first.has_gradients and not first.empty)
    return total


def _later_ns(lowering: Lowering) -> int:
    """Return the computation of forward after the copy-out of the last unit."""
    if lowering.parts > 1:
        return 0
    kinds = passes_ns(lowering)
    counts = lowering.problem.module_counts.items()
    forward = sum((kinds[kind].forward + kinds[kind].tail) * count for (kind, _), count in counts)
    late = lowering.late_head_ns - 2 * ROUNDING_NS if lowering.decisions.loss_chunk and lowering.profile.head else 0
    return max(0, forward + late - _computing_ns(lowering)[0])


def _forced_ns(lowering: Lowering) -> int:
    """Return the recomputation time of layers that run a micro batch in parts, which have a fixed policy."""
    again = {kind: sum(passes[:2]) for kind, passes in passes_ns(lowering).items()}
    modules = zip(lowering.profile.modules, lowering.problem.layer_names, strict=True)
    return sum(again[module.kind] for module, layer in modules if layer in lowering.forced)


def _computing_ns(lowering: Lowering) -> tuple[int, int]:
    """Return a micro batch's computation before and after the copy-out of the last unit in forward."""
    kinds = passes_ns(lowering)
    chunked = bool(lowering.decisions.loss_chunk)
    alone = [lowering.kinds[like][0] for like in lowering.structure.like]
    torch = lowering.problem.host.variant == "torch"
    gathering = [index for index, unit in enumerate(alone) if not unit.empty and (unit.shard_ranks > 1 or not torch)]
    before = 0
    if gathering:
        last = next(places for places in lowering.hooked.values() if gathering[-1] in places)
        before = forward_before_ns(lowering, last[0])
    total = sum(
        (kinds[kind].forward + kinds[kind].tail + (sum(kinds[kind][2:]) if needs_backward else 0)) * count
        for (kind, needs_backward), count in lowering.problem.module_counts.items()
    )
    # A chunked head runs forward, backward and the loss in forward; their times are rounded together.
    total -= ROUNDING_NS * chunked
    return before, max(0, total - before)
