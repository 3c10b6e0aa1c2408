"""Bytes that each module keeps for backward: autograd saves them while it is the innermost running module."""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from mindspeed_autoparallel.runtime.devices.cpu.edits import Edits, replaced
from mindspeed_autoparallel.runtime.devices.cpu.storages import tensors_in
from mindspeed_autoparallel.runtime.fsdp2.timeline import Timeline


@dataclass
class SavedBytes:
    """Bytes of one step by module name, without parameters; every storage is counted once."""

    inputs: dict[str, int] = field(default_factory=dict)
    """Bytes of the module's own input, if the module saves it (or, for a layer, a module inside it)."""
    kept: dict[str, dict[int, int]] = field(default_factory=dict)
    """Bytes of other storages, by the number of submodules that had run when they were saved."""
    saving: set[tuple[str, int]] = field(default_factory=set)
    """Module and number of submodules that had run at every save, of parameters and counted storages, too."""

    around: dict[str, int] = field(default_factory=dict)
    """Less than 0 by the bytes that the module around it, and those inside that one, had saved at its start."""

    def split(self, name: str, num_segments: int) -> tuple[int, int]:
        """Return the kept bytes saved before the end of the last submodule of ``name``, and those saved after it."""
        parts = self.kept.get(name, {})
        tail = parts.get(num_segments - 1, 0) if num_segments > 1 else 0
        return sum(parts.values()) - tail, tail

    def tail_saves(self, name: str, num_segments: int) -> bool:
        """Return whether anything was saved after the last submodule of ``name`` had run."""
        return num_segments > 1 and (name, num_segments - 1) in self.saving


@contextlib.contextmanager
def saved_bytes(timeline: Timeline, layers: Collection[str]) -> Iterator[SavedBytes]:
    """Fill the result while one step runs inside the block; ``timeline`` must be attached and started."""
    import torch

    found, seen = SavedBytes(), set[int]()

    def pack(tensor: Any) -> Any:
        innermost = timeline.innermost
        if innermost is not None:
            found.saving.add(innermost)
        if innermost is None or tensor.layout != torch.strided or _is_parameter(tensor):
            return tensor
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), int(storage.nbytes())
        if address and address not in seen:
            seen.add(address)
            timeline.note_saved(address, size)
            name, place = innermost
            owners = [one for one in timeline.open_names if one in layers or one == name]
            owner = next((one for one in owners if address == timeline.input_addresses.get(one)), None)
            if owner is not None:
                found.inputs[owner] = found.inputs.get(owner, 0) + size
            else:
                parts = found.kept.setdefault(name, {})
                parts[place] = parts.get(place, 0) + size
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


@contextlib.contextmanager
def nothing_saved(optimizer: Any) -> Iterator[None]:
    """Save no activation inside the block, as in the first forward of a recomputed layer; backward gets ones instead.

    Its gradients mean nothing, so ``optimizer.step`` changes no parameter. Integers and masks stay, as kernels,
    exchanges and indexing take their sizes from them.
    """
    import torch

    def pack(tensor: Any) -> Any:
        if not tensor.is_floating_point() or tensor.layout != torch.strided or _is_parameter(tensor):
            return tensor
        return tensor.shape, tensor.dtype, tensor.device

    def unpack(packed: Any) -> Any:
        if isinstance(packed, torch.Tensor):
            return packed
        shape, dtype, device = packed
        return torch.ones(shape, dtype=dtype, device=device)

    no_update = replaced(optimizer, "step", lambda *_, **__: None)
    with no_update, torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _is_parameter(tensor: Any) -> bool:
    """Return whether ``tensor`` is a parameter or a view of one, such as the weights that ``linear`` saves."""
    import torch

    base = tensor._base if tensor._base is not None else tensor
    return isinstance(base, torch.nn.Parameter)


_OPERATORS = (
    ("torch.nn.functional", "scaled_dot_product_attention"),
    ("torch_npu", "npu_fusion_attention"),
    ("transformers.integrations.flash_attention", "_flash_attention_forward"),
)
_TAKEN = 3
"""Number of leading tensor arguments of each operator to count: queries, keys and values."""


@dataclass
class AttentionCalls:
    """Sums over one step, by module name: microseconds, and bytes."""

    us: dict[str, float] = field(default_factory=dict)
    output_bytes: dict[str, int] = field(default_factory=dict)
    exchanged_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes of queries, keys, values and outputs, which Ulysses exchanges."""


@contextlib.contextmanager
def attention_calls(innermost: Callable[[], str | None], synchronize: Callable[[], None]) -> Iterator[AttentionCalls]:
    """Time the attention operators that run inside the block, each for the module that ``innermost`` returns."""
    calls, edits = AttentionCalls(), Edits()
    for module_name, name in _OPERATORS:
        with contextlib.suppress(ImportError):
            module = importlib.import_module(module_name)
            if callable(original := getattr(module, name, None)):
                edits.set(module, name, _counting(original, calls, innermost, synchronize))
    try:
        yield calls
    finally:
        edits.undo()


def _counting(
    original: Callable[..., Any],
    calls: AttentionCalls,
    innermost: Callable[[], str | None],
    synchronize: Callable[[], None],
) -> Callable[..., Any]:
    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        name = innermost()
        synchronize()
        begin = time.perf_counter()
        result = original(*args, **kwargs)
        synchronize()
        if name is not None:
            kept = [tensor for tensor in tensors_in(result) if tensor.is_floating_point()]
            output = kept[0]
            taken = [_bytes(tensor) for tensor in list(tensors_in((args, kwargs)))[:_TAKEN]]
            calls.us[name] = calls.us.get(name, 0.0) + (time.perf_counter() - begin) * 1e6
            # An operator that returns only its output saves the log-sum-exp of every row internally, in fp32.
            sums = 4 * output.numel() // output.shape[-1] if len(kept) == 1 else 0
            calls.output_bytes[name] = calls.output_bytes.get(name, 0) + sum(map(_bytes, kept)) + sums
            calls.exchanged_bytes[name] = calls.exchanged_bytes.get(name, 0) + _bytes(output) + sum(taken)
        return result

    return counted


def _bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())
