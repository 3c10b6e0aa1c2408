"""Lower bounds of the step time for given sizes, computed from sums alone: cheap enough for every choice of sizes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from mindspeed_autoparallel.planner.sharded.lowering import Lowering, ns
from mindspeed_autoparallel.planner.sharded.passes import ROUNDING_NS, Ends, ends_ns, passes_ns
from mindspeed_autoparallel.schedule.sharded import Unit
from mindspeed_autoparallel.spec.sharded import (
    KEEP,
    MEGATRON_FSDP,
    OFFLOAD,
    RECOMPUTE,
    RECOMPUTE_KEEP_ATTENTION,
    RECOMPUTE_OFFLOAD,
)


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
    """Computation of both phases."""
    gathers: int
    gathers_again: int
    reduces: int
    all_reduces: int
    """Of the last micro batch."""
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
    gathers in backward, so transfers are those of ``coarsest``. The border between the phases lies between those of the
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
    rounding = ROUNDING_NS * len(finest.structure.modules) * finest.sizes.accumulation
    sums = sums._replace(after=max(0, sums.whole - latest))
    return max(0, _step_ns(coarsest, sums, ends_ns(finest, merged=True)) - rounding)


def shards_are_small(lowering: Lowering) -> bool:
    """Return whether no unit's full gradients take less memory than their shard."""
    return all(unit.gradient_bytes >= unit.sharded_gradient_bytes for unit, _ in lowering.kinds.values())


def _again_ns(lowering: Lowering, limit_bytes: int) -> int | None:
    return _forced_ns(lowering) if lowering.forced else _recomputation_ns(lowering, limit_bytes)


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
        gathers=sum(unit.gather_ns * count for unit, count in units),
        gathers_again=sum(unit.gather_ns * count for unit, count in gathered_again),
        reduces=sum(unit.reduce_ns * count for unit, count in reducing),
        all_reduces=sum(unit.all_reduce_ns * count for unit, count in reducing if unit.replicated),
        crossing=2 * (depth + 1) * max((unit.gather_ns for unit, _ in units), default=0),
    )


def _step_ns(lowering: Lowering, sums: Sums, ends: Ends) -> int:
    """Return the step time for ``sums``: each phase lasts at least as long as its gathers and its computation.

    The computation that memory does not force to repeat lasts at least as long as itself and its ``ends``.
    """
    forward, gathers = max(sums.before, sums.gathers), sums.gathers + sums.gathers_again
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
        # Other micro batches than one may gather, copy and reduce nothing.
        later = sums.computing
    # Reductions start in the first backward and may end in the next forward; those of the last step end in its own.
    begun = forward * (lowering.problem.host.variant == "torch" or not more)
    reductions = 1 if lowering.problem.host.defers_reduction else more + 1
    step = max(phases + later * more, forward + sums.reduces * reductions)
    step = max(step, later * more + begun + max(sums.reduces, sums.all_reduces))
    step = max(step, sums.computing * (more + 1) + ends.lead + ends.tail)
    return step + lowering.optimizer_ns


def _forced_ns(lowering: Lowering) -> int:
    """Return the recomputation time of layers that run a micro batch in parts: they have no choice of policy."""
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
        heads, tails = lowering.structure.before(last[0])
        before = sum(kinds[kind].forward * count for kind, count in heads.items())
        before += sum(kinds[kind].tail * count for kind, count in tails.items())
    total = sum(
        (kinds[kind].forward + kinds[kind].tail + (sum(kinds[kind][2:]) if needs_backward else 0)) * count
        for (kind, needs_backward), count in lowering.problem.module_counts.items()
    )
    # A chunked head runs forward, backward and the loss in forward; their times are rounded together.
    total -= ROUNDING_NS * chunked
    return before, max(0, total - before)


def _recomputation_ns(lowering: Lowering, limit_bytes: int) -> int | None:
    """Return the least recomputation time per micro batch that fits in memory, or ``None`` if nothing fits."""
    moments = tight_moments(lowering, limit_bytes)
    needed = [_least_recomputation_ns(lowering, left, running) for left, running in moments or ()]
    return None if moments is None or None in needed else max(one for one in needed if one is not None)


def tight_moments(lowering: Lowering, limit_bytes: int) -> list[tuple[int, tuple[int, ...]]] | None:
    """Return, for two moments of backward, the bytes left for waiting layers and the modules of the running layer.

    The moments are the backward of the head, while all layers wait, and that of the last layer, whose activations are
    all live while the others wait. ``None`` if nothing fits at a third moment: the backward of the first layer, when
    the gradients of all others are live.
    """
    units = [(unit, count) for unit, count in lowering.kinds.values() if not unit.empty]
    left = limit_bytes - lowering.static_bytes
    if lowering.sizes.accumulation > 1:
        left -= sum(_gradient_bytes(unit) * count for unit, count in units)
    layers = lowering.problem.ends
    in_head = left - _waiting_bytes(lowering, len(lowering.profile.modules)) - _head_bytes(lowering)
    if left < 0:
        return None
    if not layers:
        return [(in_head, ())]
    first, last = (_running_bytes(lowering, members) + _waiting_bytes(lowering, members[-1]) for members in layers)
    if lowering.sizes.accumulation == 1:
        inside = {lowering.structure.like[place] for place in lowering.structure.places(layers[0])}
        others = sum(
            _gradient_bytes(unit) * (count - (index in inside))
            for index, (unit, count) in lowering.kinds.items()
            if lowering.structure.modules[index].is_layer or lowering.structure.modules[index].holds_experts
        )
        if others + first > left:
            return None
    return [(in_head, ()), (left - last, layers[1])]


def _waiting_bytes(lowering: Lowering, module: int) -> int:
    """Return the bytes of parameters that forward leaves gathered in units up to ``module``; backward frees
    the others."""
    if all(unit.reshard_after_forward for unit, _ in lowering.kinds.values()):
        return 0
    structure, index_of, total = lowering.structure, lowering.problem.index_of, 0
    for like, holder in zip(structure.like, structure.modules, strict=True):
        unit = lowering.kinds[like][0]
        if not unit.empty and not unit.reshard_after_forward and index_of[holder.name] <= module:
            total += unit.gathered_bytes
    return total


def _gradient_bytes(unit: Unit) -> int:
    """Return the least size of a unit's reduced gradient in bytes."""
    if not unit.has_gradients:
        return 0
    return min(unit.sharded_gradient_bytes, unit.output_bytes) if unit.replicated else unit.sharded_gradient_bytes


def _running_bytes(lowering: Lowering, members: tuple[int, ...]) -> int:
    """Return the bytes that a layer holds in the backward of its last module: all that it saves under any policy."""
    modules = lowering.profile.modules
    costs = [lowering.costs[modules[index].kind] for index in members]
    saved = sum(one.input_bytes + one.kept_bytes for one in costs) + (
        costs[0].tail_kept_bytes if len(costs) == 1 else 0
    )
    places = lowering.structure.places((members[0], members[-1]))
    units = (lowering.kinds[lowering.structure.like[place]][0] for place in places)
    gathered = sum(unit.gathered_bytes for unit in units if unit.reshard_after_forward)
    return saved + gathered + costs[-1].backward_transient_bytes


def _head_bytes(lowering: Lowering) -> int:
    """Return the bytes that the head holds during its backward."""
    head = next((module for module in lowering.profile.modules if module.is_head), None)
    if head is None or lowering.decisions.loss_chunk:
        return 0
    costs = lowering.costs[head.kind]
    return costs.input_bytes + costs.kept_bytes + costs.backward_transient_bytes


def _least_recomputation_ns(lowering: Lowering, left_bytes: int, running: tuple[int, ...]) -> int | None:
    """Return the least recomputation time per micro batch with which waiting layers fit; ``None`` if they never do."""
    rows = []
    out = tuple(lowering.profile.modules[index].kind for index in running)
    for (kind, kinds), number in lowering.problem.layer_groups.items():
        rows.append((_policy_points(lowering, kind, kinds), number - (kinds == out)))
    return least_time_ns(rows, left_bytes)


def least_time_ns(rows: Iterable[tuple[list[tuple[int, int]], int]], left_bytes: int) -> int | None:
    """Return the least total time with which all choices fit ``left_bytes``, or ``None`` if none do.

    A row holds the choices (bytes, nanoseconds) of layers that are alike, the first one without time, and the number of
    these layers. It is a multiple-choice knapsack, relaxed to fractions.
    """
    held, steps = 0, []
    for points, count in rows:
        held += count * points[0][0]
        steps += [(time / size, size * count) for size, time in _hull(points)]
    needed = held - left_bytes
    total = 0.0
    for rate, size in sorted(steps):
        if needed <= 0:
            break
        taken = min(size, needed)
        total += taken * rate
        needed -= taken
    return int(total) if needed <= 0 else None


def _policy_points(lowering: Lowering, kind: str, kinds: tuple[str, ...]) -> list[tuple[int, int]]:
    """Return (bytes held, nanoseconds added) for each policy; the first one keeps everything."""
    costs = [lowering.costs[name] for name in kinds]
    own = lowering.costs[kind].input_bytes
    whole = sum(one.input_bytes + one.kept_bytes + one.tail_kept_bytes for one in costs)
    again = sum(sum(passes_ns(lowering)[name][:2]) for name in kinds)
    attention = sum(one.attention_bytes for one in costs)
    points = {
        KEEP: (whole, 0),
        RECOMPUTE: (own, again),
        RECOMPUTE_KEEP_ATTENTION: (own + attention, again - ns(sum(one.attention_us for one in costs)) - 1),
        OFFLOAD: (whole - own, 0),
        RECOMPUTE_OFFLOAD: (0, again),
    }
    return [points[KEEP], *(points[policy] for policy in lowering.problem.host.policies if policy != KEEP)]


def _hull(points: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the steps (bytes freed, nanoseconds added) of the lower hull of ``points``, cheapest first."""
    at = points[0]
    steps: list[tuple[int, int]] = []
    while True:
        less = [point for point in points if point[0] < at[0]]
        if not less:
            return steps
        best = min(less, key=lambda point: ((point[1] - at[1]) / (at[0] - point[0]), point[0]))
        steps.append((at[0] - best[0], max(0, best[1] - at[1])))
        at = best
