"""Times of modules, and the time that transfers add before and after all computation of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from mindspeed_autoparallel.planner.sharded.links import Exchanges
from mindspeed_autoparallel.planner.sharded.lowering import Lowering, ns, point_of
from mindspeed_autoparallel.planner.sharded.problem import Pass, Problem, Unmeasured
from mindspeed_autoparallel.profiles.sharded import ModuleCosts
from mindspeed_autoparallel.spec.sharded import MEGATRON_FSDP, ShardSizes

ROUNDING_NS = 4
"""Largest rounding error of the times of one module, in nanoseconds."""


def passes_ns(lowering: Lowering) -> dict[str, Pass]:
    """Return the times of computation and exchanges by kind of module."""
    known, decisions = lowering.problem.known_passes, lowering.decisions
    key = lowering.point, (decisions.micro_batch_chunk, decisions.chunked) if lowering.parts > 1 else None
    if key not in known:
        known[key] = {name: _pass_ns(lowering, costs) for name, costs in lowering.costs.items()}
    return known[key]


def _pass_ns(lowering: Lowering, costs: ModuleCosts) -> Pass:
    sent = lowering.exchanges.forward_us(costs)
    backward = ns(costs.backward_us + sent)
    return Pass(ns(costs.forward_us + sent), ns(costs.tail_forward_us), backward, ns(costs.tail_backward_us))


def size_bound_ns(problem: Problem, sizes: ShardSizes) -> int:
    """Return a lower bound of the step time at ``sizes`` that needs no units: computation, and bytes to transfer.

    Raises ``Unmeasured`` if the profile lacks such costs.
    """
    exchanges = Exchanges.of(problem.profile, problem.devices_per_node, sizes)
    of, split, steps = problem.profile.bytes_of, sizes.expert_size > 1, sizes.accumulation
    step = _least_computing_us(problem, sizes, exchanges) * steps
    owned = transfers = 0.0
    for experts in (False, True) if split else (False,):
        # Sharding pads by less than an element per rank and module.
        ranks = sizes.expert_shard_size if experts else sizes.fully_shard_size
        less = ranks * len(problem.profile.modules)
        kinds = [
            problem.profile.kinds[one.kind]
            for one in problem.profile.modules
            if not split or one.holds_experts == experts
        ]
        rows = sum(sum(one.parameters) for one in kinds), sum(sum(one.frozen_parameters) for one in kinds)
        trained, untrained = (max(0.0, row / (sizes.expert_size if experts else 1) - less) for row in rows)
        owned += trained / ranks
        transfers += exchanges.shard_us((trained + untrained) * of.gathered, experts=experts)
        transfers += exchanges.shard_us(trained * of.reduced, experts=experts) * steps
    # The first reduction starts after all gathers of forward.
    step = max(step, transfers * (problem.host.variant != MEGATRON_FSDP))
    step += owned * problem.profile.optimizer_us_per_element + problem.profile.step_us
    return max(0, ns(step) - ROUNDING_NS * len(problem.profile.modules) * (steps + 1))


def _least_computing_us(problem: Problem, sizes: ShardSizes, exchanges: Exchanges) -> float:
    """Return the time of a micro batch's computation and exchanges, whole or in the fastest division into parts."""
    point, micro = point_of(sizes), sizes.micro_batch_size
    rows = [(1, problem.costs_at(point))]
    chunks = [size for size in problem.host.micro_batch_chunks if 0 < size < micro and micro % size == 0]
    try:
        rows += [(micro // size, problem.costs_at(replace(point, micro_batch_size=size))) for size in chunks]
    except Unmeasured:
        return 0.0
    total = 0.0
    for (kind, needs_backward), count in problem.module_counts.items():
        costs = rows[0][1][kind]
        sent = exchanges.forward_us(costs)
        times = []
        for parts, found in rows:
            one = found[kind]
            back = (one.backward_us + one.tail_backward_us) * needs_backward
            times.append((one.forward_us + one.tail_forward_us + back) * parts)
        total += (min(times) + sent * (1 + needs_backward)) * count
    return total


def forward_before_ns(lowering: Lowering, unit: int) -> int:
    """Return the computation before a unit's forward."""
    kinds, (heads, tails) = passes_ns(lowering), lowering.structure.before(unit)
    before = sum(kinds[kind].forward * count for kind, count in heads.items())
    return before + sum(kinds[kind].tail * count for kind, count in tails.items())


class Ends(NamedTuple):
    """Nanoseconds that transfers add to a step's computation, at its two ends."""

    lead: int
    """Before a unit's forward: its gather and those of all units before it, minus the computation before it."""
    tail: int
    """After a unit's backward: its reduction and those of all units before it, minus the computation after it."""


def ends_ns(lowering: Lowering, *, merged: bool = False) -> Ends:
    """Return the ends of a step, each the longest over the units.

    ``merged``: a lower bound that also holds if units are merged into the units around them, which are gathered
    earlier and reduced later. Only split experts stay units; the others have no latencies of their own.
    """
    structure, exchanges = lowering.structure, lowering.exchanges
    kinds = passes_ns(lowering)
    lead = tail = 0
    for place, counts in structure.corners:
        gathers = reduces = all_reduces = gathered = reduced = owned = 0
        for index, count in counts.items():
            unit = lowering.kinds[index][0]
            split = structure.modules[index].holds_experts and lowering.sizes.expert_size > 1
            if unit.empty:
                continue
            if split or not merged:
                gathers += unit.gather_ns * count
                reduces += unit.reduce_ns * count * unit.has_gradients
                all_reduces += unit.all_reduce_ns * count * (unit.has_gradients and unit.replicated)
            else:
                gathered += unit.gathered_bytes * count
                reduced += unit.reduced_bytes * count * unit.has_gradients
                owned += unit.output_bytes * count * (unit.has_gradients and unit.replicated)
        if merged:
            gathers += ns(exchanges.shard_us(gathered, experts=False))
            reduces += ns(exchanges.shard_us(reduced, experts=False))
            all_reduces += ns(exchanges.replicas_us(owned, experts=False))
        before = forward_before_ns(lowering, place)
        heads, tails = structure.before(place, backward=True)
        after = sum(kinds[kind].backward * count for kind, count in heads.items())
        after += sum(kinds[kind].tail_backward * count for kind, count in tails.items())
        lead = max(lead, gathers - before)
        tail = max(tail, reduces - after, all_reduces - after)
    return Ends(lead, tail)
