"""A layout as a split problem, twice: rows that never promise too little memory, and rows that never ask too much.

The exact peak (program points, see cost/memory.py) is not linear in layer counts. ``relaxed`` rows count what every
placement surely holds: its optimum is a proved lower bound. ``safe`` rows count the largest transient everywhere: what
they accept fits. See docs/decisions/0004-memory-rows.md.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd, inf

from mindspeed_autoparallel.cost.collectives import p2p_us
from mindspeed_autoparallel.cost.memory import PlacedBlock, static_terms, updated_parameter_bytes
from mindspeed_autoparallel.cost.step import post_pipeline_time
from mindspeed_autoparallel.cost.topology import boundary_link
from mindspeed_autoparallel.planner.placement import RECOMPUTED_KINDS, ModulePlacement
from mindspeed_autoparallel.planner.rank_memory import sends_of
from mindspeed_autoparallel.planner.split import LayerKind, Placement, Segment, SplitProblem, Tail
from mindspeed_autoparallel.planner.split.moments import fullest_moments
from mindspeed_autoparallel.planner.stage_times import NS_PER_US, block_times_ns
from mindspeed_autoparallel.planner.variable_data import mean_factors
from mindspeed_autoparallel.profiles import BlockCost, Measurement, Profile
from mindspeed_autoparallel.schedule import Program, in_flight, make_program
from mindspeed_autoparallel.spec import Cluster, Layout

KIND_ORDER = ("none", *RECOMPUTED_KINDS)


def build_problem(
    profile: Profile,
    measurement: Measurement,
    cluster: Cluster,
    layout: Layout,
    num_microbatches: int,
    limits: tuple[int, ...],
    *,
    safe: bool,
    pipeline_cutoff_us: float = inf,
    with_tails: bool = False,
) -> SplitProblem:
    """Return nanoseconds and bytes; ``limits`` by pipeline rank, runtime overhead included. Raises ``ConfigError``.

    A bound of this problem holds for every placement whose pipeline time is below ``pipeline_cutoff_us``.
    ``with_tails``: the step includes gradient reduction and optimizer of the rank that has most of them.
    """
    program = make_program(layout.schedule, layout.pipeline_size, num_microbatches, layout.virtual_size)
    moments = _moments(program, layout.virtual_size, safe=safe)
    # Several moments: their copies are counted by the rows of the problem.
    several = layout.virtual_size > 1 and not safe
    held = [0 if several else moment[0][chunk] for chunk in range(layout.virtual_size) for moment in moments]
    mindspeed = profile.memory_semantics == "mindspeed"
    factors = mean_factors(profile.variable_data)
    segments: list[Segment] = []
    blocks: list[BlockCost] = []
    last: dict[str, int] = {}
    for module in profile.model.modules:
        cost = measurement.modules[module.name]
        before = tuple(last[name] for name in module.predecessors)
        ways = [kind for kind in KIND_ORDER if kind in cost.layer.recompute]
        runs = [layer for layer, _ in cost.runs(0, module.num_layers)]
        first = len(segments) + (cost.pre is not None)
        factor = factors.get(module.name, 1.0)
        comes_last = module is profile.model.modules[-1] and layout.virtual_size == 1
        after = cost.post.recompute["none"].saved_bytes if cost.post is not None else 0
        for part, block, number in cost.parts(module.num_layers):
            forward, backward = block_times_ns(_plain(block), factor)
            run = len(segments) - first
            sure = 0
            if comes_last and part == "layer":
                sure = _surely_on_top(runs[run:], ways, after)
            elif comes_last and part == "post":
                sure = _surely_on_top([block], ["none"], 0)
            segments.append(
                Segment(
                    name=f"{module.name} {part}",
                    num_layers=number,
                    forward=forward,
                    backward=backward,
                    predecessors=before,
                    continues=part == "layer" and run > 0,
                    beside={"pre": first, "layer": None, "post": first + len(runs) - 1}[part],
                    kinds=_kinds(
                        block,
                        ways if part == "layer" else ["none"],
                        held,
                        layout,
                        profile,
                        factor,
                        mindspeed=mindspeed,
                        safe=safe,
                        sure=sure,
                    ),
                )
            )
            blocks.append(block)
            before = (len(segments) - 1,)
        last[module.name] = len(segments) - 1
    overhead = profile.overhead_bytes(measurement)
    start = _latest_start(profile, measurement, layout, num_microbatches, pipeline_cutoff_us)
    messages = _messages(profile, measurement, layout, moments, start, safe=safe)
    rows = limits if mindspeed else tuple(max(0, a - overhead + b) for a, b in zip(limits, messages, strict=True))
    link = _links(profile, measurement, cluster, layout, start)
    per_operation = round(profile.device.operation_overhead_us * NS_PER_US)
    if (per_operation % _unit(segments, link) or with_tails) and segments[0].forward:
        # The solver counts in the times' common divisor. A nanosecond less makes it 1, and a bound stays a bound.
        segments[0] = replace(segments[0], forward=segments[0].forward - 1)
    unit = _unit(segments, link)
    return SplitProblem(
        segments=tuple(segments),
        num_stages=layout.pipeline_size,
        num_microbatches=num_microbatches,
        memory_limit=rows,
        link=link,
        schedule=layout.schedule,
        num_chunks=layout.virtual_size,
        sends=sends_of(profile, layout),
        per_operation=per_operation // unit * unit,
        tails=_tails(profile, cluster, layout, segments, blocks, unit) if with_tails else (),
        in_flight=moments if several else (),
    )


def _tails(
    profile: Profile, cluster: Cluster, layout: Layout, segments: list[Segment], blocks: list[BlockCost], unit: int
) -> tuple[Tail, ...]:
    """Return rows below a rank's tail, each the tail of a block times their number, rounded down to whole units.

    Where the reduction overlaps the last backward, one row hides all of it, the other hides a backward in which
    everything is recomputed: no plan hides more.
    """

    def times(number: int, block: BlockCost, hidden_us: float) -> float:
        tail = post_pipeline_time([_plain(block)] * number, layout, cluster, profile.device, hidden_us=hidden_us)
        return tail.total_us * NS_PER_US

    rows = []
    for hidden_us in (inf, 0.0) if layout.overlap_gradient_reduce else (0.0,):
        one = [times(1, block, hidden_us) for block in blocks]
        each = [times(2, block, hidden_us) - first for block, first in zip(blocks, one, strict=True)]
        fixed = min((first - more for first, more in zip(one, each, strict=True) if first), default=0.0)
        if layout.overlap_gradient_reduce and not hidden_us:
            each = [
                more - (s.backward + max(kind.extra_backward for kind in s.kinds)) if more else 0.0
                for more, s in zip(each, segments, strict=True)
            ]
        rows.append(
            Tail(by_segment=tuple(int(more // unit) * unit for more in each), fixed=max(0, int(fixed // unit) * unit))
        )
    return tuple(rows)


def module_placement(profile: Profile, measurement: Measurement, placement: Placement) -> ModulePlacement:
    """Return the solver's rows (segments, kinds, virtual stages) by module."""
    layers, recompute = {}, {}
    index = 0
    for module in profile.model.modules:
        cost = measurement.modules[module.name]
        index += cost.pre is not None
        end = index + len(cost.runs(0, module.num_layers))
        kinds = [kind for kind in KIND_ORDER if kind in cost.layer.recompute]
        # Segments of one stack: theirs together.
        by_kind = zip(*placement[index:end], strict=True)
        rows = {kind: tuple(map(sum, zip(*found, strict=True))) for kind, found in zip(kinds, by_kind, strict=True)}
        layers[module.name] = tuple(map(sum, zip(*rows.values(), strict=True)))
        recompute[module.name] = {kind: rows[kind] for kind in kinds if kind != "none"}
        index = end + (cost.post is not None)
    return ModulePlacement(layers=layers, recompute=recompute)


def _unit(segments: list[Segment], link: tuple[int, ...]) -> int:
    unit = gcd(0, *link)
    for segment in segments:
        unit = gcd(unit, segment.forward, segment.backward, *(kind.extra_backward for kind in segment.kinds))
    return unit or 1


def _plain(block: BlockCost) -> PlacedBlock:
    return PlacedBlock(name="block", cost=block)


def _moments(program: Program, num_chunks: int, *, safe: bool) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return by stage the microbatches in flight of each chunk at every moment that may be fullest; where ``safe``,
    one that has the most of each chunk."""
    if num_chunks == 1:
        return tuple(((held,),) for held in in_flight(program))
    found = fullest_moments(program)
    if safe:
        return tuple((tuple(map(max, zip(*moments, strict=True))),) for moments in found)
    return found


def _surely_on_top(blocks: list[BlockCost], names: list[str], hidden_bytes: int) -> int:
    """Return what stands at least on everything else, whichever of ``blocks`` comes last, in whichever way, on
    everything.

    ``hidden_bytes``: what may come after it there, freed before its transient.
    """
    costs = [block.recompute[name] for block in blocks for name in names]
    return max(0, min(max(cost.forward_peak_bytes, cost.backward_peak_bytes) for cost in costs) - hidden_bytes)


def _kinds(
    block: BlockCost,
    names: list[str],
    held: list[int],
    layout: Layout,
    profile: Profile,
    factor: float,
    *,
    mindspeed: bool,
    safe: bool,
    sure: int,
) -> tuple[LayerKind, ...]:
    """Return the ways to run the block of ``names``; pre and post blocks run plainly. ``sure``: transient that a
    stage with the block has in any case."""
    static = sum(static_terms([_plain(block)], layout).values())
    updated = updated_parameter_bytes([_plain(block)], layout)
    step_transient = -int(-profile.device.optimizer_peak_bytes_per_parameter_byte * updated // 1)
    costs = {name: block.recompute[name] for name in names}
    peaks = {kind: max(cost.forward_peak_bytes, cost.backward_peak_bytes) for kind, cost in costs.items()}
    whole = costs["none"].saved_bytes
    kinds = []
    for name, cost in costs.items():
        if mindspeed:
            memory = [cost.saved_bytes * (n - 1) + whole for n in held]
        else:
            memory = [cost.saved_bytes * n for n in held]
            if safe:
                # Either everything in flight is held, or the optimizer works: the larger, layer by layer, covers both.
                memory = [max(size, step_transient) for size in memory]
        plain_extra = block_times_ns(PlacedBlock(name="", cost=block, kind=name), factor)[1]
        kinds.append(
            LayerKind(
                name=name,
                extra_backward=plain_extra - block_times_ns(_plain(block), factor)[1],
                memory=tuple(size + static for size in memory),
                transient=0 if mindspeed else peaks[name] if safe else sure,
                saved=0 if any(held) else cost.saved_bytes,
            )
        )
    return tuple(kinds)


def _latest_start(
    profile: Profile, measurement: Measurement, layout: Layout, num_microbatches: int, cutoff_us: float
) -> int:
    """Return last virtual stage at which the last module can begin in a pipeline faster than the cutoff.

    Begun at stage d, its layers share the remaining stages: one rank does at least an even share, rounded up, if only
    of the shortest layers.
    """
    module = profile.model.modules[-1]
    factor = mean_factors(profile.variable_data).get(module.name, 1.0)
    runs = measurement.modules[module.name].runs(0, module.num_layers)
    layer_us = min(sum(block_times_ns(_plain(layer), factor)) for layer, _ in runs) / NS_PER_US
    work_us = sum(number * sum(block_times_ns(_plain(layer), factor)) for layer, number in runs) / NS_PER_US
    num = layout.num_virtual_stages
    for start in range(num):
        ranks = min(layout.pipeline_size, num - start)
        share_us = max(work_us / ranks, layer_us * -(-module.num_layers // ranks))
        if num_microbatches * share_us >= cutoff_us:
            return max(0, start - 1)
    return num - 1


def _messages(
    profile: Profile,
    measurement: Measurement,
    layout: Layout,
    moments: tuple[tuple[tuple[int, ...], ...], ...],
    latest_start: int,
    *,
    safe: bool,
) -> list[int]:
    """Return by rank what the limit grows by; may be negative.

    Rows count layers only, while a microbatch in flight keeps what was received and not what was sent (M6). At most
    this where ``safe`` is off, at least this where it is on.
    """
    smallest, largest = _message_sizes(profile, measurement, layout, latest_start)
    received = [0, *(largest if safe else smallest)]
    sent = [*(smallest if safe else largest), 0]
    sides = sum(cost.side.total_bytes for cost in measurement.modules.values())
    allowance = []
    for rank in range(layout.pipeline_size):
        chunks = range(rank, layout.num_virtual_stages, layout.pipeline_size)
        grown = max(
            sum(held * (sent[v] - received[v]) for held, v in zip(moment, chunks, strict=True))
            for moment in moments[rank]
        )
        if safe:
            # Whatever the schedule still refers to from the microbatch before.
            grown -= sum(2 * received[v] + ([*largest, 0])[v] + measurement.batch.total_bytes for v in chunks)
            grown -= sum((held + 1) * sides for held in moments[rank][0])
        allowance.append(grown)
    return allowance


def _message_sizes(
    profile: Profile, measurement: Measurement, layout: Layout, latest_start: int
) -> tuple[list[int], list[int]]:
    """Return bytes over each boundary, at least and at most: from ``latest_start`` on it is the last module's
    output."""
    costs = [measurement.modules[module.name] for module in profile.model.modules]
    sizes = [cost.layer.output_bytes for cost in costs]
    most = sum(max(cost.layer.output_bytes, cost.post.output_bytes if cost.post else 0) for cost in costs)
    # Only where the last module reads all others does nothing else travel beside its own output.
    joined = set(profile.model.modules[-1].predecessors) == {module.name for module in profile.model.modules[:-1]}
    alone = [joined and v >= latest_start for v in range(layout.num_virtual_stages - 1)]
    return [sizes[-1] if only else min(sizes) for only in alone], [sizes[-1] if only else most for only in alone]


def _links(
    profile: Profile, measurement: Measurement, cluster: Cluster, layout: Layout, latest_start: int
) -> tuple[int, ...]:
    """Return the cheapest message over each boundary, in nanoseconds: from ``latest_start`` on it is the last
    module's."""
    smallest, _ = _message_sizes(profile, measurement, layout, latest_start)
    links = []
    for v in range(layout.num_virtual_stages - 1):
        message_us = p2p_us(smallest[v], boundary_link(layout, cluster, profile.device, v))
        links.append(round(message_us * NS_PER_US) + round(profile.device.message_us(layout.schedule) * NS_PER_US))
    return tuple(links)
