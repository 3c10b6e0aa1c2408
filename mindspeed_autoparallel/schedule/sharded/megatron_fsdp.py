"""Rules of Megatron-FSDP for gathering, freeing and reducing buckets under ``optim_grads_params``.

Read from ``megatron/core/distributed/fsdp/src/megatron_fsdp`` (0.19). A bucket is a layer, or holds parameters outside
layers; the latter stay gathered and are gathered again, in place, when a step begins. The replay covers steps after the
first, which gathers some layers once more.
"""

from __future__ import annotations

from collections import Counter

from mindspeed_autoparallel.schedule.sharded.queues import COMPUTE, GATHER, REDUCE, Bytes, Queues
from mindspeed_autoparallel.schedule.sharded.training import StreamTraining


class MegatronFsdp:
    """All buckets of one step: the hooks that the replay calls, as ``rules.Communication`` has them."""

    def __init__(self, training: StreamTraining, queues: Queues, memory: Bytes) -> None:
        self.units, self.unit_elements = training.units, training.unit_elements
        self.queues, self.memory = queues, memory
        filled = [index for index, unit in enumerate(training.units) if not unit.empty]
        self.stays = {index for index in filled if not training.units[index].reshard_after_forward}
        around = {one.parent for one in training.modules}
        self.makers = Counter(
            one.parameters_of
            for index, one in enumerate(training.modules)
            if one.needs_backward and one.gradient_bytes and self._counts(one.parameters_of, index not in around)
        )
        """By bucket: modules whose gradients it waits for."""
        first = list(dict.fromkeys(one.parameters_of for one in training.modules if one.gradient_bytes))
        staying = sorted(self.stays, key=lambda one: first.index(one) if one in first else len(first))
        self.order = staying + [index for index in filled if index not in self.stays]
        self.place = {index: place for place, index in enumerate(self.order)}
        self.done: dict[int, int] = {}
        """By bucket that is gathered or being gathered: the end of its gather."""
        self.waited: set[int] = set()
        self.made: Counter[int] = Counter()
        self.reducing: list[tuple[int, int]] = []
        """Buckets whose gradients are being reduced, with the moments at which they are."""
        self.is_backward = self.has_begun = False
        owned = sum(unit.sharded_gradient_bytes for unit in training.units if unit.has_gradients)
        memory.add("sharded gradients", owned)
        memory.add("gathered parameters", sum(training.units[index].gathered_bytes for index in self.stays))

    def begin(self, *, is_last: bool) -> None:
        """Start a micro batch; the first one gathers the buckets that stay gathered, and layers ahead."""
        self.is_backward = False
        if not self.has_begun and self.order:
            self._gather(self.order[0], 1)
        self.has_begun = True

    def use(self, unit: int) -> None:
        """Wait for the bucket of a module that runs."""
        if unit in self.done:
            self._wait(unit)

    def pre_forward(self, units: tuple[int, ...]) -> None:
        """Gather the buckets of a forward; unless it is a recomputation, also layers ahead."""
        for unit in self._layers(units):
            self._gather(unit, 0 if self.is_backward else 1)
            self._wait(unit)

    def post_forward(self, units: tuple[int, ...], *, recomputing: bool = False) -> None:
        """Free the buckets of a forward; not in recomputation, as the layer's backward follows at once."""
        for unit in () if recomputing else self._layers(units):
            self._free(unit)

    def pre_backward(self, units: tuple[int, ...]) -> None:
        """Gather the buckets of a backward, and layers ahead of it."""
        self.is_backward = True
        for unit in self._layers(units):
            self._gather(unit, -1)
            self._wait(unit)

    def _counts(self, unit: int, is_leaf: bool) -> bool:
        """Return whether a bucket waits for a module: the decoder's norm runs after the layers inside the decoder."""
        return is_leaf or unit not in self.stays

    def adds(self, unit: int) -> bool:
        """Return whether gradients are added to those of earlier micro batches: buckets take them at once."""
        return False

    def made_gradients(self, unit: int, size: int, *, is_first: bool, is_last: bool, is_leaf: bool) -> None:
        """Copy a module's gradients into the bucket's buffer; reduce it when all are there."""
        if unit < 0 or not size or not self._counts(unit, is_leaf):
            return
        if not self.made[unit]:
            self.memory.add("reduction buffers", self.units[unit].reduced_bytes)
        self.made[unit] += 1
        if self.made[unit] == self.makers[unit]:
            self._reduce(unit)

    def post_backward(self, units: tuple[int, ...]) -> None:
        """Free layers."""
        for unit in self._layers(units):
            self._free(unit)

    def end_backward(self) -> None:
        """Wait for all reductions, as every micro batch does."""
        self.memory.at = "end of backward"
        self._wait_for_reductions(len(self.reducing))
        self.made.clear()

    def _layers(self, units: tuple[int, ...]) -> list[int]:
        return [unit for unit in units if unit in self.place and unit not in self.stays]

    def _gather(self, unit: int, direction: int) -> None:
        """Gather a bucket and the next ones in ``direction`` until these have half of the unit size.

        Gathers begin in the order of forward, so that in backward the bucket itself comes last.
        """
        place, wanted, ahead = self.place[unit], {self.place[unit]}, 0
        at = place + direction
        while direction and 0 <= at < len(self.order) and ahead < self.unit_elements // 2:
            wanted.add(at)
            ahead += self.units[self.order[at]].elements
            at += direction
        for one in (self.order[place] for place in sorted(wanted)):
            if one not in self.done:
                held = self.units[one]
                self.queues.wait(GATHER, self.queues.now[COMPUTE])
                self.done[one] = self.queues.run(GATHER, ("gather", held.name), held.gather_ns)
                self.memory.add("gathered parameters", held.gathered_bytes if one not in self.stays else 0)

    def _wait(self, unit: int) -> None:
        if unit not in self.waited:
            self.waited.add(unit)
            self.queues.wait(COMPUTE, self.done[unit])
            self.queues.mark(("wait", self.units[unit].name))

    def _free(self, unit: int) -> None:
        if unit in self.done:
            del self.done[unit]
            self.waited.discard(unit)
            self.memory.add("gathered parameters", -self.units[unit].gathered_bytes)
            self.queues.mark(("free", self.units[unit].name))

    def _reduce(self, index: int) -> None:
        """Reduce a bucket's gradients after waiting until pending reductions have at most the unit size."""
        queues, unit = self.queues, self.units[index]
        queues.run(COMPUTE, ("pack", unit.name), unit.pack_ns)
        left = sum(self.units[one].elements for one, _ in self.reducing)
        number = 0
        while left > self.unit_elements:
            left -= self.units[self.reducing[number][0]].elements
            number += 1
        self._wait_for_reductions(number)
        queues.wait(REDUCE, queues.now[COMPUTE])
        queues.run(REDUCE, ("reduce", unit.name), unit.reduce_ns)
        self.reducing.append((index, queues.run(REDUCE, ("finish", unit.name), unit.finish_ns)))

    def _wait_for_reductions(self, number: int) -> None:
        for index, moment in self.reducing[:number]:
            self.queues.wait(COMPUTE, moment)
            self.memory.add("reduction buffers", -self.units[index].reduced_bytes)
        del self.reducing[:number]
        if number:
            self.queues.mark(("wait for reductions", number))
