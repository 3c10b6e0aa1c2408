"""The recomputation that memory forces on layers, from sums of what is live at a few moments of backward."""

from __future__ import annotations

from collections.abc import Iterable

from mindspeed_autoparallel.planner.sharded.lowering import Lowering, ns
from mindspeed_autoparallel.planner.sharded.passes import passes_ns
from mindspeed_autoparallel.schedule.sharded import Unit
from mindspeed_autoparallel.spec.sharded import KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_KEEP_ATTENTION, RECOMPUTE_OFFLOAD


def recomputation_ns(lowering: Lowering, limit_bytes: int) -> int | None:
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
    return [points[KEEP], *(points[policy] for policy in policies_of(lowering, kind) if policy != KEEP)]


def policies_of(lowering: Lowering, kind: str) -> tuple[str, ...]:
    """Return the host's policies that a layer of ``kind`` may have: offload needs a link, kept attention some bytes."""
    without = set[str]()
    if not lowering.profile.host_link_bytes_per_s:
        without |= {OFFLOAD, RECOMPUTE_OFFLOAD}
    if not lowering.costs[kind].attention_bytes:
        without.add(RECOMPUTE_KEEP_ATTENTION)
    return tuple(policy for policy in lowering.problem.host.policies if policy not in without)


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
