"""Lower bound of the step time of one choice of units without recomputation, in a fifth of a replay's time.

It follows the replay's rules for gathers, waits and reductions, without memory and critical path.
"""

from __future__ import annotations

from collections import defaultdict

from mindspeed_autoparallel.planner.sharded.lowering import Lowering
from mindspeed_autoparallel.schedule.sharded import StreamModule, Unit
from mindspeed_autoparallel.spec.sharded import MEGATRON_FSDP


def chain_ns(lowering: Lowering, target_ns: int | None = None) -> int:
    """Return a lower bound of the step time; 0 if layers run in parts or are called again, or units are buckets.

    Micro batches left when the bound reaches ``target_ns`` count with their computation only.
    """
    host = lowering.problem.host
    if host.variant == MEGATRON_FSDP or host.reentrant or lowering.parts > 1:
        return 0
    chain = _Chain(lowering)
    modules, number = chain.modules, lowering.sizes.accumulation
    whole = sum(one.forward_ns + one.tail_forward_ns + one.backward_ns + one.tail_backward_ns for one in modules)
    for done in range(1, number + 1):
        chain.run(is_last=done == number)
        bound = chain.compute + (number - done) * whole + lowering.optimizer_ns
        if target_ns is not None and bound >= target_ns:
            break
    return bound


class _Chain:
    """The queues of a step."""

    def __init__(self, lowering: Lowering) -> None:
        structure, host = lowering.structure, lowering.problem.host
        self.modules = lowering.modules({})
        self.children: list[list[int]] = [[] for _ in self.modules]
        for index, module in enumerate(self.modules):
            if module.parent >= 0:
                self.children[module.parent].append(index)
        self.units: list[Unit] = [lowering.kinds[like][0] for like in structure.like]
        self.lists = structure.lists(
            lowering.decisions.groups, lowering.decisions.hooks, lowering.sizes.expert_size > 1
        )
        self.hook = {unit: name for name, units in lowering.hooked.items() for unit in units}
        self.torch, self.patched = host.variant == "torch", host.variant == "mindspeed-mm"
        self.defers, self.stays, self.is_last = host.defers_reduction, host.stays_gathered, True
        made = {module.parameters_of for module in self.modules if module.gradient_bytes}
        self.reduces = [unit.has_gradients and place in made for place, unit in enumerate(self.units)]
        self.ready: dict[int, int] = {}
        """End of a unit's gather, until computing waits for it."""
        self.gathered, self.ended = set[int](), set[int]()
        """Units whose parameters are there, and those whose backward has ended."""
        self.copied: dict[int, tuple[int, int]] = {}
        """Last copy-out in forward by context: its end and its unit."""
        self.reducing: dict[int, tuple[int, int]] = {}
        """Last reduction by context: its end and its unit."""
        self.reduced: dict[int, int] = {}
        """End of a unit's reduction, until computing waits for it."""
        self.done: list[int] = []
        self.order: defaultdict[int, list[int]] = defaultdict(list)
        """By unit, its places in ``done`` that backward has not come to."""
        self.outermost = -1
        self.compute = self.copying = self.gathering = self.reduction = self.summing = 0

    def run(self, *, is_last: bool) -> None:
        """Run a micro batch, and units whose inputs need no gradient at its end."""
        self.is_last = is_last
        self.forward(0)
        self.ended.clear()
        self.backward(0)
        waits = is_last or (self.defers and not self.stays)
        for place, unit in enumerate(self.units):
            if place not in self.ended:
                self._end(place)
            if waits and not unit.empty:
                reduced = max(self.reduction, self.summing) if self.torch else self.reduced.pop(place, 0)
                self.compute = max(self.compute, reduced, self.ready.pop(place, 0))
        if waits:
            self.reducing.clear()
            self.done.clear()
            self.order.clear()

    def forward(self, index: int) -> None:
        """Run a module and those inside it."""
        module = self.modules[index]
        self._before_forward(module)
        self.compute += module.forward_ns
        for child in self.children[index]:
            self.forward(child)
        self.compute += module.tail_forward_ns
        for place in reversed(module.units):
            unit = self.units[place]
            if not unit.empty:
                if unit.reshard_after_forward and (place > 0 or self.torch):
                    self.gathered.discard(place)
                self.order[place].append(len(self.done))
                self.done.append(place)
            if place == self.outermost:
                for moment, _ in self.copied.values():
                    self._hold(moment)
                self.copied.clear()
                self.outermost = -1

    def backward(self, index: int) -> None:
        """Run backward of a module and of those inside it."""
        module = self.modules[index]
        if not module.needs_backward:
            return
        for place in reversed(module.units):
            self._before_backward(place)
        self.compute += module.tail_backward_ns
        for child in reversed(self.children[index]):
            self.backward(child)
        self.compute += module.backward_ns
        if module.input_requires_grad:
            for place in reversed(module.units):
                self._end(place)

    def _before_forward(self, module: StreamModule) -> None:
        for place in module.units:
            if self.outermost < 0:
                self.outermost = place
                self._hold(self.compute)
            if not self.units[place].empty:
                self._gather(place)
                self._copy_out(place)
            for target in self.lists[place][0]:
                if not self.units[target].empty:
                    if self.patched:
                        self.copying = max(self.copying, *(moment for moment, _ in self.copied.values()), 0)
                    self._gather(target)

    def _copy_out(self, place: int) -> None:
        if place not in self.ready:
            return
        unit, own = self.units[place], self.lists[place][2]
        for context in list(self.copied) if self.patched else [own]:
            moment, other = self.copied.get(context, (0, -1))
            if other >= 0 and not (self.patched and self.hook[other] == self.hook[place]):
                self._hold(moment)
                del self.copied[context]
        alone = self.torch and unit.shard_ranks == 1
        moment = self.ready.pop(place)
        self.compute = (self.compute if alone else max(self.compute, moment)) + unit.copy_out_ns
        self.gathered.add(place)
        if alone:
            self._hold(self.compute)
        else:
            self.copied[own] = self.compute, place

    def _gather(self, place: int) -> None:
        if place in self.ready or place in self.gathered:
            return
        unit = self.units[place]
        if self.torch and unit.shard_ranks == 1:
            self.ready[place] = self.compute
            return
        self.copying += unit.copy_in_ns
        self.gathering = self.ready[place] = max(self.gathering, self.copying) + unit.gather_ns

    def _hold(self, moment: int) -> None:
        self.copying, self.gathering = max(self.copying, moment), max(self.gathering, moment)

    def _before_backward(self, place: int) -> None:
        unit, (_, behind, _) = self.units[place], self.lists[place]
        if not unit.empty:
            self._gather(place)
            if place in self.ready:
                alone, moment = self.torch and unit.shard_ranks == 1, self.ready.pop(place)
                self.compute = (self.compute if alone else max(self.compute, moment)) + unit.copy_out_ns
                self.gathered.add(place)
                self._hold(self.compute)
            if not behind and self.order[place] and (before := self.order[place].pop()):
                self._gather(self.done[before - 1])
        for target in behind:
            if not self.units[target].empty:
                self._gather(target)

    def _end(self, place: int) -> None:
        unit, own = self.units[place], self.lists[place][2]
        self.ended.add(place)
        if self.is_last or not self.stays:
            self.gathered.discard(place)
        if unit.empty or (self.defers and not self.is_last):
            return
        if self.torch or self.reduces[place]:
            for context in list(self.reducing) if self.patched else [own]:
                moment, other = self.reducing.get(context, (0, -1))
                if context == own or (other >= 0 and self.hook[other] != self.hook[place]):
                    self.compute = max(self.compute, moment)
                    self.reducing.pop(context, None)
        if not self.reduces[place]:
            return
        self.compute = max(self.compute, self.reduced.get(place, 0)) + unit.pack_ns
        self.reduction = max(self.reduction, self.compute) + unit.reduce_ns
        self.reducing[own] = self.reduction, place
        if unit.replicated and self.is_last:
            self.summing = max(self.summing, self.reduction) + unit.all_reduce_ns + unit.finish_ns
        elif not unit.replicated:
            self.reduction += unit.finish_ns
        self.reduced[place] = self.summing if unit.replicated and self.is_last else self.reduction
