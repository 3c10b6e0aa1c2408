"""Marks time and live memory at block boundaries while the host runs one microbatch forward and backward.

Forward boundaries are module hooks. Backward boundaries are tensor hooks on the layers' outputs: they fire when the
gradient of that tensor is ready, and unlike module backward hooks they add no node to the graph, so the saved tensors
are those of the user's training.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_autoparallel.runtime.devices.adapter import MemoryProbe
from mindspeed_autoparallel.runtime.devices.cpu.storages import tensors_in
from mindspeed_autoparallel.runtime.profiling.measure.structure import Stack


class SideInputs:
    """Storages of a stack's inputs other than the hidden states, by weak references that do not keep them alive."""

    def __init__(self, storages: list[Any]) -> None:
        self._followed = [(weakref.ref(storage), int(storage.nbytes())) for storage in storages]
        self._kept: list[tuple[Any, int]] = []

    @classmethod
    def of(cls, arguments: Any, stream: Any, module: Any) -> SideInputs:
        """Return distinct storages of ``arguments`` that are neither ``stream`` nor the module's own."""
        own = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}
        if stream is not None:
            own.add(stream.untyped_storage()._cdata)
        found = {}
        for tensor in tensors_in(arguments):
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                found[storage._cdata] = storage
        return cls(list(found.values()))

    def see_forward_end(self) -> None:
        """Note which storages are alive; call it after the forward of the microbatch."""
        self._kept = [(reference, size) for reference, size in self._followed if reference() is not None]

    def total_and_kept_bytes(self) -> tuple[int, int]:
        """Return the bytes of all, and of those alive after the forward; call it after the backward.

        Storages that are still alive then are a cache, which counts as the host's own, not here.
        """
        cached = {id(reference) for reference, _ in self._followed if reference() is not None}
        return (
            sum(size for reference, size in self._followed if id(reference) not in cached),
            sum(size for reference, size in self._kept if id(reference) not in cached),
        )


@dataclass(frozen=True)
class Mark:
    """A measurement at a point of the run."""

    name: str
    """``forward <stack> <boundary>`` or ``backward <stack> <boundary>``; boundary 0 is before the first layer."""
    clock: Any
    """Seconds, or a device event."""
    live_bytes: int
    peak_bytes: int
    """Peak since the previous mark."""
    tensor_bytes: int
    """Bytes of the boundary's tensor (or its gradient); 0 without one."""


class Recorder:
    """Collects the marks of one microbatch. ``clock`` returns seconds or a device event; ``memory`` may be None."""

    def __init__(
        self, stacks: Sequence[Stack], clock: Callable[[], Any], memory: MemoryProbe | None, model: Any = None
    ) -> None:
        self.model = model
        self.side: dict[str, SideInputs] = {}
        self.input_bytes: dict[str, int] = {}
        """Bytes of each stack's input: for an encoder its share of the batch."""
        self.stacks = stacks
        self.clock = clock
        self.memory = memory
        self.marks: list[Mark] = []
        self.shapes: dict[str, tuple[int, ...]] = {}

    def mark(self, name: str, tensor: Any = None) -> None:
        """Record a point now."""
        live = peak = 0
        if self.memory is not None:
            live, peak = self.memory.current_bytes(), self.memory.take_peak_bytes()
        size = 0 if tensor is None else tensor.numel() * tensor.element_size()
        self.marks.append(Mark(name, self.clock(), live, max(live, peak), size))

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Hook every boundary of every stack within the context; its end always removes the hooks."""
        handles: list[Any] = []
        try:
            if self.model is not None:
                handles.append(self.model.register_forward_pre_hook(lambda *unused: self.mark("forward loaded")))
                handles.append(self.model.register_forward_hook(lambda *unused: self.mark("forward computed")))
            for stack in self.stacks:
                first = stack.layers[0]
                handles.append(stack.top.register_forward_pre_hook(self._given(stack), with_kwargs=True))
                handles.append(first.register_forward_pre_hook(self._before(stack), with_kwargs=True))
                for index, layer in enumerate(stack.layers):
                    handles.append(layer.register_forward_hook(self._after(stack, index + 1), with_kwargs=True))
                handles.append(stack.top.register_forward_hook(self._end(stack), with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def forward_step(self, host_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the host's forward step with marks at its beginning and when its loss is ready."""

        def step(*args: Any, **kwargs: Any) -> Any:
            self.mark("forward begin")
            output, loss_function, *rest = host_step(*args, **kwargs)
            self.mark("forward returned")

            def loss(*loss_args: Any, **loss_kwargs: Any) -> Any:
                result = loss_function(*loss_args, **loss_kwargs)
                self.mark("forward end")
                for side in self.side.values():
                    side.see_forward_end()
                return result

            return (output, loss, *rest)

        return step

    def _given(self, stack: Stack) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, object]) -> None:
            tensors = [tensor for tensor in tensors_in((args, kwargs)) if tensor.is_floating_point()]
            self.input_bytes[stack.name] = sum(tensor.numel() * tensor.element_size() for tensor in tensors)

        return hook

    def _before(self, stack: Stack) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, object]) -> None:
            stream = first_tensor((args, kwargs))
            self._boundary(stack, 0, stream)
            if self.memory is not None:
                self.side[stack.name] = SideInputs.of((args, kwargs), stream, module)

        return hook

    def _after(self, stack: Stack, boundary: int) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            self._boundary(stack, boundary, first_tensor(output))

        return hook

    def _end(self, stack: Stack) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            self._boundary(stack, len(stack.layers) + 1, first_tensor(output))

        return hook

    def _boundary(self, stack: Stack, boundary: int, tensor: Any) -> None:
        name = f"{stack.name} {boundary}"
        self.mark(f"forward {name}", tensor)
        if tensor is not None:
            self.shapes[name] = tuple(tensor.shape)
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self.mark(f"backward {name}", gradient))


def first_tensor(value: Any) -> Any:
    """Return the first floating point tensor in nested arguments or outputs, or None."""
    import torch

    if isinstance(value, torch.Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, dict):
        # Megatron's name of a layer's hidden states; masks and rotary embeddings are further arguments.
        value = [value["hidden_states"], *value.values()] if "hidden_states" in value else list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            tensor = first_tensor(item)
            if tensor is not None:
                return tensor
    return None
