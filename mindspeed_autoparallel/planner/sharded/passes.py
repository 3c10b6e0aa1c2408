"""What modules compute, and what transfers add in front of all computing and behind it."""

from __future__ import annotations

from typing import NamedTuple

from mindspeed_autoparallel.planner.sharded.lowering import Lowering, ns
from mindspeed_autoparallel.profiles.sharded import ModuleCosts


class Pass(NamedTuple):
    """Nanoseconds of one module, rounded as the replay rounds them."""

    forward: int
    tail: int
    backward: int
    tail_backward: int


def pass_ns(lowering: Lowering, costs: ModuleCosts) -> Pass:
    """Return a module's computing and exchanges."""
    sent = lowering.exchanges.forward_us(costs.ulysses_sent_bytes, costs.ring_sent_bytes, costs.expert_sent_bytes)
    backward = ns(costs.backward_us + sent)
    return Pass(ns(costs.forward_us + sent), ns(costs.tail_forward_us), backward, ns(costs.tail_backward_us))


class Ends(NamedTuple):
    """Nanoseconds by which transfers lengthen a step of computing alone, at its two ends."""

    lead: int
    """In front of a unit's forward: its gather and those of all units before it, less what is computed before it."""
    tail: int
    """Behind a unit's backward: its reduction and those of all units before it, less what is computed after it."""


def ends_ns(lowering: Lowering, *, merged: bool = False) -> Ends:
    """Return the ends of a step, each the longest over the units.

    ``merged``: what also holds if any of the units are parts of units around them, which are gathered earlier and
    reduced later. Only split experts stay units; the others have no latencies of their own.
    """
    structure, exchanges = lowering.structure, lowering.exchanges
    kinds = {name: pass_ns(lowering, costs) for name, costs in lowering.costs.items()}
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
        heads, tails = structure.before(place)
        before = sum(kinds[kind].forward * count for kind, count in heads.items())
        before += sum(kinds[kind].tail * count for kind, count in tails.items())
        heads, tails = structure.before(place, backward=True)
        after = sum(kinds[kind].backward * count for kind, count in heads.items())
        after += sum(kinds[kind].tail_backward * count for kind, count in tails.items())
        lead = max(lead, gathers - before)
        tail = max(tail, reduces - after, all_reduces - after)
    return Ends(lead, tail)
