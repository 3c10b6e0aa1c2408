"""Rules of torch's hooks for gathering and freeing a unit's parameters and the gather's buffer."""

from __future__ import annotations

from mindspeed_autoparallel.schedule.sharded.queues import (
    COMPUTE,
    COPY_IN,
    FORWARD,
    GATHER,
    Bytes,
    Context,
    Queues,
    State,
)
from mindspeed_autoparallel.schedule.sharded.training import StreamTraining


class Gathers:
    """Gathers of the parameters of all units in one step."""

    def __init__(self, training: StreamTraining, queues: Queues, memory: Bytes) -> None:
        self.variant = training.variant
        self.queues, self.memory = queues, memory
        self.states = [State(unit, index) for index, unit in enumerate(training.units)]
        self.contexts = [Context() for _ in range(1 + max((unit.context for unit in training.units), default=0))]
        self.modules_of = {unit: module.name for module in training.modules for unit in module.units}

    def _gather(self, state: State, *, alone: bool = False) -> None:
        """Gather a unit, overlapping with computation, or on the compute queue if ``alone``."""
        unit = state.unit
        if state.pending is not None or state.gathered:
            return
        if unit.shard_ranks == 1 and self.variant == "torch":
            state.pending = self.queues.now[COMPUTE]
            return
        queues = self.queues
        self.memory.add("gather buffers", unit.flat_bytes)
        copying, gathering = (COMPUTE, COMPUTE) if alone else (COPY_IN, GATHER)
        queues.run(copying, ("copy in", unit.name), unit.copy_in_ns)
        self.memory.add("gather buffers", unit.gathered_bytes)
        self.memory.add("gather buffers", -unit.flat_bytes)
        queues.wait(gathering, queues.now[copying])
        state.pending = queues.run(gathering, ("gather", unit.name), unit.gather_ns)

    def _wait(self, state: State) -> None:
        if state.pending is None:
            return
        unit, queues = state.unit, self.queues
        forward = state.group == FORWARD
        if forward:
            contexts = self.contexts if self.variant == "mindspeed-mm" else [self.contexts[unit.context]]
            for context in contexts:
                other = context.copied_out
                if other and (self.variant != "mindspeed-mm" or not self._same_hook(other[2], state)):
                    self._release(context)
        alone = unit.shard_ranks == 1 and self.variant == "torch"
        if not alone:
            queues.wait(COMPUTE, state.pending)
        self.memory.add("gathered parameters", unit.gathered_bytes)
        if unit.strided:
            self.memory.touch("gather buffers", unit.gathered_bytes)
        done = queues.run(COMPUTE, ("copy out", unit.name), unit.copy_out_ns)
        state.gathered, state.pending = True, None
        buffer = 0 if alone else unit.gathered_bytes
        if forward and not alone:
            context = self.contexts[unit.context]
            if context.copied_out is not None:
                self.memory.add("gather buffers", -context.copied_out[1])
            context.copied_out = (done, buffer, state)
        else:
            self._hold_gathers(done)
            self.memory.add("gather buffers", -buffer)

    def _same_hook(self, one: State, other: State) -> bool:
        return self.modules_of[one.index] == self.modules_of[other.index]

    def _hold_gathers(self, moment: int) -> None:
        self.queues.wait(COPY_IN, moment)
        self.queues.wait(GATHER, moment)

    def _release(self, context: Context) -> None:
        if context.copied_out is not None:
            self._hold_gathers(context.copied_out[0])
            self.memory.add("gather buffers", -context.copied_out[1])
            context.copied_out = None

    def _free(self, state: State) -> None:
        if state.gathered:
            state.gathered = False
            self.memory.add("gathered parameters", -state.unit.gathered_bytes)
