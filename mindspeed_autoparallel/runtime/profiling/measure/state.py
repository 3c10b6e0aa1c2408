"""Parameters, gradients and optimizer state per block, counted on the model that the host built."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from mindspeed_autoparallel.profiles import layer_block
from mindspeed_autoparallel.profiles.records import BytesPerParameter
from mindspeed_autoparallel.runtime.profiling.measure.costs import blocks_of
from mindspeed_autoparallel.runtime.profiling.measure.structure import Stack


def parameters_by_block(model: Any, stacks: Iterable[Stack], executed: list[str]) -> dict[str, dict[str, list[Any]]]:
    """Return parameters by stack and block: pre, all layers of a kind, post; a shared parameter appears once.

    ``executed``: paths of modules and ``<stack> first`` in the order they ran (see ``execution_order``).
    """
    stacks = list(stacks)
    result: dict[str, dict[str, list[Any]]] = {stack.name: {name: [] for name in blocks_of(stack)} for stack in stacks}
    seen: set[int] = set()

    def give(stack: str, block: str, parameters: Iterable[Any]) -> None:
        for parameter in parameters:
            if id(parameter) not in seen:
                seen.add(id(parameter))
                result[stack][block].append(parameter)

    for stack in stacks:
        for layer, kind in zip(stack.layers, stack.kinds, strict=True):
            give(stack.name, layer_block(kind), layer.parameters())
    for path, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if own:
            give(*_place(path, executed, stacks), own)
    return result


def _place(path: str, executed: list[str], stacks: list[Stack]) -> tuple[str, str]:
    """Return the block of a module outside the layers, by the time it ran and its top-level parent."""
    owners = [stack for stack in stacks if stack.path.split(".")[0] == path.split(".")[0]]
    ran = executed.index(path) if path in executed else -1
    for stack in owners or stacks:
        first = executed.index(f"{stack.name} first") if f"{stack.name} first" in executed else len(executed)
        if ran < first:
            return stack.name, "pre"
    return (owners or stacks)[-1].name, "post"


def execution_order(model: Any, stacks: Iterable[Stack]) -> tuple[list[str], list[Any]]:
    """Return a list that fills with module paths as they run, and the hook handles to remove afterwards."""
    order: list[str] = []
    handles = [
        module.register_forward_pre_hook(lambda module, args, path=path: order.append(path))
        for path, module in model.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    ]
    for stack in stacks:
        name = f"{stack.name} first"
        handles.append(stack.layers[0].register_forward_pre_hook(lambda module, args, name=name: order.append(name)))
    return order, handles


def bytes_per_parameter(model: Any, optimizer: Any, num_replicas: int, missing_bytes: int = 0) -> BytesPerParameter:
    """Return gradient and optimizer bytes per trained parameter, after a step.

    ``num_replicas``: ranks over which a distributed optimizer shards its state, else 1. ``missing_bytes``: state that
    the first step will create, if none was taken.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        return BytesPerParameter(gradient=0.0, optimizer=0.0)
    count = sum(parameter.numel() for parameter in trained)
    gradients = sum(_gradient_bytes(parameter) for parameter in trained)
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    storages = {
        tensor.untyped_storage()._cdata: tensor.numel() * tensor.element_size()
        for tensor in optimizer_tensors(optimizer)
        if tensor.untyped_storage()._cdata not in own
    }
    state_bytes = sum(storages.values()) + missing_bytes
    return BytesPerParameter(gradient=gradients / count, optimizer=_nearly_whole(state_bytes * num_replicas / count))


def resident_bytes(model: Any, optimizer: Any) -> int:
    """Return the bytes of parameters, gradients and optimizer state that this rank has now; shared ones count once."""
    tensors = list(model.parameters())
    tensors += [parameter.main_grad for parameter in tensors if getattr(parameter, "main_grad", None) is not None]
    buffers = {tensor.untyped_storage()._cdata for tensor in tensors}
    # An fp32 distributed optimizer's master weights are views of the model's own buffer: not a second copy.
    tensors += [item for item in optimizer_tensors(optimizer) if item.untyped_storage()._cdata not in buffers]
    # Sizes of the views, not of their buffers, so that padding counts as the host's own.
    views = {
        (item.untyped_storage()._cdata, item.storage_offset(), item.numel()): item.numel() * item.element_size()
        for item in tensors
    }
    return sum(views.values())


def workspace_bytes() -> int:
    """Return the bytes of Megatron's global memory buffer: a tensor per use and type, of the largest size so far.

    It holds attention scores and gathered sequences, so it grows with the microbatch and outlives it.
    """
    from megatron.core import parallel_state

    buffers = parallel_state.get_global_memory_buffer().buffer.values()
    return sum(tensor.numel() * tensor.element_size() for tensor in buffers)


def release(model: Any, optimizer: Any) -> None:
    """Free the memory of a model's parameters, gradients and optimizer state although references remain."""
    chunks = model if isinstance(model, list) else [model]
    for tensor in list(optimizer_tensors(optimizer)):
        tensor.untyped_storage().resize_(0)
    for parameter in [parameter for chunk in chunks for parameter in chunk.parameters()]:
        for tensor in (parameter, parameter.grad, getattr(parameter, "main_grad", None)):
            if tensor is not None:
                tensor.untyped_storage().resize_(0)


def optimizer_tensors(optimizer: Any) -> Iterator[Any]:
    """Yield every tensor a Megatron optimizer keeps: moments, and master weights in its parameter groups."""
    import torch

    for part in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        inner = getattr(part, "optimizer", part)
        if inner is None:
            continue
        for group in inner.param_groups:
            yield from (item for item in group["params"] if isinstance(item, torch.Tensor))
        for state in inner.state.values():
            yield from (item for item in state.values() if isinstance(item, torch.Tensor) and item.numel() > 1)


def _gradient_bytes(parameter: Any) -> int:
    gradient = getattr(parameter, "main_grad", None)
    if gradient is None:
        gradient = parameter.grad
    return int(parameter.numel() * (gradient.element_size() if gradient is not None else parameter.element_size()))


def _nearly_whole(value: float) -> float:
    # Padding of the shards makes 12 bytes 12.02.
    return float(round(value)) if abs(value - round(value)) < 0.03 * max(1.0, value) else value
