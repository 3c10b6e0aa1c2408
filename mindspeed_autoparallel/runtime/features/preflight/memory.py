"""Peaks of device memory by place: the pass, its microbatch, and the layer inside."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from mindspeed_autoparallel.runtime.devices.adapter import MemoryProbe
from mindspeed_autoparallel.runtime.profiling.measure.recorder import first_tensor


class PeakPlaces:
    """The peak of a step and its place. Without a probe it tracks only the place, for error messages."""

    def __init__(self) -> None:
        self.probe: MemoryProbe | None = None
        self.place = "start of the step"
        self._kind = "between passes"
        self.peak_bytes = 0
        self.peak_place = ""
        self.by_kind: dict[str, int] = defaultdict(int)
        self.layer_bytes: dict[str, int] = {}

    def enter(self, kind: str, place: str) -> None:
        """Close the current place and begin another; ``kind``: its row in ``by_kind``."""
        self.close()
        self._kind, self.place = kind, place

    def close(self) -> None:
        """Assign the peak since the last call to the current place."""
        if self.probe is None:
            return
        peak = self.probe.take_peak_bytes()
        self.by_kind[self._kind] = max(self.by_kind[self._kind], peak)
        if peak > self.peak_bytes:
            self.peak_bytes, self.peak_place = peak, self.place


class LayerMarks:
    """Hooks on the layers of the model's chunks that name the place inside a pass."""

    def __init__(self, places: PeakPlaces) -> None:
        self._places = places
        self.current_pass = ""
        self.is_backward = False
        self._handles: list[Any] = []

    def attach(self, chunks: Sequence[Any]) -> None:
        """Register the hooks on the layers of ``chunks``."""
        for chunk in chunks:
            for name, layer in _layers(chunk):
                self._handles.append(layer.register_forward_pre_hook(self._before(name)))
                self._handles.append(layer.register_forward_hook(self._after(name)))

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, name: str) -> Any:
        def hook(module: Any, args: Any) -> None:
            kind = "recompute" if self.is_backward else "forward"
            self._places.enter(kind, f"{kind} of {name} in the {self.current_pass}")
            if self._places.probe is not None:
                self._began = self._places.probe.current_bytes()

        return hook

    def _after(self, name: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            if self._places.probe is not None and not self.is_backward:
                self._places.layer_bytes[name] = max(0, self._places.probe.current_bytes() - self._began)
            kind = "backward" if self.is_backward else "forward"
            self._places.enter(kind, f"{self.current_pass}, after {name}")
            tensor = first_tensor(output)
            if tensor is not None and tensor.requires_grad:
                tensor.register_hook(self._backward(name))

        return hook

    def _backward(self, name: str) -> Any:
        def hook(gradient: Any) -> None:
            self._places.enter("backward", f"backward of {name} in the {self.current_pass}")

        return hook


def _layers(chunk: Any) -> list[tuple[str, Any]]:
    """Return the outermost items of the chunk's module lists that hold parameters, named by Megatron's layer number."""
    from torch.nn import ModuleList

    found: list[tuple[str, Any]] = []
    taken: list[str] = []
    for path, module in chunk.named_modules():
        if not isinstance(module, ModuleList) or any(path.startswith(f"{outer}.") for outer in taken):
            continue
        taken.append(path)
        plain = path.replace("module.", "")
        for index, layer in enumerate(module):
            if next(layer.parameters(), None) is not None:
                number = getattr(layer, "layer_number", index + 1)
                found.append((f"{plain}[{int(number) - 1}]", layer))
    return found
