"""What a layer is given beside the hidden states, and how long it lives: rotary tables, masks, sequence marks."""

from __future__ import annotations

import weakref
from typing import Any

from mindspeed_autoparallel.runtime.devices.cpu.storages import tensors_in


class SideInputs:
    """Storages by size, followed weakly: watching must not keep them."""

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
        """Call where the forward of the microbatch is over."""
        self._kept = [(reference, size) for reference, size in self._followed if reference() is not None]

    def total_and_kept_bytes(self) -> tuple[int, int]:
        """Call after the backward. What is alive even then is a cache, and counts as the host's own, not here."""
        cached = {id(reference) for reference, _ in self._followed if reference() is not None}
        return (
            sum(size for reference, size in self._followed if id(reference) not in cached),
            sum(size for reference, size in self._kept if id(reference) not in cached),
        )
