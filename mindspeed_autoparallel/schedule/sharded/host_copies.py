"""Offloaded inputs of layers, as in MindSpeed-MM: copied out during forward, and back one layer ahead in backward."""

from __future__ import annotations

from mindspeed_autoparallel.schedule.sharded.queues import COMPUTE, HOST, Bytes, Queues
from mindspeed_autoparallel.schedule.sharded.training import StreamTraining


class HostCopies:
    """Copies of one micro batch. Layers are numbered in order; the last one's input may stay on the device."""

    def __init__(self, training: StreamTraining, queues: Queues, memory: Bytes) -> None:
        self._modules = training.modules
        self._queues = queues
        self._memory = memory
        self._order = [index for index, module in enumerate(training.modules) if module.offloads]
        self._place = {index: place for place, index in enumerate(self._order)}
        self._stays = training.last_offload_stays
        self._out: dict[int, int] = {}
        """Layer number to the end of its copy out, until the device's copy is freed."""
        self._away: set[int] = set()
        self._back: dict[int, int] = {}
        self._used: set[int] = set()
        """Numbers of layers whose backward has begun."""

    def begin(self) -> None:
        """Start a micro batch."""
        self._out.clear()
        self._away.clear()
        self._back.clear()
        self._used.clear()

    def before_forward(self, index: int) -> None:
        """Free the previous layer's input once it is copied, and copy this one's out."""
        place = self._place.get(index)
        if place is None:
            return
        module = self._modules[index]
        if place - 1 in self._out:
            self._queues.wait(COMPUTE, self._out.pop(place - 1))
            before = self._order[place - 1]
            self._memory.hold(before, -self._modules[before].input_bytes)
            self._away.add(place - 1)
        if place == len(self._order) - 1 and self._stays:
            return
        self._queues.wait(HOST, self._queues.now[COMPUTE])
        for _ in range(module.copies):
            self._queues.run(HOST, ("out", module.name), module.copy_ns)
        self._out[place] = self._queues.now[HOST]

    def before_backward(self, index: int) -> None:
        """Wait for the layer's input, and fetch the previous layer's."""
        place = self._place.get(index)
        if place is None or place in self._used or (place == len(self._order) - 1 and self._stays):
            return
        self._used.add(place)
        self._fetch(place)
        self._queues.wait(COMPUTE, self._back.pop(place))
        if place > 0:
            self._fetch(place - 1)

    def _fetch(self, place: int) -> None:
        if place in self._back:
            return
        module = self._modules[self._order[place]]
        self._queues.wait(HOST, self._queues.now[COMPUTE])
        if place in self._away:
            self._away.remove(place)
            self._memory.hold(self._order[place], module.input_bytes)
        for _ in range(module.copies):
            self._queues.run(HOST, ("back", module.name), module.copy_ns)
        self._back[place] = self._queues.now[HOST]
