"""A process in which nothing is computed: other ranks, tensor data and the routing of tokens are fake.

Tensors have shapes only (torch's fake tensors), collectives return at once (torch's fake process group). Tensors that
need values stay real: the routing of tokens to experts, which is replaced by a perfectly balanced one, and everything
computed from it, so that sizes that depend on data come out as in a balanced training.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_map

from mindspeed_autoparallel.patching import call_after_import
from mindspeed_autoparallel.profiles.knowledge import Operator
from mindspeed_autoparallel.runtime.devices.cpu.storages import TrackedStorages, tensors_in
from mindspeed_autoparallel.runtime.profiling.operator_calls import Collective, collective_of, is_free, operator_of


def is_fake(tensor: Any) -> bool:
    """Return whether ``tensor`` has a shape only."""
    return isinstance(tensor, FakeTensor)


def really() -> Any:
    """Return a context in which new tensors have data."""
    return unset_fake_temporarily()


def run_on_shapes(function: Any, name: str, tensors: Sequence[torch.Tensor], args: Any, kwargs: Any) -> Any:
    """Run an operator: with data if all its tensors have data, else on shapes.

    ``name``: of the operator; ``tensors``: all among its arguments.
    """
    if tensors and not any(is_fake(tensor) for tensor in tensors):
        with really():
            return function(*args, **kwargs)
    if name == "aten.masked_select.default" and not is_fake(args[1]):
        # The size depends on the mask, which has data.
        with really():
            size = int(args[1].expand(args[0].shape).sum())
        return args[0].new_empty(size)
    return function(*args, **kwargs)


@dataclass
class Log:
    """Calls in the order they ran; a mark's clock is a place in it."""

    operators: list[Operator | None] = field(default_factory=list)
    """``None`` for a call that computes nothing; it still costs the host's time."""
    collectives: dict[int, Collective] = field(default_factory=dict)
    """Collectives by index of the call."""


class Tracer(TrackedStorages):
    """Runs operators on fake and real tensors, counts the storages of both and hands every call to ``_record``."""

    def _record(self, name: str, tensors: Sequence[torch.Tensor], args: Any, kwargs: Any) -> None:
        raise NotImplementedError

    def _run(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        tensors = list(tensors_in((args, kwargs)))
        self._record(name, tensors, args, kwargs)
        if name == "aten._local_scalar_dense.default" and is_fake(args[0]):
            # Numbers are only logged or checked here: return 1, and False for flags.
            return {torch.bool: False}.get(args[0].dtype, 1.0 if args[0].is_floating_point() else 1)
        return run_on_shapes(function, name, tensors, args, kwargs)

    def _add_storage(self, storage: Any) -> None:
        # Fake tensors live on the meta device, which the base class leaves out.
        self._count(storage)


class FakeTensorTracer(Tracer):
    """Traces a training whose tensors are fake from its first model on: calls in their order."""

    def __init__(self) -> None:
        super().__init__(let_go_s=0.0)
        from torch._subclasses.fake_tensor import FakeTensorMode

        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.log = Log()

    def as_fake(self, value: Any) -> Any:
        """Return ``value`` with every tensor replaced by a fake one, which lives at least as long as the tensor."""

        def convert(item: Any) -> Any:
            if not isinstance(item, torch.Tensor):
                return item
            shape = self.fake_mode.from_tensor(item)
            self._add(shape)
            item.fake = shape  # code that keeps the batch (Megatron's rerun machine) keeps this
            return shape

        return tree_map(convert, value)

    def _record(self, name: str, tensors: Sequence[torch.Tensor], args: Any, kwargs: Any) -> None:
        if name.startswith("c10d."):
            collective = collective_of(name, tensors, args)
            if collective is not None:
                self.log.collectives[len(self.log.operators)] = collective
            self.log.operators.append(None)
        elif name.startswith("aten."):
            self.log.operators.append(None if is_free(name) else operator_of(name, args, kwargs))


def use_fake_process_groups() -> None:
    """Make process groups torch's fake ones from now on: every collective returns at once."""
    import torch.distributed as distributed
    from torch.distributed import distributed_c10d
    from torch.testing._internal.distributed.fake_pg import FakeStore

    initialize, new_group = distributed.init_process_group, distributed.new_group

    def init_process_group(*unused: Any, rank: int = -1, world_size: int = -1, **unused_too: Any) -> Any:
        own_rank = rank if rank >= 0 else int(os.environ.get("RANK", "0"))
        num_ranks = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "1"))
        return initialize("fake", rank=own_rank, world_size=num_ranks, store=FakeStore())

    def new_fake_group(ranks: Any = None, timeout: Any = None, *unused: Any, **kwargs: Any) -> Any:
        kept = {name: value for name, value in kwargs.items() if name in ("group_desc", "use_local_synchronization")}
        return new_group(ranks, timeout, None, **kept)

    def all_gather_object(found: list[Any], own: Any, group: Any = None) -> None:
        found[:] = [own] * len(found)

    def gather_object(own: Any, found: list[Any] | None = None, *unused: Any, **unused_too: Any) -> None:
        if found is not None:
            found[:] = [own] * len(found)

    def broadcast_object_list(*unused: Any, **unused_too: Any) -> None:
        return None

    replaced = (init_process_group, all_gather_object, gather_object, broadcast_object_list)
    for module in (distributed, distributed_c10d):
        for function in replaced:
            setattr(module, function.__name__, function)
        module.new_group = new_fake_group


def silence_timers() -> None:
    """Disable Megatron's timer logs: 0.12 gathers and compares the values of tensors there."""
    from megatron.core.timers import Timers

    for name in ("log", "write"):
        setattr(Timers, name, _say_nothing)


def _say_nothing(*unused: object, **unused_too: object) -> None:
    """Do nothing, in place of a function whose output is not read."""


def convert_by_replacing() -> None:
    """Convert modules by replacing parameters: torch swaps fake ones in place, which fails on referenced ones."""

    def apply(self: Any, function: Callable[..., Any], recurse: bool = True) -> Any:
        for child in self.children() if recurse else ():
            child._apply(function)
        for key, parameter in self._parameters.items():
            if parameter is None:
                continue
            with torch.no_grad():
                applied = function(parameter)
            if applied is not parameter:
                self._parameters[key] = torch.nn.Parameter(applied, parameter.requires_grad)
                # Megatron marks parameters: sharding, experts, sequence parallelism.
                self._parameters[key].__dict__.update(parameter.__dict__)
        for key, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[key] = function(buffer)
        return self

    torch.nn.Module._apply = apply


def keep_dispatch_real() -> None:
    """Keep data in the tensors that a token dispatcher computes from the routing, although its tokens have none."""
    call_after_import("megatron.core.transformer.moe.token_dispatcher", _keep_dispatchers_real)


def _keep_dispatchers_real(module: Any) -> None:
    for value in vars(module).values():
        if isinstance(value, type) and value.__module__ == module.__name__:
            for name in ("__init__", "preprocess"):
                if name in vars(value):
                    setattr(value, name, _really(vars(value)[name]))
    if hasattr(module, "gather_from_sequence_parallel_region"):
        module.gather_from_sequence_parallel_region = _gathered_routing(module.gather_from_sequence_parallel_region)


def _gathered_routing(gather: Callable[..., Any]) -> Callable[..., Any]:
    """Keep data of gathered tensors: fake ranks route their tokens like this one."""

    @functools.wraps(gather)
    def run(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        import torch.distributed as distributed
        from torch.utils._python_dispatch import _disable_current_modes

        if is_fake(tensor) or distributed.get_backend(kwargs.get("group")) != "fake":
            return gather(tensor, *args, **kwargs)
        with really():
            gathered = gather(tensor, *args, **kwargs)
        with _disable_current_modes(), torch.no_grad():
            gathered.copy_(torch.cat([tensor] * (gathered.shape[0] // tensor.shape[0])))
        return gathered

    return run


def _really(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with really():
            return function(*args, **kwargs)

    return run
