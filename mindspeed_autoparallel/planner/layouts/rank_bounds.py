"""A lower bound of a layout from its ranks alone: one small linear program, without a schedule or a split.

Every rank holds fractions of layers, as many as fit while its microbatches are in flight; recomputation to make them
fit adds to its work. A rank runs all microbatches, starts when the first one has passed the stages before it, and its
last backward returns through them. Proof: docs/decisions/0003-outer-search.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

from mindspeed_autoparallel.cost.memory import state_bytes
from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.placement import prediction_may_be_apart
from mindspeed_autoparallel.planner.problem_messages import link_times, message_allowance
from mindspeed_autoparallel.planner.split.model.linear import LinearProgram
from mindspeed_autoparallel.planner.stage_times import NS_PER_US, beside_blocks_ns, block_ns
from mindspeed_autoparallel.planner.variable_data import mean_factors
from mindspeed_autoparallel.profiles import BlockCost
from mindspeed_autoparallel.spec import Layout
from mindspeed_autoparallel.units import GIB

_ROUNDING = 1e-6
"""Relative tolerance of the linear program."""
_NS_PER_MS = 1e6


def rank_bound_us(candidate: Candidate) -> float:
    """Return a lower bound of the pipeline time of ``candidate`` in microseconds.

    ``inf`` if some rank exceeds its memory with everything recomputed; 0 for schedules without such a bound.
    """
    layout = candidate.layout
    plain = layout.schedule in ("1f1b", "interleaved") and not layout.paired and layout.sharding is None
    if not plain or candidate.profile.memory_semantics == "mindspeed":
        return 0.0
    return _Ranks(candidate).solve()


def moments_in_flight(layout: Layout, num_microbatches: int, rank: int) -> list[tuple[int, ...]]:
    """Return the microbatches in flight of each chunk of a rank, at its first backward and at some later times."""
    size, chunks = layout.pipeline_size, layout.virtual_size
    group, total = layout.microbatch_group_size or size, num_microbatches * chunks
    if chunks == 1:
        return [(min(num_microbatches, size - rank),)]
    full = min(total, 2 * (size - 1 - rank) + (chunks - 1) * group + 1)
    found = []
    for backwards in range(0, min(chunks * group, total - full + 1), group):
        forward = _passes(full + backwards, group, num_microbatches, chunks)
        backward = _passes(backwards, group, num_microbatches, chunks)
        found.append(tuple(a - b for a, b in zip(forward, reversed(backward), strict=True)))
    return found


def _passes(number: int, group: int, num_microbatches: int, chunks: int) -> list[int]:
    """Return how many of the first ``number`` passes each chunk has, the first chunk of a group first."""
    counts, first = [0] * chunks, 0
    while number > 0:
        size = min(group, num_microbatches - first)
        for chunk in range(chunks):
            taken = min(size, number)
            counts[chunk] += taken
            number -= taken
        first += size
    return counts


@dataclass(frozen=True)
class _Layers:
    """Equal layers of a module; ranks hold fractions of them."""

    cost: BlockCost
    number: int
    static: int
    factor: float

    def times_ms(self) -> Iterator[tuple[float, int]]:
        """Yield (milliseconds of one microbatch, bytes that it keeps) for each kind of recompute."""
        for kind, cost in self.cost.recompute.items():
            yield block_ns(self.cost, self.factor, kind) / _NS_PER_MS, cost.saved_bytes


class _Ranks:
    """The linear program of one layout, in milliseconds and GiB."""

    def __init__(self, candidate: Candidate) -> None:
        self.candidate, self.layout = candidate, candidate.layout
        self.profile = profile = candidate.profile
        self.factors = mean_factors(profile.variable_data)
        self.costs = [(module, candidate.measurement.modules[module.name]) for module in profile.model.modules]
        self.layers = [
            _Layers(layer, number, state_bytes(layer, self.layout), self.factors.get(module.name, 1.0))
            for module, cost in self.costs
            for layer, number in cost.runs(0, module.num_layers)
        ]
        self.program = LinearProgram()
        stages = range(self.layout.num_virtual_stages)
        self.time: list[list[tuple[float, Any]]] = [[] for _ in stages]
        """Time of a microbatch, by virtual stage."""
        self.held: list[list[tuple[int, int, Any]]] = [[] for _ in stages]
        """By virtual stage: bytes of a layer at all times, and bytes of a microbatch in flight."""

    def solve(self) -> float:
        """Return the bound in microseconds."""
        self._place_layers()
        self._place_ends()
        for rank in range(self.layout.pipeline_size):
            self._limit_memory(rank)
        step = self._follow_schedule()
        self.program.solver.Minimize(step)
        status = self.program.run()
        if status == "infeasible":
            return inf
        return float(step.solution_value()) * (1 - _ROUNDING) * _NS_PER_MS / NS_PER_US if status == "optimal" else 0.0

    def _place_layers(self) -> None:
        """Add the layers of every kind, spread over all virtual stages; few stages may be empty."""
        on_stage: list[list[Any]] = [[] for _ in self.time]
        for layers in self.layers:
            everywhere = []
            for v in range(len(self.time)):
                for time_ms, saved in layers.times_ms():
                    variable = self.program.number()
                    everywhere.append((1.0, variable))
                    on_stage[v].append((1.0, variable))
                    self.time[v].append((time_ms, variable))
                    self.held[v].append((layers.static, saved, variable))
            self.program.row(everywhere, layers.number, layers.number)
        for v, here in enumerate(on_stage):
            if not self._may_be_empty(v):
                self.program.row(here, 1.0)

    def _may_be_empty(self, v: int) -> bool:
        """Return whether a virtual stage may hold only an end of the model."""
        last = len(self.time) - 1
        alone = self.layout.standalone_ends or len(self.costs) > 1 or last >= sum(item.number for item in self.layers)
        apart = self.costs[-1][1].prediction is not None and prediction_may_be_apart(self.profile.model, self.layout)
        return (alone and v in (0, last)) or (apart and v == last - 1)

    def _place_ends(self) -> None:
        """Place the start of the first module and the end of the last one; the other ends may be anywhere."""
        last = len(self.time) - 1
        for module, cost in self.costs:
            for part, block, number in cost.parts(module.num_layers):
                if part == "layer":
                    continue
                time_ms = block_ns(block, self.factors.get(module.name, 1.0))
                fixed = {"pre": module is self.costs[0][0], "post": module is self.costs[-1][0]}.get(part, False)
                places = ([0] if part == "pre" else [last]) if fixed else range(last + 1)
                variables = []
                for v in places:
                    variable = self.program.number()
                    variables.append((1.0, variable))
                    self.time[v].append((time_ms / _NS_PER_MS, variable))
                    if fixed:
                        self.held[v].append((state_bytes(block, self.layout), 0, variable))
                self.program.row(variables, number, number)

    def _limit_memory(self, rank: int) -> None:
        layout, count = self.layout, self.candidate.num_microbatches
        overhead = self.profile.overhead_bytes(self.candidate.measurement)
        stages = range(rank, len(self.time), layout.pipeline_size)
        for moment in moments_in_flight(layout, count, rank):
            everywhere = ((moment,),) * layout.pipeline_size
            allowed = message_allowance(self.candidate, everywhere, len(self.time), safe=False)[rank]
            terms = [
                ((static + in_flight * saved) / GIB, variable)
                for v, in_flight in zip(stages, moment, strict=True)
                for static, saved, variable in self.held[v]
            ]
            self.program.row(terms, high=max(0, self.candidate.limit_bytes - overhead + allowed) / GIB)

    def _follow_schedule(self) -> Any:
        """Return the pipeline's time: at least a rank's work between the first microbatch's arrival and the last one's
        return."""
        layout, step = self.layout, self.program.number()
        beside = [2 * time_ns / _NS_PER_MS for time_ns in beside_blocks_ns(self.profile.device, layout)]
        links = [2 * time_ns / _NS_PER_MS for time_ns in link_times(self.candidate, len(self.time))]
        before, count = None, self.candidate.num_microbatches
        for rank in range(layout.pipeline_size):
            stages = range(rank, len(self.time), layout.pipeline_size)
            # step - count x (work of the rank) - (arrival and return) >= count x (time outside its blocks)
            terms = [(-count * time, variable) for v in stages for time, variable in self.time[v]]
            way: list[tuple[float, Any]] = [] if before is None else [(-1.0, before)]
            self.program.row([(1.0, step), *way, *terms], count * sum(beside[v] for v in stages))
            if rank + 1 < layout.pipeline_size:
                following = self.program.number()
                passed = [(-time, variable) for time, variable in self.time[rank]]
                self.program.row([(1.0, following), *way, *passed], beside[rank] + links[rank])
                before = following
        return step
