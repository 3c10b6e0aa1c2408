"""The rules of torch's hooks for gathering, freeing and reducing, unit by unit.

Read from ``torch/distributed/fsdp/_fully_shard`` (2.14 as ``torch``, 2.7 as ``torch-2.7``) and from MindSpeed-MM's
patched copy of 2.7 (``mindspeed-mm``).
"""

from __future__ import annotations

from mindspeed_autoparallel.schedule.sharded.gathers import Gathers
from mindspeed_autoparallel.schedule.sharded.queues import (
    ALL_REDUCE,
    COMPUTE,
    COPY_IN,
    FORWARD,
    IDLE,
    POST_BACKWARD,
    PRE_BACKWARD,
    REDUCE,
    Bytes,
    Context,
    Queues,
    State,
)
from mindspeed_autoparallel.schedule.sharded.training import StreamTraining


class Communication(Gathers):
    """All units of one step."""

    def __init__(self, training: StreamTraining, queues: Queues, memory: Bytes, start_gradients: bool) -> None:
        super().__init__(training, queues, memory)
        self.defers, self.stays = training.defers_reduction, training.stays_gathered
        self.micro_batches = 0
        """Micro batches that have begun."""
        self.done: list[State] = []
        """Units in the order in which their forwards ended."""
        self.last_reduced: dict[str, int] = {}
        self.is_last = True
        self.outermost: State | None = None
        """Unit whose forward began while no other ran; in a recomputed layer it may differ from the root."""
        if start_gradients:
            for state in self.states:
                self._add_sharded_gradient(state)

    @property
    def ends_backward(self) -> bool:
        """Return whether torch's last backward of a step, as the host declares it, ends with this micro batch."""
        return self.is_last or (self.defers and not self.stays)

    # Forward

    def begin(self, *, is_last: bool) -> None:
        """Start a micro batch."""
        self.is_last = is_last
        self.micro_batches += 1

    def pre_forward(self, units: tuple[int, ...]) -> None:
        """Gather the units of a forward; ``units`` in the order of their hooks."""
        for index in units:
            state = self.states[index]
            if state.training == PRE_BACKWARD:
                if self.variant == "torch" and not state.gathered and not state.unit.empty:
                    # A unit that was reduced is gathered for a further part of the micro batch on the compute queue.
                    self._gather(state, alone=state.group not in (FORWARD, PRE_BACKWARD))
                    self._wait(state)
                continue
            state.training = FORWARD
            if self.outermost is None:
                self.outermost = state
                self._hold_gathers(self.queues.now[COMPUTE])
            if not state.unit.empty:
                state.group = FORWARD
                self._gather(state)
                self._wait(state)
            for target in state.unit.forward_prefetch:
                self._prefetch_forward(self.states[target])

    def _prefetch_forward(self, target: State) -> None:
        if target.unit.empty:
            return
        if self.variant == "mindspeed-mm":
            for context in self.contexts:
                if context.copied_out is not None:
                    self.queues.wait(COPY_IN, context.copied_out[0])
        self._gather(target)

    def post_forward(self, units: tuple[int, ...], *, recomputing: bool = False) -> None:
        """Free the units of a forward; ``units`` in the order of ``pre_forward``."""
        for index in reversed(units):
            state = self.states[index]
            if state.training == PRE_BACKWARD:
                continue
            if not state.unit.empty:
                if not (recomputing and self.variant == "torch"):
                    # torch 2.7 always keeps the root's parameters.
                    if state.unit.reshard_after_forward and (index > 0 or self.variant == "torch"):
                        self._free(state)
                    state.order.append(len(self.done))
                    self.done.append(state)
                state.group = IDLE
            state.training = IDLE
            if self.outermost is state:
                for context in self.contexts:
                    self._release(context)
                self.outermost = None

    def use(self, unit: int) -> None:
        """Record that a module with parameters runs; torch's hooks have waited for its unit."""

    # Backward

    def pre_backward(self, units: tuple[int, ...]) -> None:
        """Gather the units of a backward, and the next one's; hooks run in the order in which forwards ended."""
        for index in reversed(units):
            state = self.states[index]
            state.training = PRE_BACKWARD
            if not state.unit.empty and state.group != PRE_BACKWARD:
                state.group = PRE_BACKWARD
                self._gather(state)
                self._wait(state)
                if not state.unit.backward_prefetch and state.order:
                    place = state.order.pop()
                    if place > 0:
                        self._gather(self.done[place - 1])
            for target in state.unit.backward_prefetch:
                if not self.states[target].unit.empty:
                    self._gather(self.states[target])

    def adds(self, unit: int) -> bool:
        """Return whether gradients are added to those of earlier micro batches, which no reduction took and no cast
        replaced."""
        of = self.states[unit].unit
        return unit >= 0 and self.micro_batches > 1 and (of.empty or (self.defers and not of.accumulated_bytes))

    def made_gradients(self, unit: int, size: int, *, is_first: bool, is_last: bool, is_leaf: bool) -> None:
        """Record the gradients of a unit's parameters.

        With several parts of a micro batch they exist from the first part on, and reach the unit with the last part.
        """
        if unit < 0 or not size:
            return
        state = self.states[unit]
        if not self.adds(unit):
            state.gradient_bytes += size * is_last
            self.memory.add("gradients", size * is_first)

    def post_backward(self, units: tuple[int, ...]) -> None:
        """Free and reduce ``units``."""
        for index in units:
            if not self.states[index].unit.empty:
                self._post_backward(self.states[index])

    def _post_backward(self, state: State) -> None:
        unit, queues = state.unit, self.queues
        state.group = POST_BACKWARD
        if state.accumulated_bytes and state.gradient_bytes:
            queues.run(COMPUTE, ("add", unit.name), unit.add_ns)
            self._drop_gradients(state)
        if self.is_last or not self.stays:
            self._free(state)
        if self.defers and not self.is_last:
            self._accumulate(state)
            return
        has_gradients = unit.has_gradients and state.gradient_bytes + state.accumulated_bytes > 0
        if self.variant == "torch" or has_gradients:
            self._wait_for_reductions(state)
        if not has_gradients:
            return
        self._wait_for_own(state)
        self.memory.add("reduction buffers", unit.reduced_bytes)
        queues.run(COMPUTE, ("pack", unit.name), unit.pack_ns)
        self._drop_gradients(state)
        self.memory.add("gradients", -state.accumulated_bytes)
        state.accumulated_bytes = 0
        queues.wait(REDUCE, queues.now[COMPUTE])
        self.memory.add("sharded gradients", unit.output_bytes)
        done = queues.run(REDUCE, ("reduce", unit.name), unit.reduce_ns)
        self.contexts[unit.context].reducing = (done, unit.reduced_bytes, state)
        self._finish(state, done)

    def _drop_gradients(self, state: State) -> None:
        self.memory.add("gradients", -state.gradient_bytes)
        state.gradient_bytes = 0

    def _accumulate(self, state: State) -> None:
        """Keep gradients for the last micro batch, cast to the reduction's type."""
        size = state.unit.accumulated_bytes
        if size and state.gradient_bytes:
            self.queues.run(COMPUTE, ("upcast", state.unit.name), state.unit.upcast_ns)
            self.memory.add("gradients", size)
            state.accumulated_bytes = size
            self._drop_gradients(state)

    def _finish(self, state: State, done: int) -> None:
        """Reduce over replicas, and add the shard to the gradients."""
        unit, queues, queue = state.unit, self.queues, REDUCE
        if unit.replicated and not self.is_last:
            if state.partial:
                self.memory.add("sharded gradients", -unit.output_bytes)
            state.partial = True
            self._reduced(state, REDUCE, done)
            return
        if state.partial:
            self.memory.add("sharded gradients", -unit.output_bytes)
            state.partial = False
        if unit.replicated:
            queue = ALL_REDUCE
            queues.wait(ALL_REDUCE, queues.now[REDUCE])
            queues.run(ALL_REDUCE, ("all-reduce", unit.name), unit.all_reduce_ns)
        moment = queues.run(queue, ("finish", unit.name), unit.finish_ns)
        if unit.cast_gradient:
            self.memory.add("sharded gradients", unit.sharded_gradient_bytes)
            if unit.replicated:
                state.held_output = unit.output_bytes
            else:
                self.memory.add("sharded gradients", -unit.output_bytes)
        if state.has_sharded_gradient:
            self.memory.add("sharded gradients", -unit.sharded_gradient_bytes)
        state.has_sharded_gradient = True
        self._reduced(state, queue, moment)

    def _reduced(self, state: State, queue: str, moment: int) -> None:
        state.reduced = moment
        self.last_reduced[queue] = moment

    def _wait_for_reductions(self, state: State) -> None:
        own = self.contexts[state.unit.context]
        for context in self.contexts if self.variant == "mindspeed-mm" else [own]:
            if context.reducing and (context is own or not self._same_hook(context.reducing[2], state)):
                self._drop_reduction(context)

    def _drop_reduction(self, context: Context) -> None:
        if context.reducing is not None:
            self.queues.wait(COMPUTE, context.reducing[0])
            self.memory.add("reduction buffers", -context.reducing[1])
            context.reducing = None

    def _wait_for_own(self, state: State) -> None:
        if state.reduced is not None:
            self.queues.wait(COMPUTE, state.reduced)
            state.reduced = None
        self.memory.add("sharded gradients", -state.held_output)
        state.held_output = 0

    def end_backward(self) -> None:
        """Run torch's last callback: units whose inputs need no gradient are reduced here."""
        self.memory.at = "end of backward"
        if self.variant == "torch":
            self.outermost = None
        for state in self.states:
            if not state.unit.empty and state.group != POST_BACKWARD:
                self._post_backward(state)
            state.group = state.training = IDLE
            if self.ends_backward and not state.unit.empty:
                self._finalize(state)
        if self.ends_backward:
            self.done.clear()
            for context in self.contexts:
                self._drop_reduction(context)

    def _finalize(self, state: State) -> None:
        if self.variant == "torch":
            for moment in self.last_reduced.values():
                self.queues.wait(COMPUTE, moment)
            self.last_reduced.clear()
            state.reduced = None
        self._wait_for_own(state)
        if state.pending is not None:
            self.queues.wait(COMPUTE, state.pending)
            alone = state.unit.shard_ranks == 1 and self.variant == "torch"
            self.memory.add("gather buffers", 0 if alone else -state.unit.gathered_bytes)
            state.pending = None
        state.order.clear()

    def _add_sharded_gradient(self, state: State) -> None:
        if state.unit.has_gradients and not state.unit.empty:
            state.has_sharded_gradient = True
            self.memory.add("sharded gradients", state.unit.sharded_gradient_bytes)
