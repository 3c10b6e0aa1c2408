"""The best placement of a configuration: split and recompute, by exact peak and simulated schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from mindspeed_autoparallel.planner.evaluate import Evaluation, evaluated, with_layout
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.planner.tuner.balanced import balanced_splits
from mindspeed_autoparallel.planner.tuner.candidates import Configuration, Dimensions, overlaps
from mindspeed_autoparallel.planner.tuner.placement_bounds import may_fit, placement_bound_us
from mindspeed_autoparallel.profiles import BlockCost
from mindspeed_autoparallel.spec.recompute import RecomputePolicy, policy_of
from mindspeed_autoparallel.units import format_bytes

_MAX_MOVES = 12
"""Number of layers moved one after another between stages in search of a better split, at most."""


@dataclass(frozen=True, kw_only=True)
class SolvedConfiguration:
    """A configuration with its best placement."""

    configuration: Configuration
    placement: ModulePlacement
    recompute: str
    """A kind of ``spec.recompute``."""
    num_recomputed: int
    """Number of layers per stage that are recomputed whole; 0 for other kinds."""
    evaluation: Evaluation

    @property
    def step_us(self) -> float:
        """Return the predicted step time."""
        return self.evaluation.step.total_us

    @property
    def lower_bound_us(self) -> float:
        """Return a step time that no placement of its layout beats: its own without a pipeline, where all are tried."""
        own = self.configuration
        return self.step_us if own.layout.pipeline_size == 1 else min(self.step_us, own.bound_us)

    @property
    def peak_bytes(self) -> int:
        """Return the peak of the fullest rank."""
        return max(rank.peak_bytes for rank in self.evaluation.memory)


def order_of(found: SolvedConfiguration) -> tuple[float, int, int, str]:
    """Return the sort key of placements: step time, then memory, then fewer switches, then the label."""
    layout = found.configuration.layout
    switches = layout.overlap_gradient_reduce + layout.overlap_parameter_gather + layout.distributed_optimizer
    return found.step_us, found.peak_bytes, switches, layout.label()


def solve(
    configuration: Configuration, dimensions: Dimensions, cutoff_us: float = math.inf
) -> tuple[SolvedConfiguration | None, tuple[int, str] | None]:
    """Return the best placement that fits, or the peak of the smallest one and its description.

    Placements that cannot be faster than ``cutoff_us`` are skipped.
    """
    best: SolvedConfiguration | None = None
    missing: tuple[int, str] | None = None
    for layers in even_or_balanced_splits(configuration, dimensions):
        for attempt in (_lightest, _whole_layers):
            limit_us = min(cutoff_us, best.step_us if best is not None else math.inf)
            for found in attempt(configuration, layers, dimensions, limit_us):
                if not found.evaluation.fits:
                    if missing is None or found.peak_bytes < missing[0]:
                        missing = (found.peak_bytes, _shortage(found))
                elif best is None or order_of(found) < order_of(best):
                    best = found
    return best, missing


def _lightest(
    configuration: Configuration, layers: tuple[int, ...], dimensions: Dimensions, limit_us: float
) -> Iterator[SolvedConfiguration]:
    """Yield placements without recompute, or with some modules recomputed in all layers: the fastest that fits.

    A schedule is monotone in its stage times, and time of the gradient reduction that longer backwards hide is added to
    the pipeline. So a kind that adds no less to every kind of layers than another that fits is not faster. If all
    layers are alike, one kind remains; if a kind adds less to some layers and more to others, both are tried.
    """
    fitting: list[str] = []
    for kind in _kinds(configuration, dimensions):
        if any(_adds_no_less(configuration, kind, other) for other in fitting):
            continue
        if placement_bound_us(configuration, layers, kind, 0) >= limit_us:
            continue
        if may_fit(configuration, layers, kind, 0):
            found = evaluate_placement(configuration, layers, kind, 0, dimensions)
            yield found
            if found.evaluation.fits:
                fitting.append(kind)
                limit_us = min(limit_us, found.step_us)


def _adds_no_less(configuration: Configuration, kind: str, other: str) -> bool:
    module = configuration.variant.profile.model.modules[0].name
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
    configuration: Configuration, layers: tuple[int, ...], dimensions: Dimensions, limit_us: float
) -> Iterator[SolvedConfiguration]:
    """Yield the fewest whole layers that fit, the first of every stage, or groups of them if not even all
    fit singly."""
    low, high = 1, max(layers)
    if not _has_full(configuration, dimensions) or placement_bound_us(configuration, layers, "full", 1) >= limit_us:
        return
    found = evaluate_placement(configuration, layers, "full", high, dimensions)
    if not found.evaluation.fits:
        yield found
        if dimensions.layer_groups and placement_bound_us(configuration, layers, "full", high) < limit_us:
            yield from _grouped(configuration, layers, dimensions)
        return
    while low < high and not may_fit(configuration, layers, "full", low):
        low += 1
    while low < high:
        middle = (low + high) // 2
        tried = evaluate_placement(configuration, layers, "full", middle, dimensions)
        if tried.evaluation.fits:
            found, high = tried, middle
        else:
            low = middle + 1
    yield found


def _grouped(
    configuration: Configuration, layers: tuple[int, ...], dimensions: Dimensions
) -> Iterator[SolvedConfiguration]:
    """Yield groups of layers, for when the inputs of all single layers do not fit: equally slow, with fewer
    bytes kept."""
    longest = max(layers)
    # Of sizes with equally many groups on every stage, the smallest recomputes the fewest layers at once.
    sizes = {-(-count // groups) for count in layers for groups in range(1, count)}
    for size in sorted(sizes - {1}):
        kind = str(RecomputePolicy.full(size))
        if may_fit(configuration, layers, kind, longest):
            found = evaluate_placement(configuration, layers, kind, longest, dimensions)
            yield found
            if found.evaluation.fits:
                return


def _has_full(configuration: Configuration, dimensions: Dimensions) -> bool:
    return "full" in dimensions.recompute and "full" in _layer(configuration).recompute


def _layer(configuration: Configuration) -> BlockCost:
    module = configuration.variant.profile.model.modules[0].name
    return configuration.candidate.measurement.modules[module].layer


def _shortage(found: SolvedConfiguration) -> str:
    worst = max(found.evaluation.memory, key=lambda rank: rank.peak_bytes - rank.limit_bytes)
    return (
        f"{found.configuration.layout.label()} with recompute {policy_of(found.recompute).words} needs "
        f"{format_bytes(worst.peak_bytes)} of {format_bytes(worst.limit_bytes)} on pipeline rank "
        f"{worst.pipeline_rank} ({worst.peak_point})."
    )


def even_or_balanced_splits(configuration: Configuration, dimensions: Dimensions) -> list[tuple[int, ...]]:
    """Return splits with equal numbers of layers and, for layers of several kinds, splits even in time or in memory."""
    balanced = balanced_splits(configuration) if dimensions.uneven_stages else []
    return list(dict.fromkeys([*_even(configuration, dimensions), *balanced]))


def _even(configuration: Configuration, dimensions: Dimensions) -> Iterator[tuple[int, ...]]:
    """Yield the even split, or nearly even ones that relieve the stages of embedding and head if that may pay."""
    layers = configuration.variant.profile.model.num_layers
    stages = configuration.layout.num_virtual_stages
    small, more = divmod(layers, stages)
    if not more:
        yield (small,) * stages
        return
    if not dimensions.uneven_stages:
        return
    # The longer stages are in the middle, because the ends also hold embedding and head.
    order = sorted(range(stages), key=lambda stage: (min(stage, stages - 1 - stage) == 0, stage))
    longer = set(order[:more])
    yield tuple(small + (stage in longer) for stage in range(stages))


def evaluate_placement(
    configuration: Configuration, layers: tuple[int, ...], kind: str, number: int, dimensions: Dimensions | None = None
) -> SolvedConfiguration:
    """Evaluate with the overlaps of ``dimensions`` that shorten the step most; if it has none, with the
    configuration's."""
    module = configuration.variant.profile.model.modules[0].name
    recompute: dict[str, dict[str, tuple[int, ...]]] = {}
    if kind != "none":
        again = tuple(min(number, held) for held in layers) if policy_of(kind).layers_per_group else layers
        recompute = {module: {kind: again}}
    placement = ModulePlacement(layers={module: layers}, recompute=recompute)
    candidate = configuration.candidate
    evaluation = evaluated(candidate, placement)
    choices = [
        SolvedConfiguration(
            configuration=configuration if layout == configuration.layout else configuration.under(layout),
            placement=placement,
            recompute=kind,
            num_recomputed=number,
            evaluation=evaluation
            if layout == configuration.layout
            else with_layout(evaluation, candidate.profile, candidate.cluster, layout),
        )
        for layout in (overlaps(configuration.layout, dimensions) if dimensions else [configuration.layout])
    ]
    return min(choices, key=order_of)


def improved(found: SolvedConfiguration, dimensions: Dimensions) -> SolvedConfiguration:
    """Move layers, one at a time, from the slowest stage to one that makes the step shorter, as long as one does."""
    configuration = found.configuration
    module = configuration.variant.profile.model.modules[0].name
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
                evaluate_placement(configuration, tuple(changed), found.recompute, found.num_recomputed, dimensions)
            )
        better = [item for item in moved if item.evaluation.fits and item.step_us < found.step_us * (1 - 1e-9)]
        if not better:
            return found
        found = min(better, key=order_of)
    return found
