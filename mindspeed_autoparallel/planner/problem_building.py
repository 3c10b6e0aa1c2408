"""A layout as a split problem, twice: with rows that all fitting plans keep, and rows that only fitting plans keep.

The exact peak (program points, see cost/memory.py) is not linear in layer counts. ``relaxed`` rows count what every
placement surely holds: its optimum is a proved lower bound. ``safe`` rows count the largest transient everywhere: what
they accept fits. See docs/decisions/0004-memory-rows.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, inf

from mindspeed_autoparallel.cost.memory import PlacedBlock, state_bytes, updated_parameter_bytes
from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.placement import (
    RECOMPUTED_KINDS,
    ModulePlacement,
    prediction_may_be_apart,
    stages_of,
)
from mindspeed_autoparallel.planner.problem_messages import latest_start, link_times, message_allowance, moments_of
from mindspeed_autoparallel.planner.problem_tails import tail_rows
from mindspeed_autoparallel.planner.rank_memory import sends_of
from mindspeed_autoparallel.planner.split import LayerKind, Placement, Segment, SplitProblem
from mindspeed_autoparallel.planner.split.model.blocks import Blocks, Costs, blocks_of
from mindspeed_autoparallel.planner.stage_times import NS_PER_US, block_times_ns
from mindspeed_autoparallel.planner.variable_data import mean_factors
from mindspeed_autoparallel.profiles import BlockCost, ModuleCost
from mindspeed_autoparallel.schedule import program_of_peaks
from mindspeed_autoparallel.spec import Module

KIND_ORDER = ("none", *RECOMPUTED_KINDS)


def surely_on_top(blocks: Sequence[BlockCost], names: list[str]) -> int:
    """Return the least transient on top of everything held, for any last block of ``blocks`` and any recompute kind of
    ``names``; a post block behind it may hide it (``hidden_by_post``)."""
    costs = [block.recompute[name] for block in blocks for name in names]
    return min(max(cost.forward_peak_bytes, cost.backward_peak_bytes) for cost in costs)


def hidden_by_post(candidate: Candidate) -> int:
    """Return how much less the transients of layers may count on the last stage than elsewhere: what post block and
    prediction saved is freed before a layer's backward."""
    cost = _last_cost(candidate)
    return _hidden_by(candidate, [cost.prediction, cost.post]) if cost.post is not None else 0


def raised_limits(limits: tuple[int, ...], candidate: Candidate) -> tuple[int, ...]:
    """Return ``limits`` by rank, higher by what hides transients of layers: on the last rank, and on the one before it
    where multi-token prediction may lie there."""
    if len(limits) == 1:
        return limits
    last = limits[-1] + hidden_by_post(candidate)
    # The stage before the last may hold layers and multi-token prediction.
    apart = prediction_may_be_apart(candidate.profile.model, candidate.layout)
    before = _hidden_by(candidate, [_last_cost(candidate).prediction]) if apart else 0
    return (*limits[:-2], limits[-2] + before, last)


def _last_cost(candidate: Candidate) -> ModuleCost:
    return candidate.measurement.modules[candidate.profile.model.modules[-1].name]


def _hidden_by(candidate: Candidate, behind: Sequence[BlockCost | None]) -> int:
    """Return how much of layers' transients what the blocks ``behind`` them saved may hide."""
    if candidate.layout.virtual_size > 1:
        return 0
    module, cost = candidate.profile.model.modules[-1], _last_cost(candidate)
    ways = [kind for kind in KIND_ORDER if kind in cost.layer.recompute]
    tops = [surely_on_top([layer], ways) for layer, _ in cost.runs(0, module.num_layers)]
    return min(sum(block.recompute["none"].saved_bytes for block in behind if block is not None), max(tops))


def build_problem(
    candidate: Candidate,
    limits: tuple[int, ...],
    *,
    safe: bool,
    pipeline_cutoff_us: float = inf,
    with_tails: bool = False,
    last_module_from: int | None = None,
) -> SplitProblem:
    """Return nanoseconds and bytes; ``limits`` by pipeline rank, runtime overhead included. Raises ``ConfigError``.

    A bound of this problem holds for every placement whose pipeline time is below ``pipeline_cutoff_us``.
    ``with_tails``: the step includes gradient reduction and optimizer of the rank that has most of them.
    ``last_module_from``: the last module begins on this virtual stage or before; only such plans are bounded then.
    """
    profile, layout, num_microbatches = candidate.profile, candidate.layout, candidate.num_microbatches
    *sizes, paired = layout.program_sizes(num_microbatches)
    # Before every pair of combined 1F1B as much is held as plain passes hold at most; and at no time more than where
    # its forward would end before its backward begins.
    program = program_of_peaks((*sizes, paired and safe))  # type: ignore[arg-type]  # a tuple cut in two
    moments = moments_of(program, layout.virtual_size, safe=safe)
    # Several moments: their copies are counted by the rows of the problem.
    several = layout.virtual_size > 1 and not safe
    held = tuple(0 if several else moment[0][chunk] for chunk in range(layout.virtual_size) for moment in moments)
    rows = _MemoryRows(candidate=candidate, held=held, hidden=hidden_by_post(candidate), safe=safe)
    blocks = _blocks(rows)
    segments = blocks.segments
    overhead = profile.overhead_bytes(candidate.measurement)
    start = latest_start(candidate, pipeline_cutoff_us) if last_module_from is None else last_module_from
    messages = message_allowance(candidate, moments, start, safe=safe)
    if not rows.mindspeed:
        limits = tuple(max(0, a - overhead + b) for a, b in zip(limits, messages, strict=True))
        if not safe:
            limits = raised_limits(limits, candidate)
    link = link_times(candidate, start)
    per_operation = round(profile.device.operation_overhead_us * NS_PER_US)
    if (per_operation % _unit(segments, link) or with_tails) and segments[0].forward:
        # The solver counts in the times' common divisor. A nanosecond less makes it 1, and a bound stays a bound.
        segments[0] = replace(segments[0], forward=segments[0].forward - 1)
    unit = _unit(segments, link)
    return SplitProblem(
        segments=tuple(segments),
        num_stages=layout.pipeline_size,
        num_microbatches=num_microbatches,
        memory_limit=limits,
        link=link,
        schedule=layout.schedule,
        num_chunks=layout.virtual_size,
        microbatch_group_size=layout.program_sizes(num_microbatches)[4],
        paired=paired and layout.schedule == "interleaved",
        sends=sends_of(profile, layout),
        per_operation=per_operation // unit * unit,
        tails=tail_rows(candidate, segments, blocks.costs, unit) if with_tails else (),
        in_flight=moments if several else (),
        joints=blocks.joints(prediction_apart=prediction_may_be_apart(profile.model, layout)),
    )


@dataclass(frozen=True, kw_only=True)
class _MemoryRows:
    """What the memory rows of one problem count."""

    candidate: Candidate
    held: tuple[int, ...]
    """Microbatches in flight by virtual stage; 0 where the problem itself counts them."""
    hidden: int
    """Of the transients of layers, on the last stage."""
    safe: bool

    @property
    def mindspeed(self) -> bool:
        return self.candidate.profile.memory_semantics == "mindspeed"

    def kinds(self, block: BlockCost, names: list[str], factor: float, sure: int) -> tuple[LayerKind, ...]:
        """Return the recompute policies of the block of ``names``; pre and post blocks run plainly. ``sure``:
        transient that a stage with the block has in any case."""
        layout, device = self.candidate.layout, self.candidate.profile.device
        static = state_bytes(block, layout)
        updated = updated_parameter_bytes([PlacedBlock(name="", cost=block)], layout)
        step_transient = -int(-device.optimizer_peak_bytes_per_parameter_byte * updated // 1)
        costs = {name: block.recompute[name] for name in names}
        peaks = {kind: max(cost.forward_peak_bytes, cost.backward_peak_bytes) for kind, cost in costs.items()}
        whole = costs["none"].saved_bytes
        kinds = []
        for name, cost in costs.items():
            if self.mindspeed:
                memory = [cost.saved_bytes * (n - 1) + whole for n in self.held]
            else:
                memory = [cost.saved_bytes * n for n in self.held]
                if self.safe:
                    # Either everything in flight is held, or the optimizer works: the larger, layer by layer, covers
                    # both.
                    memory = [max(size, step_transient) for size in memory]
            plain_extra = block_times_ns(block, factor, name)[1]
            kinds.append(
                LayerKind(
                    name=name,
                    extra_backward=plain_extra - block_times_ns(block, factor)[1],
                    memory=tuple(size + static for size in memory),
                    transient=0 if self.mindspeed else peaks[name] if self.safe else sure,
                    saved=0 if any(self.held) else cost.saved_bytes,
                )
            )
        return tuple(kinds)


def _blocks(rows: _MemoryRows) -> Blocks:
    """Return every module's blocks with their times and memory."""
    model, layout, measurement = rows.candidate.profile.model, rows.candidate.layout, rows.candidate.measurement
    factors = mean_factors(rows.candidate.profile.variable_data)

    def price(module: Module, part: str, block: BlockCost, runs: Sequence[BlockCost]) -> Costs:
        factor, recompute = factors.get(module.name, 1.0), measurement.modules[module.name].layer.recompute
        ways = [kind for kind in KIND_ORDER if kind in recompute] if part == "layer" else ["none"]
        # Elsewhere than on the last stage transients count whole. There its limit is raised, by as much as they are
        # hidden, which the post block's own transient makes good.
        sure, comes_last = 0, module is model.modules[-1] and layout.virtual_size == 1
        if comes_last and part in ("layer", "post"):
            sure = surely_on_top(runs, ways)
        if layout.pipeline_size == 1 and part == "layer":
            sure = max(0, sure - rows.hidden)
        elif layout.pipeline_size > 1 and comes_last and part == "post":
            sure += rows.hidden
        return *block_times_ns(block, factor), rows.kinds(block, ways, factor, sure)

    return blocks_of(model, measurement.modules, price, standalone_ends=layout.standalone_ends)


def module_placement(candidate: Candidate, placement: Placement) -> ModulePlacement:
    """Return the solver's rows (segments, kinds, virtual stages) by module."""
    layers, recompute, apart = {}, {}, None
    index, modules = 0, candidate.profile.model.modules
    for module in modules:
        cost = candidate.measurement.modules[module.name]
        index += cost.pre is not None
        end = index + len(cost.runs(0, module.num_layers))
        kinds = [kind for kind in KIND_ORDER if kind in cost.layer.recompute]
        # Segments of one stack: theirs together.
        by_kind = zip(*placement[index:end], strict=True)
        rows = {kind: tuple(map(sum, zip(*found, strict=True))) for kind, found in zip(kinds, by_kind, strict=True)}
        layers[module.name] = tuple(map(sum, zip(*rows.values(), strict=True)))
        recompute[module.name] = {kind: rows[kind] for kind in kinds if kind != "none"}
        if cost.prediction is not None:
            ((*row,),) = placement[end]
            apart = row.index(1) if not row[-1] and len(modules) == 1 else apart
        index = end + (cost.prediction is not None) + (cost.post is not None)
    return ModulePlacement(layers=layers, recompute=recompute, prediction_stage=apart)


def split_placement(candidate: Candidate, placement: ModulePlacement) -> Placement:
    """Return layers by segment, kind and virtual stage, as if none were recomputed: which are the split alone."""
    num = len(next(iter(placement.layers.values())))
    rows: list[list[int]] = []
    kinds: list[int] = []
    model = candidate.profile.model
    for module in model.modules:
        cost, layers = candidate.measurement.modules[module.name], placement.layers[module.name]
        apart = placement.prediction_stage
        held = stages_of(model, cost, layers, apart)
        ends = [sum(layers[: v + 1]) for v in range(num)]
        first = 0
        for part, _, number in cost.parts(module.num_layers):
            if part == "layer":
                row = [
                    max(0, min(end, first + number) - max(end - n, first)) for end, n in zip(ends, layers, strict=True)
                ]
                first += number
            else:
                last = apart if part == "prediction" and apart is not None else held[-1]
                row = [int(v == (held[0] if part == "pre" else last)) for v in range(num)]
            rows.append(row)
            kinds.append(sum(kind in cost.layer.recompute for kind in KIND_ORDER) if part == "layer" else 1)
    return tuple(
        tuple(tuple(row) if not kind else (0,) * num for kind in range(number))
        for row, number in zip(rows, kinds, strict=True)
    )


def _unit(segments: list[Segment], link: tuple[int, ...]) -> int:
    unit = gcd(0, *link)
    for segment in segments:
        unit = gcd(unit, segment.forward, segment.backward, *(kind.extra_backward for kind in segment.kinds))
    return unit or 1
