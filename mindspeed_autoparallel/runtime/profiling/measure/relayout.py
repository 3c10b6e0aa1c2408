"""Switches a running Megatron job to another layout and builds the host's model again, without a new launch.

The host's set-up calls (initialise groups, set up model and optimizer, build data iterators) are recorded with their
arguments and called again here, so that the host's own functions do the work.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.profiles.calibration_records import Stages


@dataclass
class RecordedCall:
    """A function of the host and the arguments it was called with."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, object]

    def again(self, **changes: Any) -> Any:
        """Call it once more, with some keyword arguments replaced."""
        return self.function(*self.args, **{**self.kwargs, **changes})


@dataclass
class HostCalls:
    """The host's set-up calls."""

    initialize_model_parallel: RecordedCall | None = None
    setup_model_and_optimizer: RecordedCall | None = None
    build_data_iterators: RecordedCall | None = None
    extra: dict[str, object] = field(default_factory=dict)

    def record(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, object]
    ) -> Any:
        """Record the call and make it."""
        setattr(self, name, RecordedCall(function, args, dict(kwargs)))
        return function(*args, **kwargs)


WHOLE = Stages()


@dataclass(frozen=True)
class Built:
    """The model, optimizer and data that the host built for one layout."""

    model: Any
    optimizer: Any
    data_iterator: Any


def set_arguments(arguments: Any, point: MeasuredAt, world_size: int, stages: Stages = WHOLE) -> None:
    """Set the host's arguments to ``point`` and ``stages``, as flags would."""
    arguments.tensor_model_parallel_size = point.tensor_size
    if getattr(arguments, "tensor_parallel_num_weight_shards", None) is not None:
        # Megatron 0.19 derives it from the tensor-parallel size when it validates its arguments.
        arguments.tensor_parallel_num_weight_shards = point.tensor_size
    arguments.context_parallel_size = point.context_size
    arguments.expert_model_parallel_size = point.expert_size
    if point.expert_tensor_size:
        arguments.expert_tensor_parallel_size = point.expert_tensor_size
        if getattr(arguments, "expert_tensor_parallel_num_weight_shards", None) is not None:
            arguments.expert_tensor_parallel_num_weight_shards = point.expert_tensor_size
    arguments.sequence_parallel = point.sequence_parallel
    arguments.micro_batch_size = point.micro_batch_size
    arguments.pipeline_model_parallel_size = stages.pipeline_size
    arguments.virtual_pipeline_model_parallel_size = stages.virtual_size if stages.interleaved else None
    if stages.pipeline_size > 1:
        # Megatron's checks, which saw the first layout only, turn this overlap off without virtual stages.
        arguments.overlap_p2p_comm = stages.interleaved
        arguments.transformer_pipeline_model_parallel_size = stages.pipeline_size
    shards = point.tensor_size * point.context_size * stages.pipeline_size
    arguments.data_parallel_size = world_size // shards
    replicas = point.micro_batch_size * arguments.data_parallel_size
    arguments.global_batch_size = replicas * stages.num_microbatches


def reinitialize_model_parallel(
    calls: HostCalls, arguments: Any, point: MeasuredAt, world_size: int, stages: Stages = WHOLE
) -> Built:
    """Create process groups for ``point`` cut into ``stages``, and build model, optimizer and data again.

    The previous groups are destroyed. With an interleaved schedule, ``model`` and ``data_iterator`` are lists with an
    entry per chunk.
    """
    from megatron.core import parallel_state
    from megatron.training import initialize

    assert calls.initialize_model_parallel and calls.setup_model_and_optimizer and calls.build_data_iterators
    tear_down(parallel_state)
    set_arguments(arguments, point, world_size, stages)
    recorded = calls.initialize_model_parallel
    args, kwargs = list(recorded.args), dict(recorded.kwargs)
    sizes = {
        "tensor_model_parallel_size": point.tensor_size,
        "pipeline_model_parallel_size": stages.pipeline_size,
        "virtual_pipeline_model_parallel_size": arguments.virtual_pipeline_model_parallel_size,
    }
    for place, (name, size) in enumerate(sizes.items()):
        if name not in kwargs and place < len(args):
            args[place] = size
        else:
            kwargs[name] = size
    kwargs |= {
        name: value
        for name, value in (
            ("context_parallel_size", point.context_size),
            ("expert_model_parallel_size", point.expert_size),
            ("expert_tensor_parallel_size", getattr(arguments, "expert_tensor_parallel_size", None)),
        )
        if name in kwargs
    }
    recorded.function(*args, **kwargs)
    initialize._set_random_seed(arguments.seed, arguments.data_parallel_random_init)
    set_num_microbatches(arguments)
    collection: dict[str, object] = {}  # created again for this layout
    if "pg_collection" in calls.setup_model_and_optimizer.kwargs:
        from megatron.core.process_groups_config import ProcessGroupCollection

        collection["pg_collection"] = ProcessGroupCollection.use_mpu_process_groups()
    container = calls.setup_model_and_optimizer.kwargs.get("cfg_container")
    if container is not None and getattr(container, "model", None) is not None:
        collection["cfg_container"] = container_for(container, arguments)
    model, optimizer, _ = calls.setup_model_and_optimizer.again(**collection)
    if not stages.interleaved:
        return Built(model, optimizer, calls.build_data_iterators.again()[0])
    iterators = [_iterator_of_chunk(calls.build_data_iterators, chunk) for chunk in range(stages.virtual_size)]
    return Built(model, optimizer, iterators)


def container_for(container: Any, arguments: Any) -> Any:
    """Return the ``PretrainConfigContainer`` of Megatron 0.19 and newer for the current ``arguments``.

    Scripts make it once, before Megatron sets itself up: its sizes are the first layout's, and its transformer's
    settings refer to the first model through hooks of the schedules. The script's other model settings do not change.
    """
    from megatron.training import argument_utils

    model: Any = container.model
    is_gpt = isinstance(model, getattr(argument_utils, "GPTModelConfig", ()))
    is_hybrid = isinstance(model, getattr(argument_utils, "HybridModelConfig", ()))
    if is_gpt:
        of_arguments = argument_utils.gpt_config_from_args(arguments, model_config_cls=type(model))
        model = dataclasses.replace(model, transformer=of_arguments.transformer)
    elif is_hybrid:
        of_arguments = argument_utils.hybrid_config_from_args(arguments, model_config_cls=type(model))
        pattern = of_arguments.hybrid_layer_pattern
        model = dataclasses.replace(model, transformer=of_arguments.transformer, hybrid_layer_pattern=pattern)
    return argument_utils.pretrain_cfg_container_from_args(arguments, model)


def _iterator_of_chunk(recorded: RecordedCall, chunk: int) -> Any:
    """Build the data iterator of one chunk like Megatron, which passes the chunk to the provider."""
    from megatron.core import parallel_state

    provider, *rest = recorded.args
    of_chunk = provider
    if "vp_stage" in inspect.signature(provider).parameters:
        of_chunk = functools.partial(provider, vp_stage=chunk)
        vars(of_chunk).update(vars(provider))
    else:
        # Megatron 0.12 names the chunk in a global.
        parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
    return recorded.function(of_chunk, *rest, **recorded.kwargs)[0]


def tear_down(parallel_state: Any) -> None:
    """End Megatron's model parallelism and destroy its process groups, which Megatron only dereferences.

    Every gloo group keeps threads that wake up a hundred times a second, every nccl group keeps its buffers: after
    several layouts they take a third of a core, or the memory of a layer.
    """
    from torch.distributed import destroy_process_group, distributed_c10d

    groups = _groups(parallel_state)
    parallel_state.destroy_model_parallel()
    # Megatron keeps these, and sets them again only on ranks that belong to the new group.
    for name in [name for name in vars(parallel_state) if name.endswith("_GLOBAL_RANKS")]:
        setattr(parallel_state, name, None)
    while groups:
        group = groups.pop()
        # Megatron destroys some itself; the world group is the host's.
        if group in distributed_c10d._world.pg_map and group is not distributed_c10d._get_default_group():
            destroy_process_group(group)
        del group  # the threads end with the last reference
    gc.collect()


def _groups(module: Any) -> list[Any]:
    """Return the process groups that a module's variables refer to, each once."""
    from torch.distributed import ProcessGroup

    found = [*vars(module).values()]
    for value in [item for item in found if isinstance(item, (list, tuple, dict))]:
        found += value.values() if isinstance(value, dict) else value
    return list({id(item): item for item in found if isinstance(item, ProcessGroup)}.values())


def set_num_microbatches(arguments: Any) -> None:
    """Set Megatron's number of microbatches by the batch sizes in ``arguments``."""
    from megatron.core import num_microbatches_calculator as calculator

    calculator.destroy_num_microbatches_calculator()
    calculator.init_num_microbatches_calculator(
        arguments.rank, None, arguments.global_batch_size, arguments.micro_batch_size, arguments.data_parallel_size
    )
