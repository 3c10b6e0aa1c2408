"""Time and bytes of attention operators by module: the saving of a recompute that keeps attention outputs."""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from mindspeed_autoparallel.runtime.devices.cpu.edits import Edits
from mindspeed_autoparallel.runtime.devices.cpu.storages import tensors_in

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
