"""Best first by a proved bound, exact where it matters: simulated schedule and exact peak of every rank."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

from mindspeed_autoparallel.cost.memory import PlacedBlock, static_terms
from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.planner.evaluate import Evaluation, evaluate
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.profiles import BlockCost
from mindspeed_autoparallel.spec import Cluster, Layout
from mindspeed_autoparallel.tuning.traced.candidates import Configuration, Dimensions, Space
from mindspeed_autoparallel.units import format_bytes

_REACH = 1.25
"""A configuration this much slower than the last recommendation is not improved: moving layers gains less."""
_NUM_IMPROVED = 4
"""Configurations whose split is improved, per recommendation."""
_MAX_MOVES = 12
"""Layers moved between stages, one after the other, in search of a better split."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A configuration with its best placement."""

    configuration: Configuration
    placement: ModulePlacement
    recompute: str
    num_recomputed: int
    """Layers of each stage that are recomputed, where that is ``full``; 0 elsewhere."""
    evaluation: Evaluation

    @property
    def step_us(self) -> float:
        """Predicted step time."""
        return self.evaluation.step.total_us

    @property
    def peak_bytes(self) -> int:
        """Of the rank that needs most."""
        return max(rank.peak_bytes for rank in self.evaluation.memory)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The best configurations, fastest first, and how they were found."""

    top: tuple[Found, ...]
    num_legal: int
    num_solved: int
    num_bounded: int
    """Discarded because no placement of them can beat the last of ``top``."""
    num_without_room: int
    seconds: float


def search(space: Space, cluster: Cluster, batch: int, dimensions: Dimensions, count: int = 3) -> Outcome:
    """The ``count`` fastest configurations that fit and differ in more than switches.

    Raises ``InfeasiblePlan`` naming what needs least where nothing fits, ``ConfigError`` where nothing is legal.
    """
    started = time.monotonic()
    if not space.configurations:
        rules = "; ".join(f"{number}: {rule}" for rule, number in space.left_out.most_common(3))
        raise ConfigError(f"no layout of {cluster.num_devices} devices is legal ({rules or 'none was traced'}).")
    order = [(item.bound_us, index) for index, item in enumerate(space.configurations)]
    heapq.heapify(order)
    best: dict[tuple[object, ...], Found] = {}
    tightest: tuple[int, str] | None = None
    num_solved = num_without_room = num_bounded = 0
    while order:
        bound, index = heapq.heappop(order)
        leaders = sorted(found.step_us for found in best.values())
        if len(leaders) >= count and bound >= leaders[count - 1]:
            num_bounded += len(order) + 1
            break
        configuration = space.configurations[index]
        num_solved += 1
        cutoff = leaders[count - 1] if len(leaders) >= count else math.inf
        found, missing = solve(configuration, cluster, batch, dimensions, cutoff)
        if found is None and missing is None:
            num_solved, num_bounded = num_solved - 1, num_bounded + 1
            continue
        if found is None:
            num_without_room += 1
            if missing is not None and (tightest is None or missing[0] < tightest[0]):
                tightest = missing
            continue
        held = best.get(configuration.key)
        if held is None or _order(found) < _order(held):
            best[configuration.key] = found
    if not best:
        raise InfeasiblePlan(
            f"none of {len(space.configurations)} layouts fits. The one that needs least: "
            f"{tightest[1] if tightest else 'none could be evaluated'} Use more ranks, a smaller --micro-batch-size, "
            "or devices with more memory."
        )
    leading = sorted(best.values(), key=_order)
    reach = _REACH * leading[min(count, len(leading)) - 1].step_us
    near = [found for found in leading if found.step_us < reach][: count * _NUM_IMPROVED]
    if dimensions.uneven_stages:
        near = [improved(found, cluster, batch) for found in near]
    top = sorted(near, key=_order)[:count]
    return Outcome(
        top=tuple(top), num_legal=len(space.configurations), num_solved=num_solved, num_bounded=num_bounded,
        num_without_room=num_without_room, seconds=time.monotonic() - started,
    )  # fmt: skip


def _order(found: Found) -> tuple[float, int, str]:
    # Of equally fast ones the one with less memory, then any order as long as it is always the same.
    return found.step_us, found.peak_bytes, found.configuration.layout.label()


def solve(
    configuration: Configuration, cluster: Cluster, batch: int, dimensions: Dimensions, cutoff_us: float = math.inf
) -> tuple[Found | None, tuple[int, str] | None]:
    """The best placement that fits, or the peak of the smallest one and its description.

    Placements that cannot be faster than ``cutoff_us`` are passed over.
    """
    best: Found | None = None
    missing: tuple[int, str] | None = None
    for layers in _splits(configuration, dimensions):
        for kind, fewest in _kinds(configuration, dimensions):
            if _placement_bound_us(configuration, layers, kind, fewest) >= cutoff_us:
                break  # kinds come from the fastest to the most frugal
            if kind != "full" and not _may_fit(configuration, cluster, layers, kind, 0):
                continue
            if kind == "full":
                found = _fewest(configuration, cluster, batch, layers)
            else:
                found = _evaluated(configuration, cluster, batch, layers, kind, 0)
            if found.evaluation.fits:
                if best is None or _order(found) < _order(best):
                    best = found
                break
            if missing is None or found.peak_bytes < missing[0]:
                missing = (found.peak_bytes, _shortage(found))
    return best, missing


def _kinds(configuration: Configuration, dimensions: Dimensions) -> Iterator[tuple[str, int]]:
    """Recompute kinds that the layers have, with the fewest recomputed layers of a stage."""
    module = configuration.family.profile.model.modules[0].name
    known = configuration.candidate.measurement.modules[module].layer.recompute
    for kind in dimensions.recompute:
        if kind in known:
            yield kind, 1 if kind == "full" else 0


def _placement_bound_us(configuration: Configuration, layers: tuple[int, ...], kind: str, number: int) -> float:
    """No schedule is faster: a rank waits for its first microbatch, works, and its last one travels back.

    Rank r cannot start before stages 0 to r - 1 have passed a microbatch on, nor can it be the end before they have
    passed a gradient back; between lies its own work of all microbatches.
    """
    profile, layout = configuration.family.profile, configuration.layout
    module = profile.model.modules[0].name
    cost = configuration.candidate.measurement.modules[module]
    extra = cost.layer.recompute[kind].extra_backward_us
    times = []
    for stage, count in enumerate(layers):
        again = min(number, count) if kind == "full" else count
        time_us = count * (cost.layer.forward_us + cost.layer.backward_us) + again * extra
        for block, here in ((cost.pre, stage == 0), (cost.post, stage == len(layers) - 1)):
            if block is not None and here:
                time_us += block.forward_us + block.backward_us
        times.append(time_us)
    size, count = layout.pipeline_size, configuration.candidate.num_microbatches
    ahead, bound = 0.0, 0.0
    for rank in range(size):
        bound = max(bound, ahead + count * sum(times[rank::size]))
        ahead += times[rank]
    return bound


def _shortage(found: Found) -> str:
    worst = max(found.evaluation.memory, key=lambda rank: rank.peak_bytes - rank.limit_bytes)
    return (
        f"{found.configuration.layout.label()} with recompute {found.recompute} needs "
        f"{format_bytes(worst.peak_bytes)} of {format_bytes(worst.limit_bytes)} on pipeline rank "
        f"{worst.pipeline_rank} ({worst.peak_point})."
    )


def _splits(configuration: Configuration, dimensions: Dimensions) -> Iterator[tuple[int, ...]]:
    """Even where layers divide (or nearly), and the ends relieved of embedding and head where that may pay."""
    layers = configuration.family.profile.model.num_layers
    stages = configuration.layout.num_virtual_stages
    small, more = divmod(layers, stages)
    if not more:
        yield (small,) * stages
        return
    if not dimensions.uneven_stages:
        return
    # The longer stages in the middle: embedding and head weigh on the ends.
    order = sorted(range(stages), key=lambda stage: (min(stage, stages - 1 - stage) == 0, stage))
    longer = set(order[:more])
    yield tuple(small + (stage in longer) for stage in range(stages))


def _may_fit(
    configuration: Configuration, cluster: Cluster, layers: tuple[int, ...], kind: str, number: int
) -> bool:
    """False where the first rank is proved too full: model state, and what its warm-up holds of the smallest chunk.

    Megatron's first rank has ``min(P, M)`` microbatches in flight, interleaved ``min(M v, 2 (P - 1) + (v - 1) P + 1)``
    chunks of them.
    """
    profile, layout = configuration.family.profile, configuration.layout
    module = profile.model.modules[0].name
    cost = configuration.candidate.measurement.modules[module]
    size, count = layout.pipeline_size, configuration.candidate.num_microbatches
    held = range(0, len(layers), size)
    static = sum(layers[stage] for stage in held) * _static_bytes(cost.layer, layout)
    static += _static_bytes(cost.pre, layout) if cost.pre is not None else 0
    plain, chosen = (cost.layer.recompute[name].saved_bytes for name in ("none", kind))
    saved = []
    for stage in held:
        again = min(number, layers[stage]) if kind == "full" else layers[stage]
        saved.append(again * chosen + (layers[stage] - again) * plain - cost.layer.output_bytes)
    chunks = min(count, size)
    if layout.virtual_size > 1:
        chunks = min(count * layout.virtual_size, 2 * (size - 1) + (layout.virtual_size - 1) * size + 1)
    limit = cluster.memory_limit_bytes or profile.device.memory_capacity_bytes
    return static + chunks * max(0, min(saved)) + profile.device.runtime_overhead_bytes <= limit


def _static_bytes(block: BlockCost, layout: Layout) -> int:
    return sum(static_terms([PlacedBlock(name="", cost=block)], layout).values())


def _fewest(configuration: Configuration, cluster: Cluster, batch: int, layers: tuple[int, ...]) -> Found:
    low, high = 1, max(layers)
    best = _evaluated(configuration, cluster, batch, layers, "full", high)
    if not best.evaluation.fits:
        return best
    while low < high and not _may_fit(configuration, cluster, layers, "full", low):
        low += 1
    while low < high:
        middle = (low + high) // 2
        found = _evaluated(configuration, cluster, batch, layers, "full", middle)
        if found.evaluation.fits:
            best, high = found, middle
        else:
            low = middle + 1
    return best


def _evaluated(
    configuration: Configuration, cluster: Cluster, batch: int, layers: tuple[int, ...], kind: str, number: int
) -> Found:
    module = configuration.family.profile.model.modules[0].name
    recompute: dict[str, dict[str, tuple[int, ...]]] = {}
    if kind == "selective":
        recompute = {module: {kind: layers}}
    elif kind == "full":
        recompute = {module: {kind: tuple(min(number, held) for held in layers)}}
    placement = ModulePlacement(layers={module: layers}, recompute=recompute)
    evaluation = evaluate(
        configuration.family.profile, cluster, configuration.layout, placement, batch, with_timeline=False
    )
    return Found(
        configuration=configuration, placement=placement, recompute=kind, num_recomputed=number, evaluation=evaluation
    )


def improved(found: Found, cluster: Cluster, batch: int) -> Found:
    """Move layers, one at a time, from the slowest stage to one that makes the step shorter, as long as one does."""
    configuration = found.configuration
    module = configuration.family.profile.model.modules[0].name
    if configuration.layout.pipeline_size == 1:
        return found
    for _ in range(_MAX_MOVES):
        layers = found.placement.layers[module]
        stages = found.evaluation.stages
        slowest = max(range(len(stages)), key=lambda v: stages[v].forward_us + stages[v].backward_us)
        if layers[slowest] < 2:
            return found
        lightest = sorted(range(len(stages)), key=lambda v: stages[v].forward_us + stages[v].backward_us)[:3]
        moved = []
        for target in lightest:
            if target == slowest:
                continue
            changed = list(layers)
            changed[slowest] -= 1
            changed[target] += 1
            moved.append(
                _evaluated(configuration, cluster, batch, tuple(changed), found.recompute, found.num_recomputed)
            )
        better = [item for item in moved if item.evaluation.fits and item.step_us < found.step_us * (1 - 1e-9)]
        if not better:
            return found
        found = min(better, key=_order)
    return found
