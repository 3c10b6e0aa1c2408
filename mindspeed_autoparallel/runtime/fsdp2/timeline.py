"""Forward and backward time of every module without its submodules and without gathers and reductions.

Hooks run around those of ``fully_shard``: a module's time begins after its parameters are gathered and ends before its
gradients are reduced. The device is idle at every stamp, so each segment between two stamps belongs to one module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mindspeed_autoparallel.runtime.devices.adapter import MemoryProbe
from mindspeed_autoparallel.runtime.devices.cpu.storages import tensors_in


@dataclass
class Passed:
    """One module in one pass: ``head`` is the part before the end of its last submodule, ``tail`` the part after it."""

    head_us: float = 0.0
    tail_us: float = 0.0
    head_bytes: int = 0
    """Transient bytes: above the level at the end in a forward that saves tensors, else above that at the start."""
    tail_bytes: int = 0
    head_made_bytes: int = 0
    """Part of ``head_bytes``: parameter gradients, which later parts of a micro batch add to the first part's."""
    tail_made_bytes: int = 0
    waiting_bytes: int = 0
    """Bytes that the head leaves while the last submodule runs, where nothing is saved."""
    num_segments: int = 0


@dataclass
class _Segment:
    us: float = 0.0
    transient_bytes: int = 0
    later_bytes: int = 0
    """``transient_bytes`` in a later part of a micro batch, which adds its gradients to existing ones."""
    left_bytes: int = 0
    inside_bytes: int = 0
    """Bytes that the submodule behind it leaves."""

    @property
    def made_bytes(self) -> int:
        """Return the part of ``transient_bytes`` that existing gradients save."""
        return max(0, self.transient_bytes - self.later_bytes)


@dataclass
class _Frame:
    name: str
    saves: bool = True
    """Whether forward saves tensors for a backward."""
    segments: list[_Segment] = field(default_factory=lambda: [_Segment()])


class Timeline:
    """Times of the last step by module name, in microseconds; ``order`` has the names by first call."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self.forward: dict[str, Passed] = {}
        self.backward: dict[str, Passed] = {}
        self.order: list[str] = []
        self.inputs: dict[str, tuple[int, bool]] = {}
        """Bytes of each module's first floating-point input, and whether any such input requires a gradient."""
        self.input_addresses: dict[str, int] = {}
        self.probe: MemoryProbe | None = None
        self.saves_nothing = False
        self.same_shape: dict[str, bool] = {}
        """Whether a module's first output has the shape of its first input."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Shape of each module's first output."""
        self.output_bytes: dict[str, int] = {}
        """Bytes of each module's outputs that receive a gradient."""
        self._synchronize = synchronize
        self._stack: list[_Frame] = []
        self._since: float | None = None
        self._done = self.forward
        self._base_bytes = 0
        self._made_bytes = 0
        """Bytes of parameter gradients finished since the base."""
        self._handles: list[Any] = []
        self._hooked: set[int] = set()

    def attach(self, model: Any, names: Sequence[str]) -> list[Any]:
        """Hook the modules of ``names`` and return handles to remove the hooks; call it after ``fully_shard``."""
        self._handles = handles = list[Any]()
        for name in names:
            module = model.get_submodule(name) if name else model
            handles += [
                module.register_forward_pre_hook(self._before_gather(name), prepend=True, with_kwargs=True),
                module.register_forward_pre_hook(self._begins(name), with_kwargs=True),
                module.register_forward_hook(self._ends(name), prepend=True, with_kwargs=True),
                module.register_forward_hook(self._after_free(name), with_kwargs=True),
            ]
        return handles

    def start(self) -> None:
        """Discard the times of the last step."""
        self.forward, self.backward, self._stack, self._since = {}, {}, [], None
        self._done = self.forward

    @property
    def innermost(self) -> tuple[str, int] | None:
        """Return the name of the innermost running module, and how many of its submodules have run."""
        return (self._stack[-1].name, len(self._stack[-1].segments) - 1) if self._stack else None

    @property
    def open_names(self) -> list[str]:
        """Return the names of the running modules, outermost first."""
        return [frame.name for frame in self._stack]

    # Forward: begin gather, enter, exit, freed.

    def _before_gather(self, name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            self._pause()
            for tensor in tensors_in((args, kwargs)):
                if tensor.requires_grad:
                    tensor.register_hook(self._backward_hook(self._reduced, name))

        return hook

    def _begins(self, name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            tensors = [tensor for tensor in tensors_in((args, kwargs)) if tensor.is_floating_point()]
            waiting = [tensor for tensor in tensors if tensor.requires_grad]
            for tensor in waiting:
                tensor.register_hook(self._backward_hook(self._left, name))
            first = next(iter(tensors), None)
            size = first.numel() * first.element_size() if first is not None else 0
            self.inputs[name] = (size, bool(waiting))
            self.input_addresses[name] = first.untyped_storage().data_ptr() if first is not None else 0
            self.shapes[name] = tuple(first.shape) if first is not None else ()
            if self.probe is not None:
                self._follow_gradients(module)
            if name not in self.order:
                self.order.append(name)
            trains = bool(waiting) or any(one.requires_grad for one in module.parameters())
            self._push(name, saves=trains)

        return hook

    def _ends(self, name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            self._pause()
            outputs = [tensor for tensor in _tensors_of(output) if tensor.is_floating_point()]
            shape = tuple(outputs[0].shape) if outputs else ()
            self.same_shape[name], self.shapes[name] = shape == self.shapes[name], shape
            traced = [tensor for tensor in outputs if tensor.requires_grad]
            self.output_bytes[name] = sum(tensor.numel() * tensor.element_size() for tensor in traced)
            for tensor in traced:
                tensor.register_hook(self._backward_hook(self._before_gather_again, name))

        return hook

    def _after_free(self, name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            for tensor in _tensors_of(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._backward_hook(self._entered, name))
            self._pop_to(name)
            self._resume()

        return hook

    def _follow_gradients(self, module: Any) -> None:
        """Hook the gathered parameters of ``module`` and its submodules to record when their gradients are finished."""
        for parameter in module.parameters():
            if parameter.requires_grad and id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._made_gradient))

    def _made_gradient(self, parameter: Any) -> None:
        # Sharded parameters of nested units are hooked, too; their hooks run in reductions, outside any module.
        if self.probe is None or self._since is None or not self._stack:
            return
        size = parameter.numel() * parameter.element_size()
        self._note_peak(self._base_bytes)
        # In a later part the new gradient, the accumulated one and their sum are live together.
        added = self.probe.current_bytes() - self._base_bytes - self._made_bytes + size
        segment = self._stack[-1].segments[-1]
        segment.later_bytes = max(segment.later_bytes, added)
        self._made_bytes += size

    # Backward: gather again, enter, leave, reduced.

    def _backward_hook(self, event: Callable[[str], None], name: str) -> Callable[[Any], None]:
        def hook(gradient: Any) -> None:
            if self._done is self.forward:
                self._stack, self._done = [], self.backward
                _call_at_end(self._finish)
            event(name)

        return hook

    def _before_gather_again(self, name: str) -> None:
        if not self._is_open(name) and name not in self.backward:
            self._pause()

    def _entered(self, name: str) -> None:
        if self._is_open(name) or name in self.backward:
            return
        while self._stack and not _is_inside(name, self._stack[-1].name):
            self._pop_to(self._stack[-1].name)
        self._push(name)

    def _left(self, name: str) -> None:
        if self._is_open(name):
            self._pause()

    def _reduced(self, name: str) -> None:
        if self._is_open(name):
            self._pop_to(name)
            self._resume()

    def _finish(self) -> None:
        while self._stack:
            self._pop_to(self._stack[-1].name)

    # The clock.

    def _is_open(self, name: str) -> bool:
        return any(frame.name == name for frame in self._stack)

    def _pause(self) -> None:
        self._synchronize()
        if self._since is not None and self._stack:
            segment = self._stack[-1].segments[-1]
            segment.us += (time.perf_counter() - self._since) * 1e6
            if self.probe is not None:
                saves = self._done is self.forward and self._stack[-1].saves and not self.saves_nothing
                segment.left_bytes += self.probe.current_bytes() - self._base_bytes
                self._note_peak(self.probe.current_bytes() if saves else self._base_bytes)
        self._since = None

    def _note_peak(self, stays_bytes: int) -> None:
        if self.probe is None or not self._stack:
            return
        segment, above = self._stack[-1].segments[-1], self.probe.take_peak_bytes() - stays_bytes
        segment.transient_bytes = max(segment.transient_bytes, above)
        segment.later_bytes = max(segment.later_bytes, above - self._made_bytes)

    def _resume(self) -> None:
        self._synchronize()
        if self.probe is not None:
            self.probe.take_peak_bytes()
            self._base_bytes, self._made_bytes = self.probe.current_bytes(), 0
        self._since = time.perf_counter()

    def _push(self, name: str, *, saves: bool = True) -> None:
        self._pause()
        self._stack.append(_Frame(name, saves))
        self._resume()

    def _pop_to(self, name: str) -> None:
        """Close the frames from the innermost to ``name``; the parent of ``name`` then begins another segment."""
        self._pause()
        while self._stack:
            frame = self._stack.pop()
            passed = self._done.setdefault(frame.name, Passed())
            *before, last = frame.segments
            if before:
                passed.tail_us += last.us
                handed_bytes = before[-1].inside_bytes if self.saves_nothing else 0
                passed.tail_bytes = max(passed.tail_bytes, last.transient_bytes + handed_bytes)
                passed.waiting_bytes = (
                    sum(one.left_bytes + one.inside_bytes for one in before) - before[-1].inside_bytes
                )
                passed.tail_made_bytes = last.made_bytes
            for segment in before or [last]:
                passed.head_us += segment.us
                if segment.transient_bytes >= passed.head_bytes:
                    passed.head_bytes, passed.head_made_bytes = segment.transient_bytes, segment.made_bytes
            passed.num_segments = len(frame.segments)
            if self._stack:
                left_bytes = sum(one.left_bytes + one.inside_bytes for one in frame.segments)
                self._stack[-1].segments[-1].inside_bytes = left_bytes
                self._stack[-1].segments.append(_Segment())
            if frame.name == name:
                break


def _is_inside(name: str, other: str) -> bool:
    return other == "" or name.startswith(f"{other}.")


def _tensors_of(output: Any) -> list[Any]:
    if hasattr(output, "__dict__") and not isinstance(output, (dict, tuple, list)) and not hasattr(output, "shape"):
        output = vars(output)
    return list(tensors_in(output))


def _call_at_end(function: Callable[[], None]) -> None:
    import torch

    torch.autograd.Variable._execution_engine.queue_callback(function)
