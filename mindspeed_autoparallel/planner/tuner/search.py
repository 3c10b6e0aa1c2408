"""Best first by a proved bound, exact where it matters: simulated schedule and exact peak of every rank."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mindspeed_autoparallel.cost.memory import PlacedBlock, static_terms
from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.planner.best_first import Open, Proof, Search, best_first
from mindspeed_autoparallel.planner.evaluate import NS_PER_US, Evaluation, beside_blocks_ns, evaluate, with_layout
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.planner.tuner.balanced import balanced_splits
from mindspeed_autoparallel.planner.tuner.candidates import Configuration, Dimensions, Space, overlaps
from mindspeed_autoparallel.profiles import BlockCost, ModuleCost
from mindspeed_autoparallel.spec import Cluster, Layout
from mindspeed_autoparallel.spec.recompute import RecomputePolicy, policy_of
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
    """A kind of ``spec.recompute``."""
    num_recomputed: int
    """Layers of each stage that are recomputed, where whole layers are; 0 elsewhere."""
    evaluation: Evaluation

    @property
    def step_us(self) -> float:
        """Return predicted step time."""
        return self.evaluation.step.total_us

    @property
    def peak_bytes(self) -> int:
        """Return the peak of the rank that needs most."""
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
    proof: Proof
    """Of the first of ``top``: exact without pipelines, else by the proved bound."""


class _ConfigurationSearch(Search[Configuration]):
    """Solve configurations as far as they may be among the ``count`` fastest below ``limit_us``."""

    def __init__(self, cluster: Cluster, batch: int, dimensions: Dimensions, count: int, limit_us: float) -> None:
        self.best: dict[tuple[object, ...], Found] = {}
        """The best switches of each configuration."""
        self.lower_bound_us = math.inf
        self.num_solved = self.num_bounded = self.num_without_room = 0
        self.tightest: tuple[int, str] | None = None
        self._cluster, self._batch, self._dimensions = cluster, batch, dimensions
        self._count, self._limit_us = count, limit_us

    @property
    def best_us(self) -> float:
        """Return the step time of the fastest configuration known."""
        return min((found.step_us for found in self.best.values()), default=math.inf)

    def cutoff_us(self) -> float:
        """Return the step time of the last configuration asked for, or the limit."""
        leaders = sorted(found.step_us for found in self.best.values())
        return min(self._limit_us, leaders[self._count - 1] if len(leaders) >= self._count else math.inf)

    def discard(self, item: Open[Configuration]) -> None:
        """Count a configuration that cannot be among the fastest."""
        self.num_bounded += 1
        self.lower_bound_us = min(self.lower_bound_us, item.bound_us)

    def expand(self, group: Sequence[Open[Configuration]], cutoff_us: float) -> list[Open[Configuration]]:
        """Find the best placement of every configuration of the group."""
        for item in group:
            found, missing = solve(item.item, self._cluster, self._batch, self._dimensions, cutoff_us)
            if self._dimensions.uneven_stages and item.item.layout.pipeline_size > 1:
                # Not all of its splits were tried.
                self.lower_bound_us = min(self.lower_bound_us, item.bound_us)
            elif found is not None:
                self.lower_bound_us = min(self.lower_bound_us, found.step_us)
            self._take(item.item, found, missing)
        return []

    def _take(self, configuration: Configuration, found: Found | None, missing: tuple[int, str] | None) -> None:
        if found is None and missing is None:
            self.num_bounded += 1
            return
        self.num_solved += 1
        if found is None:
            self.num_without_room += 1
            if missing is not None and (self.tightest is None or missing[0] < self.tightest[0]):
                self.tightest = missing
            return
        held = self.best.get(configuration.key)
        if held is None or _order(found) < _order(held):
            self.best[configuration.key] = found


def search(
    space: Space, cluster: Cluster, batch: int, dimensions: Dimensions, count: int = 3, limit_us: float = math.inf
) -> Outcome:
    """Return the ``count`` fastest configurations that fit and differ in more than switches, below ``limit_us``.

    Raises ``InfeasiblePlan`` naming what needs least where nothing fits, ``ConfigError`` where nothing is legal.
    """
    started = time.monotonic()
    if not space.configurations:
        rules = "; ".join(f"{number}: {rule}" for rule, number in space.left_out.most_common(3))
        raise ConfigError(f"no layout of {cluster.num_devices} devices is legal ({rules or 'none was traced'}).")
    running = _ConfigurationSearch(cluster, batch, dimensions, count, limit_us)
    items = [Open(False, item.bound_us, order, item) for order, item in enumerate(space.configurations)]
    best_first(running, items)
    if not running.best and limit_us == math.inf:
        tightest = running.tightest[1] if running.tightest else "none could be evaluated."
        raise InfeasiblePlan(
            f"none of {len(space.configurations)} layouts fits. The one that needs least: {tightest} "
            "Use more ranks, a smaller --micro-batch-size, or devices with more memory."
        )
    top = _fastest(list(running.best.values()), cluster, batch, dimensions, count)
    step_us = top[0].step_us if top else math.inf
    return Outcome(
        top=top,
        num_legal=len(space.configurations),
        num_solved=running.num_solved,
        num_bounded=running.num_bounded,
        num_without_room=running.num_without_room,
        proof=Proof(
            step_us=step_us,
            lower_bound_us=min(running.lower_bound_us, step_us),
            seconds=time.monotonic() - started,
        ),
    )


def _fastest(found: list[Found], cluster: Cluster, batch: int, dimensions: Dimensions, count: int) -> tuple[Found, ...]:
    """Return the ``count`` fastest after improving the splits of those that may be among them."""
    if not found:
        return ()
    leading = sorted(found, key=_order)
    reach = _REACH * leading[min(count, len(leading)) - 1].step_us
    near = [item for item in leading if item.step_us < reach][: count * _NUM_IMPROVED]
    if dimensions.uneven_stages:
        near = [improved(item, cluster, batch, dimensions) for item in near]
    return tuple(sorted(near, key=_order)[:count])


def _order(found: Found) -> tuple[float, int, int, str]:
    # Of equally fast ones the one with less memory, then fewer switches, then any as long as it is always the same.
    layout = found.configuration.layout
    switches = layout.overlap_gradient_reduce + layout.overlap_parameter_gather + layout.distributed_optimizer
    return found.step_us, found.peak_bytes, switches, layout.label()


def solve(
    configuration: Configuration, cluster: Cluster, batch: int, dimensions: Dimensions, cutoff_us: float = math.inf
) -> tuple[Found | None, tuple[int, str] | None]:
    """Return the best placement that fits, or the peak of the smallest one and its description.

    Placements that cannot be faster than ``cutoff_us`` are passed over.
    """
    best: Found | None = None
    missing: tuple[int, str] | None = None
    for layers in _splits(configuration, dimensions):
        for attempt in (_lightest, _whole_layers):
            limit_us = min(cutoff_us, best.step_us if best is not None else math.inf)
            for found in attempt(configuration, cluster, batch, layers, dimensions, limit_us):
                if not found.evaluation.fits:
                    if missing is None or found.peak_bytes < missing[0]:
                        missing = (found.peak_bytes, _shortage(found))
                elif best is None or _order(found) < _order(best):
                    best = found
    return best, missing


def _lightest(
    configuration: Configuration,
    cluster: Cluster,
    batch: int,
    layers: tuple[int, ...],
    dimensions: Dimensions,
    limit_us: float,
) -> Iterator[Found]:
    """Yield no recompute, or that of some modules in all layers: the fastest that fits.

    A schedule is monotone in its stage times, and what longer backwards hide of the gradient reduction they add to the
    pipeline, so what adds no less to every kind of layers than another that fits is not faster. Where layers are all
    alike that leaves one; where a kind adds less to some layers and more to others, both are tried.
    """
    fitting: list[str] = []
    for kind in _kinds(configuration, dimensions):
        if any(_adds_no_less(configuration, kind, other) for other in fitting):
            continue
        if _placement_bound_us(configuration, layers, kind, 0) >= limit_us:
            continue
        if _may_fit(configuration, cluster, layers, kind, 0):
            found = _evaluated(configuration, cluster, batch, layers, kind, 0, dimensions)
            yield found
            if found.evaluation.fits:
                fitting.append(kind)
                limit_us = min(limit_us, found.step_us)


def _adds_no_less(configuration: Configuration, kind: str, other: str) -> bool:
    module = configuration.family.profile.model.modules[0].name
    cost = configuration.candidate.measurement.modules[module]
    return all(
        layer.recompute[kind].extra_backward_us >= layer.recompute[other].extra_backward_us
        for layer in cost.distinct_layers
    )


def _kinds(configuration: Configuration, dimensions: Dimensions) -> list[str]:
    recompute = _layer(configuration).recompute
    known = [
        kind for kind in recompute if policy_of(kind).kind in dimensions.recompute and policy_of(kind).kind != "full"
    ]
    return sorted(known, key=lambda kind: (recompute[kind].extra_backward_us, recompute[kind].saved_bytes, kind))


def _whole_layers(
    configuration: Configuration,
    cluster: Cluster,
    batch: int,
    layers: tuple[int, ...],
    dimensions: Dimensions,
    limit_us: float,
) -> Iterator[Found]:
    """Yield as few whole layers as fit, the first of every stage; groups of them where not even all fit singly."""
    low, high = 1, max(layers)
    if not _has_full(configuration, dimensions) or _placement_bound_us(configuration, layers, "full", 1) >= limit_us:
        return
    found = _evaluated(configuration, cluster, batch, layers, "full", high, dimensions)
    if not found.evaluation.fits:
        yield found
        if dimensions.layer_groups and _placement_bound_us(configuration, layers, "full", high) < limit_us:
            yield from _grouped(configuration, cluster, batch, layers, dimensions)
        return
    while low < high and not _may_fit(configuration, cluster, layers, "full", low):
        low += 1
    while low < high:
        middle = (low + high) // 2
        tried = _evaluated(configuration, cluster, batch, layers, "full", middle, dimensions)
        if tried.evaluation.fits:
            found, high = tried, middle
        else:
            low = middle + 1
    yield found


def _grouped(
    configuration: Configuration, cluster: Cluster, batch: int, layers: tuple[int, ...], dimensions: Dimensions
) -> Iterator[Found]:
    """Yield groups of layers, where keeping the input of every single layer is too much: as slow, and less is kept."""
    longest = max(layers)
    # Of sizes that make as many groups on every stage, the smallest computes fewest layers again at once.
    sizes = {-(-count // groups) for count in layers for groups in range(1, count)}
    for size in sorted(sizes - {1}):
        kind = str(RecomputePolicy.full(size))
        if _may_fit(configuration, cluster, layers, kind, longest):
            found = _evaluated(configuration, cluster, batch, layers, kind, longest, dimensions)
            yield found
            if found.evaluation.fits:
                return


def _has_full(configuration: Configuration, dimensions: Dimensions) -> bool:
    return "full" in dimensions.recompute and "full" in _layer(configuration).recompute


def _layer(configuration: Configuration) -> BlockCost:
    module = configuration.family.profile.model.modules[0].name
    return configuration.candidate.measurement.modules[module].layer


def _placement_bound_us(configuration: Configuration, layers: tuple[int, ...], kind: str, number: int) -> float:
    """Bound every schedule: a rank waits for its first microbatch, works, and its last one travels back.

    Rank r cannot start before stages 0 to r - 1 have passed a microbatch on, nor can it be the end before they have
    passed a gradient back; between lies its own work of all microbatches.
    """
    profile, layout = configuration.family.profile, configuration.layout
    module = profile.model.modules[0].name
    cost = configuration.candidate.measurement.modules[module]
    whole = policy_of(kind).layers_per_group > 0
    profiled = "full" if whole else kind
    times = []
    start = 0
    for stage, (count, beside_ns) in enumerate(zip(layers, beside_blocks_ns(profile.device, layout), strict=True)):
        again = min(number, count) if whole else count
        time_us = sum(held * (layer.forward_us + layer.backward_us) for layer, held in cost.runs(start, count))
        time_us += sum(held * layer.recompute[profiled].extra_backward_us for layer, held in cost.runs(start, again))
        start += count
        for block, here in ((cost.pre, stage == 0), (cost.post, stage == len(layers) - 1)):
            if block is not None and here:
                time_us += block.forward_us + block.backward_us
        times.append(time_us + 2 * beside_ns / NS_PER_US)
    size, count = layout.pipeline_size, configuration.candidate.num_microbatches
    ahead, bound = 0.0, 0.0
    for rank in range(size):
        bound = max(bound, ahead + count * sum(times[rank::size]))
        ahead += times[rank]
    return bound


def _shortage(found: Found) -> str:
    worst = max(found.evaluation.memory, key=lambda rank: rank.peak_bytes - rank.limit_bytes)
    return (
        f"{found.configuration.layout.label()} with recompute {policy_of(found.recompute).words} needs "
        f"{format_bytes(worst.peak_bytes)} of {format_bytes(worst.limit_bytes)} on pipeline rank "
        f"{worst.pipeline_rank} ({worst.peak_point})."
    )


def _splits(configuration: Configuration, dimensions: Dimensions) -> list[tuple[int, ...]]:
    """Return evenly many layers, and where they are of several kinds what is even in time or memory."""
    balanced = balanced_splits(configuration) if dimensions.uneven_stages else []
    return list(dict.fromkeys([*_even(configuration, dimensions), *balanced]))


def _even(configuration: Configuration, dimensions: Dimensions) -> Iterator[tuple[int, ...]]:
    """Yield the even split, or nearly even ones with the ends relieved of embedding and head where that may pay."""
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


def _may_fit(configuration: Configuration, cluster: Cluster, layers: tuple[int, ...], kind: str, number: int) -> bool:
    """Return false where the first rank is proved too full: model state, and what its warm-up holds of the smallest
    chunk.

    Megatron's first rank has ``min(P, M)`` microbatches in flight, interleaved ``min(M v, 2 (P - 1) + (v - 1) P + 1)``
    chunks of them.
    """
    profile, layout = configuration.family.profile, configuration.layout
    module = profile.model.modules[0].name
    cost = configuration.candidate.measurement.modules[module]
    size, count = layout.pipeline_size, configuration.candidate.num_microbatches
    held = [(sum(layers[:stage]), layers[stage]) for stage in range(0, len(layers), size)]
    static = sum(equal * _static_bytes(layer, layout) for stage in held for layer, equal in cost.runs(*stage))
    static += _static_bytes(cost.pre, layout) if cost.pre is not None else 0
    saved = [_saved_bytes(cost, kind, number, *stage) - cost.layer.output_bytes for stage in held]
    chunks = min(count, size)
    if layout.virtual_size > 1:
        chunks = min(count * layout.virtual_size, 2 * (size - 1) + (layout.virtual_size - 1) * size + 1)
    limit = cluster.memory_limit_bytes or profile.device.memory_capacity_bytes
    return static + chunks * max(0, min(saved)) + profile.device.runtime_overhead_bytes <= limit


def _saved_bytes(cost: ModuleCost, kind: str, number: int, start: int, count: int) -> int:
    """Return the bytes of a stage with ``count`` layers, the first ``number`` of which are recomputed where that is
    ``full``."""
    size = policy_of(kind).layers_per_group
    if not size:
        return sum(equal * layer.recompute[kind].saved_bytes for layer, equal in cost.runs(start, count))
    again = min(number, count)
    plain = cost.runs(start + again, count - again)
    inputs = [layer.recompute["full"].saved_bytes for layer, _ in cost.runs(start, again)]
    groups = -(-again // size) * min(inputs, default=0)
    return groups + sum(equal * layer.recompute["none"].saved_bytes for layer, equal in plain)


def _static_bytes(block: BlockCost, layout: Layout) -> int:
    return sum(static_terms([PlacedBlock(name="", cost=block)], layout).values())


def _evaluated(
    configuration: Configuration,
    cluster: Cluster,
    batch: int,
    layers: tuple[int, ...],
    kind: str,
    number: int,
    dimensions: Dimensions | None = None,
) -> Found:
    """Evaluate with the overlaps of ``dimensions`` that shorten the step most; without, with those of the
    configuration."""
    module = configuration.family.profile.model.modules[0].name
    recompute: dict[str, dict[str, tuple[int, ...]]] = {}
    if kind != "none":
        again = tuple(min(number, held) for held in layers) if policy_of(kind).layers_per_group else layers
        recompute = {module: {kind: again}}
    placement = ModulePlacement(layers={module: layers}, recompute=recompute)
    profile = configuration.family.profile
    evaluation = evaluate(profile, cluster, configuration.layout, placement, batch, with_timeline=False)
    choices = [
        Found(
            configuration=configuration if layout == configuration.layout else configuration.under(layout),
            placement=placement,
            recompute=kind,
            num_recomputed=number,
            evaluation=evaluation
            if layout == configuration.layout
            else with_layout(evaluation, profile, cluster, layout, placement),
        )
        for layout in (overlaps(configuration.layout, dimensions) if dimensions else [configuration.layout])
    ]
    return min(choices, key=_order)


def improved(found: Found, cluster: Cluster, batch: int, dimensions: Dimensions) -> Found:
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
                _evaluated(
                    configuration, cluster, batch, tuple(changed), found.recompute, found.num_recomputed, dimensions
                )
            )
        better = [item for item in moved if item.evaluation.fits and item.step_us < found.step_us * (1 - 1e-9)]
        if not better:
            return found
        found = min(better, key=_order)
    return found
