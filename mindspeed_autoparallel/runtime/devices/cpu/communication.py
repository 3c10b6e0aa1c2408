"""Replaces nccl and hccl with gloo, and device meshes of accelerators with meshes of CPU processes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from mindspeed_autoparallel.runtime.devices.cpu.edits import Edits
from mindspeed_autoparallel.runtime.devices.cpu.tensors import names_accelerator


def install(edits: Edits) -> None:
    """Wrap the functions that take a backend or a device, and the transfers that gloo restricts."""
    import torch.distributed as distributed
    from torch.distributed import distributed_c10d

    initialize, new_group = distributed.init_process_group, distributed.new_group

    @functools.wraps(initialize)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        for name in ("device_id", "pg_options"):
            kwargs.pop(name, None)  # they refer to a GPU
        return initialize(_gloo(backend) or "gloo", *args, **kwargs)

    @functools.wraps(new_group)
    def new_gloo_group(
        ranks: Any = None, timeout: Any = None, backend: Any = None, pg_options: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        kwargs.pop("device_id", None)
        return new_group(ranks, timeout, _gloo(backend), None, *args, **kwargs)

    barrier = distributed.barrier

    @functools.wraps(barrier)
    def gloo_barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return barrier(group, async_op)  # gloo refuses device_ids

    isend = distributed.isend

    @functools.wraps(isend)
    def sent_from_its_storage(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        # Megatron frees a sent tensor's data at once (deallocate_pipeline_outputs). Accelerators' libraries keep the
        # storage until it is sent; gloo keeps only the tensor, whose storage was replaced. Fake groups send nothing.
        group = kwargs.get("group", args[1] if len(args) > 1 else None)
        return isend(tensor.detach() if distributed.get_backend(group) == "gloo" else tensor, *args, **kwargs)

    make_mesh = distributed.DeviceMesh.__init__

    @functools.wraps(make_mesh)
    def mesh_of_processes(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        # Megatron's FSDP names "cuda", and fully_shard requires parameters on the device of their mesh.
        make_mesh(self, "cpu" if names_accelerator(device_type) else device_type, *args, **kwargs)

    edits.set(distributed.DeviceMesh, "__init__", mesh_of_processes)
    gather_unequal = _gathers_of_unequal_sizes(distributed)
    for module in (distributed, distributed_c10d):
        edits.set(module, "all_gather", gather_unequal)
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
            edits.set(module, name, _of_stacks(getattr(module, name)))
        edits.set(module, "isend", sent_from_its_storage)
        edits.set(module, "barrier", gloo_barrier)
        edits.set(module, "init_process_group", init_process_group)
        edits.set(module, "new_group", new_gloo_group)


def _gathers_of_unequal_sizes(distributed: Any) -> Callable[..., Any]:
    """Return ``all_gather`` that pads tensors of unequal sizes for gloo."""
    all_gather = distributed.all_gather

    @functools.wraps(all_gather)
    def gather_unequal(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        # Accelerators' libraries accept parts of unequal sizes, such as tokens of experts; for gloo they are padded.
        sizes = [part.numel() for part in tensor_list]
        if len(set(sizes)) < 2 or distributed.get_backend(group) != "gloo":
            return all_gather(tensor_list, tensor, group, async_op)
        padded = tensor.new_zeros(max(sizes))
        padded[: tensor.numel()] = tensor.detach().reshape(-1)
        parts = [padded.new_empty(max(sizes)) for _ in sizes]
        work = all_gather(parts, padded, group, async_op)
        if async_op:
            work.wait()
        for part, size, gathered in zip(tensor_list, sizes, parts, strict=True):
            part.data.copy_(gathered[:size].view_as(part))
        return work

    return gather_unequal


def _of_stacks(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``collective`` that takes one more axis, of ranks, on the larger of its tensors, for gloo."""
    names = tuple(inspect.signature(collective).parameters)[:2]

    @functools.wraps(collective)
    def of_stacks(*args: Any, **kwargs: Any) -> Any:
        kwargs |= zip(names, args, strict=False)
        output, given = (kwargs.pop(name) for name in names)
        # Accelerators' libraries count elements alone.
        more = output.dim() - given.dim()
        if more == 1 and given.dim():
            output = output.flatten(0, 1)
        elif more == -1 and output.dim():
            given = given.flatten(0, 1)
        return collective(output, given, *args[2:], **kwargs)

    return of_stacks


def _gloo(backend: Any) -> Any:
    """Return ``gloo`` for an accelerator's backend; return others, and None (the default group's), unchanged."""
    if backend is None or str(backend) == "fake":
        return backend
    return "gloo" if any(name in str(backend) for name in ("nccl", "hccl")) else backend
