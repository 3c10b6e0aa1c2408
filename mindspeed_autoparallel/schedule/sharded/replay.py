"""The replay: forward, backward and the end of a step, in torch's program order."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_autoparallel.schedule.sharded.host_copies import HostCopies
from mindspeed_autoparallel.schedule.sharded.megatron_fsdp import MegatronFsdp
from mindspeed_autoparallel.schedule.sharded.queues import COMPUTE, Bytes, Queues, Span
from mindspeed_autoparallel.schedule.sharded.rules import Communication
from mindspeed_autoparallel.schedule.sharded.training import StreamModule, StreamTraining
from mindspeed_autoparallel.spec.sharded import MEGATRON_FSDP


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """One step."""

    step_ns: int
    busy_ns: dict[str, int]
    """Busy time by queue."""
    recompute_ns: int
    peak_bytes: int
    peak_point: str
    peak_terms: dict[str, int]
    peak_held: dict[int, int]
    """Activations at the peak by module number."""
    path: tuple[tuple[object, int], ...]
    """The longest path to the end, last operation first: operations and durations."""
    spans: tuple[Span, ...] = ()
    """(queue, operation, start, end), in program order, if requested."""


def replay(training: StreamTraining, *, with_spans: bool = False, start_gradients: bool = False) -> Replayed:
    """Return one step of ``training``; ``start_gradients``: whether sharded gradients of the previous step are still
    alive."""
    return _Step(training, with_spans, start_gradients).run()


class _Step:
    def __init__(self, training: StreamTraining, with_spans: bool, start_gradients: bool) -> None:
        self.training = training
        self.queues = Queues(with_spans)
        self.memory = Bytes(training.static_bytes)
        self.modules = training.modules
        self.children: list[list[int]] = [[] for _ in training.modules]
        for index, module in enumerate(training.modules):
            if module.parent >= 0:
                self.children[module.parent].append(index)
        self.communication: Communication | MegatronFsdp = (
            MegatronFsdp(training, self.queues, self.memory)
            if training.variant == MEGATRON_FSDP
            else Communication(training, self.queues, self.memory, start_gradients)
        )
        self.copies = HostCopies(training, self.queues, self.memory)
        self.recompute_ns = 0
        self.to_recompute = -1
        self.flowing_bytes = 0
        self.is_first_part = self.is_last_part = True
        """Position among the parts of a micro batch of the part whose backward runs."""

    def run(self) -> Replayed:
        training = self.training
        for index in range(training.accumulation):
            self.communication.begin(is_last=index == training.accumulation - 1)
            self.copies.begin()
            self._forward(0)
            self._backward(0)
            self.communication.end_backward()
        self.queues.run(COMPUTE, "optimizer", training.optimizer_ns)
        self.memory.at = "optimizer step"
        self.memory.touch("optimizer", training.optimizer_transient_bytes)
        return Replayed(
            step_ns=self.queues.now[COMPUTE],
            busy_ns=dict(self.queues.busy),
            recompute_ns=self.recompute_ns,
            peak_bytes=self.memory.peak,
            peak_point=self.memory.peak_at,
            peak_terms=self.memory.peak_terms,
            peak_held=self.memory.peak_held,
            path=self.queues.path(),
            spans=tuple(self.queues.spans),
        )

    def _forward(self, index: int) -> None:
        module = self.modules[index]
        self.memory.at = f"forward of {module.name or 'the model'}"
        self.memory.add("temporary", module.around_bytes)
        self.communication.pre_forward(module.units)
        self.copies.before_forward(index)
        self.memory.hold(index, self._input_bytes(module))
        # If a module saves no input, its caller holds the input.
        waiting = 0 if module.needs_backward else module.input_bytes
        self.memory.add("temporary", waiting)
        for _ in range(module.chunks):
            self._forward_part(index)
            self.memory.add("temporary", self._part_bytes(module))
        if module.chunks > 1:
            self.memory.touch("temporary", module.output_bytes)  # the parts, joined
            self.memory.add("temporary", -module.chunks * self._part_bytes(module))
        self.memory.add("temporary", -waiting)
        self.communication.post_forward(module.units)
        self.memory.add("temporary", -module.around_bytes)

    def _forward_part(self, index: int) -> None:
        module = self.modules[index]
        if module.gradient_bytes:
            self.communication.use(module.parameters_of)
        self.queues.run(COMPUTE, ("F", module.name), module.forward_ns)
        self.memory.hold(index, module.kept_bytes * module.needs_backward)
        saving = module.forward_transient_bytes, module.tail_forward_transient_bytes
        head_bytes, tail_bytes = module.unsaved_bytes or saving
        self.memory.touch("temporary", head_bytes)
        for child in self.children[index]:
            self._forward(child)
        if module.tail_forward_ns or module.tail_kept_bytes or tail_bytes:
            self.memory.at = f"end of forward of {module.name or 'the model'}"
            self.queues.run(COMPUTE, ("FT", module.name), module.tail_forward_ns)
            self.memory.hold(index, module.tail_kept_bytes * module.needs_backward)
            self.memory.touch("temporary", tail_bytes)

    @staticmethod
    def _part_bytes(module: StreamModule) -> int:
        """Return the output of one of several parts of a micro batch."""
        return module.output_bytes // module.chunks if module.chunks > 1 else 0

    def _run(self, module: StreamModule, kind: str, duration_ns: int, transient_bytes: int) -> None:
        self.queues.run(COMPUTE, (kind, module.name), duration_ns)
        self.memory.touch("temporary", transient_bytes)

    @staticmethod
    def _input_bytes(module: StreamModule) -> int:
        return module.input_bytes if module.needs_backward else 0

    def _again(self, index: int, top: int, *, is_last: bool = True) -> None:
        """Run the forward of a recomputed module again, its children's hooks included.

        torch stops at the last tensor that backward needs: hooks after the last module's work do not run.
        """
        module, children = self.modules[index], self.children[index]
        if index != top:
            self.communication.pre_forward(module.units)
        self._run_again(module, "A", module.again_ns if index == top else module.forward_ns)
        self.memory.hold(index, module.again_bytes)
        self.memory.touch("temporary", module.forward_transient_bytes)
        has_tail = module.tail_forward_ns > 0 or module.tail_again_bytes > 0
        saves = has_tail and module.tail_saves
        for child in children:
            self._again(child, top, is_last=is_last and child == children[-1] and not saves)
        if saves or (has_tail and not is_last):
            self._run_again(module, "AT", module.tail_forward_ns)
            self.memory.hold(index, module.tail_again_bytes)
            self.memory.touch("temporary", module.tail_forward_transient_bytes)
        if index != top and not is_last:
            self.communication.post_forward(module.units, recomputing=True)

    def _call_again(self, index: int) -> None:
        """Run a module's whole forward again, its own hooks included, before the hooks of its backward."""
        units = self.modules[index].units
        self.memory.at = f"recomputation of {self.modules[index].name}"
        self.copies.before_backward(index)
        self.communication.pre_forward(units)
        self._again(index, index, is_last=False)
        self.communication.post_forward(units, recomputing=True)

    def _run_again(self, module: StreamModule, kind: str, duration_ns: int) -> None:
        self.recompute_ns += duration_ns
        self.queues.run(COMPUTE, (kind, module.name), duration_ns)

    def _backward(self, index: int) -> None:
        module = self.modules[index]
        if not module.needs_backward:
            return
        self.memory.at = f"start of backward of {module.name or 'the model'}"
        # It shares the gradient with the enclosing module, as in a residual branch or a stack of layers.
        around, self.flowing_bytes = self.flowing_bytes, max(self.flowing_bytes, module.output_bytes)
        self.memory.add("activation gradients", self.flowing_bytes - around)
        # The checkpoint keeps its recomputed output until its backward is done.
        again_bytes = module.output_bytes if module.reentrant and module.recomputes else 0
        if module.reentrant and module.recomputes:
            self._call_again(index)
        self.memory.add("activations", again_bytes)
        self.communication.pre_backward(module.units)
        self.memory.at = f"backward of {module.name or 'the model'}"
        around_part = self.is_first_part, self.is_last_part
        for part in range(module.chunks):
            if module.chunks > 1:
                self.is_first_part, self.is_last_part = part == 0, part == module.chunks - 1
            self._backward_part(index)
        self.is_first_part, self.is_last_part = around_part
        self.memory.hold(index, -self._input_bytes(module))
        if module.chunks > 1:
            self.memory.add("activation gradients", -self._input_bytes(module))
        self.memory.add("activation gradients", around - self.flowing_bytes)
        self.flowing_bytes = around
        self.memory.add("activations", -again_bytes)
        if module.input_requires_grad:
            self.communication.post_backward(tuple(reversed(module.units)))

    def _backward_part(self, index: int) -> None:
        module = self.modules[index]
        if module.recomputes and not module.reentrant:
            self.to_recompute = index
        tail_bytes = module.tail_kept_bytes + module.tail_again_bytes
        if module.tail_backward_ns or tail_bytes or module.tail_backward_transient_bytes:
            if module.tail_saves:
                self._recompute()
            self._run(module, "BT", module.tail_backward_ns, module.tail_backward_transient_bytes)
            self.memory.hold(index, -tail_bytes)
        for child in reversed(self.children[index]):
            self._backward(child)
        self.memory.at = f"backward of {module.name or 'the model'}"
        self._recompute()
        if not module.recomputes:
            self.copies.before_backward(index)
        adds = not self.is_first_part or self.communication.adds(module.parameters_of)
        made_bytes = module.made_gradient_bytes if adds else 0
        self._run(module, "B", module.backward_ns, module.backward_transient_bytes - made_bytes)
        again = module.again_bytes if self._recomputed(index) else 0
        self.memory.hold(index, -module.kept_bytes - again)
        if module.chunks > 1:
            # A part's gradient is as large as the input's, which it is added to.
            self.memory.touch("temporary", self._input_bytes(module))
            self.memory.add("activation gradients", self._input_bytes(module) * self.is_first_part)
        self.communication.made_gradients(
            module.parameters_of,
            module.gradient_bytes,
            is_first=self.is_first_part,
            is_last=self.is_last_part,
            is_leaf=not self.children[index],
        )

    def _recompute(self) -> None:
        """Run a pending recomputation: torch starts it when backward first needs one of its tensors."""
        index, self.to_recompute = self.to_recompute, -1
        if index >= 0:
            self.copies.before_backward(index)
            at = self.memory.at
            self.memory.at = f"recomputation of {self.modules[index].name}"
            self._again(index, index)
            self.memory.at = at

    def _recomputed(self, index: int) -> bool:
        """Return whether the module or an enclosing one recomputes."""
        while index >= 0:
            if self.modules[index].recomputes:
                return True
            index = self.modules[index].parent
        return False
