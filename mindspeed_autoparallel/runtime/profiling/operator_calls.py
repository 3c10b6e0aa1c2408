"""Operator calls as data: written by a trace, looked up in the knowledge base, replayed on a device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as distributed
from torch.utils._pytree import tree_iter

from mindspeed_autoparallel.profiles.knowledge import Operator, Signature
from mindspeed_autoparallel.profiles.knowledge.signature import (
    Argument,
    Call,
    ConstantArgument,
    NamedArguments,
    SizeArgument,
    TensorArgument,
)

_FREE = frozenset(
    {
        *("alias", "as_strided", "chunk", "detach", "empty", "empty_like", "empty_strided", "expand", "lift_fresh"),
        *("narrow", "new_empty", "new_empty_strided", "permute", "resize_", "select", "set_", "slice", "split"),
        *("split_with_sizes", "squeeze", "squeeze_", "t", "transpose", "unbind", "unsqueeze", "unsqueeze_", "view"),
        *("_unsafe_view", "_local_scalar_dense", "item", "unflatten", "view_as_real", "_reshape_alias", "t_"),
        *("transpose_", "is_same_size", "sym_size", "sym_stride"),
    }
)
"""Operators that compute nothing: they cost the host's time only."""

_SMALL = 8
"""Integers up to this are choices (dimensions, flags); larger ones are sizes."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One call on a process group."""

    name: str
    """Name in ``profiles.device.COLLECTIVES``."""
    size_bytes: int
    """The largest tensor of the call on one rank."""
    ranks: tuple[int, ...]
    """Global ranks, in the group's order."""


_COLLECTIVES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "broadcast": "broadcast",
    "send": "p2p",
    "recv": "p2p",
}


def collective_of(name: str, tensors: Iterable[Any], args: Any) -> Collective | None:
    """Return the call of an operator ``c10d.*`` on a group of several ranks; ``None`` for any other."""
    kind = _COLLECTIVES.get(name.split(".")[1].rstrip("_"))
    ranks = _ranks(args)
    if kind is None or len(ranks) < 2:
        return None
    return Collective(name=kind, size_bytes=largest_bytes(tensors), ranks=ranks)


def largest_bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes of the largest of ``tensors``; 0 without any."""
    return max((tensor.numel() * tensor.element_size() for tensor in tensors), default=0)


def _ranks(args: Any) -> tuple[int, ...]:
    for item in tree_iter(args):
        if isinstance(item, torch.ScriptObject):
            try:
                group = distributed.ProcessGroup.unbox(item)
            except (RuntimeError, TypeError):
                continue  # a reduce operation
            return tuple(distributed.get_process_group_ranks(group))
    return ()


def is_free(name: str) -> bool:
    """Return whether ``name`` (``aten.view.default``) runs nothing on the device: views, allocations, Python's own."""
    return name.split(".")[1] in _FREE if name.startswith("aten.") else name.startswith("prim")


def operator_of(name: str, args: Any, kwargs: Any) -> Operator:
    """Return the call without tensor values: the signature has dtypes, orders of dimensions and small integers;
    sizes are separate."""
    sizes: list[int] = []
    call = Call(tuple(_describe(item, sizes) for item in args), _named(kwargs or {}, sizes))
    return Operator(name=name, signature=Signature(call), sizes=tuple(sizes))


def _named(values: Mapping[Any, Any], sizes: list[int]) -> NamedArguments:
    return NamedArguments(tuple((str(key), _describe(item, sizes)) for key, item in values.items()))


def _describe(value: Any, sizes: list[int]) -> Argument:
    if isinstance(value, torch.Tensor):
        sizes.extend(value.shape)
        return TensorArgument(str(value.dtype).removeprefix("torch."), tuple(_order(value)))
    if isinstance(value, bool) or value is None or isinstance(value, (str, float)):
        return value
    if isinstance(value, int):
        if abs(value) <= _SMALL:
            return value
        sizes.append(value)
        return SizeArgument()
    if isinstance(value, (list, tuple)):
        return tuple(_describe(item, sizes) for item in value)
    return _named(value, sizes) if isinstance(value, dict) else ConstantArgument(str(value))


def _order(tensor: Any) -> list[int]:
    """Return the dimensions from the slowest to the fastest in memory, which decide the kernel, regardless of padding.

    The stride of a dimension with one element is irrelevant: it counts as placed before the next one.
    """
    strides, sizes = list(tensor.stride()), tensor.shape
    for axis in reversed(range(tensor.dim())):
        if sizes[axis] == 1:
            is_last = axis + 1 == tensor.dim()
            strides[axis] = 1 if is_last else strides[axis + 1] * sizes[axis + 1]
    return sorted(range(tensor.dim()), key=lambda axis: (-strides[axis], axis))


def rebuild_arguments(operator: Operator, device: Any) -> tuple[list[Any], dict[str, object]]:
    """Return arguments for ``operator`` on ``device``: the traced shapes, dtypes and orders, with generated values.

    Raises ``ValueError`` if the signature or an argument is unknown.
    """
    call, sizes = operator.signature.content, iter(operator.sizes)
    if not isinstance(call, Call):
        raise ValueError(f"{operator.signature.text} is not the signature of a call")
    return _build(call.args, sizes, device), _build(call.kwargs, sizes, device)


def _build(value: Argument, sizes: Iterator[int], device: Any) -> Any:
    if isinstance(value, tuple):
        return [_build(item, sizes, device) for item in value]
    if isinstance(value, NamedArguments):
        return {key: _build(item, sizes, device) for key, item in value.items}
    if isinstance(value, SizeArgument):
        return next(sizes)
    if isinstance(value, ConstantArgument):
        return _constant(value.text, device)
    if isinstance(value, TensorArgument):
        return _tensor([next(sizes) for _ in value.order], value.order, value.dtype, device)
    return value


def _tensor(shape: list[int], order: Sequence[int], dtype_name: str, device: Any) -> Any:
    dtype = getattr(torch, dtype_name)
    in_memory = [shape[axis] for axis in order]
    if dtype.is_floating_point:
        tensor = torch.rand(in_memory, device=device, dtype=torch.float32).to(dtype)
    elif dtype is torch.bool:
        tensor = torch.arange(max(1, math.prod(in_memory)), device=device).remainder(2).bool()
        tensor = tensor[: math.prod(in_memory)].reshape(in_memory)
    else:
        # Zero is a valid index into anything.
        tensor = torch.zeros(in_memory, device=device, dtype=dtype)
    back = [order.index(axis) for axis in range(len(order))]
    return tensor.permute(back)


def _constant(text: str, device: Any) -> Any:
    kind, _, name = text.partition(".")
    if kind == "torch" and hasattr(torch, name):
        return getattr(torch, name)
    if text.startswith(("cpu", "cuda", "npu", "meta")):
        return device
    raise ValueError(f"argument {text!r} cannot be generated")
