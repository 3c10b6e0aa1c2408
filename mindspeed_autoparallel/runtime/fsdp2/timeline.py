"""Forward and backward time of every module without its submodules and without gathers and reductions.

Hooks run around those of ``fully_shard``: a module's time begins after its parameters are gathered and ends before its
gradients are reduced. The device is idle at every stamp, so each segment between two stamps belongs to one module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mindspeed_autoparallel.runtime.devices.adapter import MemoryProbe
from mindspeed_autoparallel.runtime.devices.cpu.storages import tensors_in
from mindspeed_autoparallel.runtime.fsdp2.frames import Frame, Passed, Segment


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
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Shape of each module's first output."""
        self.output_bytes: dict[str, int] = {}
        """Bytes of each module's outputs that receive a gradient."""
        self._synchronize = synchronize
        self._stack: list[Frame] = []
        self._since: float | None = None
        self._done = self.forward
        self._base_bytes = 0
        self._given: dict[str, frozenset[int]] = {}
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

    def note_saved(self, address: int, size: int) -> None:
        """Record a storage that autograd saves for the first time in the running modules that were not given it."""
        for frame in self._stack:
            frame.saved_bytes += size * (address not in frame.given)

    # Forward: begin gather, enter, exit, freed.

    def _before_gather(self, name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            self._pause()
            self._given[name] = frozenset(_storages(tensors_in((args, kwargs))))
            for tensor in tensors_in((args, kwargs)):
                if tensor.requires_grad:
                    tensor.register_hook(self._backward_hook(self._reduced, name))

        return hook

    def _begins(self, name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            given = list(tensors_in((args, kwargs)))
            tensors = [tensor for tensor in given if tensor.is_floating_point()]
            waiting = [tensor for tensor in tensors if tensor.requires_grad]
            for tensor in waiting:
                tensor.register_hook(self._backward_hook(self._left, name))
            first = next(iter(tensors), None)
            size = first.numel() * first.element_size() if first is not None else 0
            self.inputs[name] = (size, bool(waiting))
            self.input_addresses[name] = first.untyped_storage().data_ptr() if first is not None else 0
            if self.probe is not None:
                self._follow_gradients(module)
            if name not in self.order:
                self.order.append(name)
            self._push(name)
            storages = _storages(given) if self.probe is not None else {}
            self._stack[-1].take(self._given[name], self._stack[:-1], storages, self.input_addresses[name])

        return hook

    def _ends(self, name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            self._pause()
            outputs = [tensor for tensor in _tensors_of(output) if tensor.is_floating_point()]
            self.shapes[name] = tuple(outputs[0].shape) if outputs else ()
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
                saves = self._done is self.forward and not self.saves_nothing
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

    def _push(self, name: str) -> None:
        self._pause()
        self._stack.append(Frame(name))
        self._resume()

    def _pop_to(self, name: str) -> None:
        """Close the frames from the innermost to ``name``; the parent of ``name`` then begins another segment."""
        self._pause()
        while self._stack:
            frame = self._stack.pop()
            passed = self._done.setdefault(frame.name, Passed())
            passed.add(frame, above_start=self.saves_nothing and self._done is self.forward)
            if self._stack:
                self._stack[-1].segments[-1].inside_bytes = frame.left_bytes
                self._stack[-1].segments.append(Segment())
            if frame.name == name:
                break


def _is_inside(name: str, other: str) -> bool:
    return other == "" or name.startswith(f"{other}.")


def _storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Return the bytes of the tensors' storages by address."""
    import torch

    storages = (tensor.untyped_storage() for tensor in tensors if tensor.layout == torch.strided)
    return {storage.data_ptr(): int(storage.nbytes()) for storage in storages}


def _tensors_of(output: Any) -> list[Any]:
    if hasattr(output, "__dict__") and not isinstance(output, (dict, tuple, list)) and not hasattr(output, "shape"):
        output = vars(output)
    return list(tensors_in(output))


def _call_at_end(function: Callable[[], None]) -> None:
    import torch

    torch.autograd.Variable._execution_engine.queue_callback(function)
