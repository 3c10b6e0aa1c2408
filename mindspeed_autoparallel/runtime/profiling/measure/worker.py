"""Runs in every process of a measuring launch: takes over the host's training before its first step."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import AutoParallelError, first_line
from mindspeed_autoparallel.files import write_json_atomic
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.profiles.records import json_of
from mindspeed_autoparallel.runtime.devices.adapter import is_host_shortage
from mindspeed_autoparallel.runtime.devices.selection import current_device
from mindspeed_autoparallel.runtime.launch.processes import OUT_OF_MEMORY_EXIT_CODE
from mindspeed_autoparallel.runtime.megatron.features import TASK_VARIABLE, verify_patches
from mindspeed_autoparallel.runtime.megatron.mindspeed import NOOP_ARGUMENT
from mindspeed_autoparallel.runtime.megatron.short_training import train_for, without_kept_batches
from mindspeed_autoparallel.runtime.megatron.splits import clear_stages
from mindspeed_autoparallel.runtime.profiling.balanced_routing import balance_routing
from mindspeed_autoparallel.runtime.profiling.measure.relayout import (
    Built,
    HostCalls,
    reinitialize_model_parallel,
    set_arguments,
)
from mindspeed_autoparallel.runtime.profiling.measure.state import release
from mindspeed_autoparallel.runtime.profiling.measure.structure import Choices, choices_by_layer, shorten
from mindspeed_autoparallel.runtime.profiling.measure.task import MeasureTask
from mindspeed_autoparallel.runtime.profiling.stalls import begin_steps
from mindspeed_autoparallel.runtime.state import of_process


class MeasuringSession:
    """The task of this process and the host's calls so far; without a task it measures nothing."""

    def __init__(self) -> None:
        self.task: MeasureTask | None = None
        self.calls = HostCalls()
        self.arguments: Any = None
        self.choices_by_layer: dict[str, Choices] = {}
        """Layer choices of the whole model."""
        self.experts_follow_tensor = False
        """Whether experts are split like the other layers, in every layout."""
        self.take_over: Callable[[MeasureTask, Callable[..., Any], Any, Built], object] = measure_all
        """Function called where training would begin: ``(task, forward_step, config, first layout)``."""


def measuring() -> MeasuringSession:
    """Return the measuring session of this process, which serves one launch."""
    return of_process(MeasuringSession)


def prepare(arguments: argparse.Namespace, data: dict[str, object]) -> None:
    """Turn the user's arguments into those of the reduced model in the first layout; nothing is loaded or saved."""
    session = measuring()
    task = MeasureTask.from_json(data)
    session.task, session.arguments = task, arguments
    session.experts_follow_tensor = getattr(arguments, "expert_tensor_parallel_size", 0) is None
    if task.played is not None:
        # With real ranks the model's routers stay in use.
        balance_routing()
    set_arguments(arguments, task.points[0], arguments.world_size)
    arguments.pipeline_model_parallel_size = 1
    clear_stages(arguments)
    for name in ("virtual_pipeline_model_parallel_size", NOOP_ARGUMENT):
        if hasattr(arguments, name):
            setattr(arguments, name, None)
    if task.model is not None:
        # In the folder of the task, on this node: node 0's file may be on storage that this node cannot read.
        own = Path(os.environ[TASK_VARIABLE]).with_suffix(f".rank{os.environ.get('RANK', '0')}.model.json")
        write_json_atomic(own, task.model)
        arguments.mm_model = str(own)
    session.choices_by_layer = choices_by_layer(arguments)
    shorten(arguments, task.num_layers.get("text_decoder", max(task.num_layers.values())))
    arguments.overlap_grad_reduce = False
    arguments.overlap_param_gather = False
    # Megatron's NaN checks may only be called inside its own train_step.
    arguments.check_for_nan_in_loss_and_grad = False
    # The data set must last for every layout's microbatches.
    train_for(arguments, max(50, 4 * (task.num_warmup + task.num_repeats + 2)))


def record(name: str, wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, object]) -> Any:
    """Record a set-up call of the host in a measuring process; pass it through elsewhere."""
    session = measuring()
    if session.task is None:
        return wrapped(*args, **kwargs)
    return session.calls.record(name, wrapped, args, kwargs)


def take_over_training(wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, object]) -> Any:
    """Check the patches; in a measuring process, measure every point where the host's ``train`` begins, and exit."""
    verify_patches()
    session = measuring()
    if session.task is None:
        return wrapped(*args, **kwargs)
    import inspect

    # By the host's own parameter names; it built the first layout from its updated arguments.
    bound = inspect.signature(getattr(wrapped, "__wrapped__", wrapped)).bind(*args, **kwargs).arguments
    built = Built(bound["model"], bound["optimizer"], bound["train_data_iterator"])
    if session.experts_follow_tensor:
        _let_experts_follow()
    session.take_over(session.task, bound["forward_step_func"], bound.get("config"), built)
    sys.stdout.flush()
    import torch

    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.exit(0)


def _let_experts_follow() -> None:
    """Clear the experts' tensor-parallel size, which Megatron's checks copied from that of another layout."""
    from megatron.training import get_args

    arguments = get_args()
    for name in ("expert_tensor_parallel_size", "expert_tensor_parallel_num_weight_shards"):
        if hasattr(arguments, name):
            setattr(arguments, name, None)


def measure_all(task: MeasureTask, forward_step: Callable[..., Any], config: Any, built: Built) -> Built:
    """Measure every point of ``task``, one after the other; return the objects built for the last."""
    import torch
    from megatron.training import get_args

    from mindspeed_autoparallel.runtime.profiling.measure.communication import measure_links
    from mindspeed_autoparallel.runtime.profiling.measure.point import measure_point
    from mindspeed_autoparallel.runtime.profiling.measure.sampling import samples_differ

    arguments = get_args()
    device = current_device()
    rank = torch.distributed.get_rank()
    if task.played is None:
        links = measure_links(device, int(os.environ["LOCAL_WORLD_SIZE"]))
    else:
        begin_steps()
        links = {tier: {"all_reduce": link.default, **link.operations} for tier, link in task.played.tiers.items()}
    links_from = task.played.links_from if task.played is not None else ""
    for index, point in enumerate(task.points):
        if rank == 0:
            write_json_atomic(task.begun_file(), point.label())
        try:
            if index:
                # Free the old layout's tensors before the new one's are allocated; the host's frames still hold its
                # objects.
                release(built.model, built.optimizer)
                del built  # references to the old groups keep their threads
                if measuring().experts_follow_tensor and not point.expert_tensor_size:
                    _let_experts_follow()
                built = reinitialize_model_parallel(
                    measuring().calls, arguments, point, torch.distributed.get_world_size()
                )
            # A traced microbatch is compared with this measurement: both use the script's own setting.
            with without_kept_batches() if samples_differ(arguments) else nullcontext():
                result = measure_point(built, forward_step, arguments, device, task)
        except AutoParallelError as error:
            _finish(task, point, {"status": "failed", "reason": str(error)}, rank)
            raise
        except BaseException as error:
            if is_host_shortage(error):
                # Other programs share the machine's memory: no result is kept, and the point is tried again.
                print(f"the memory of this machine ran out at {point.label()}: {first_line(error)}", flush=True)
                sys.exit(OUT_OF_MEMORY_EXIT_CODE)
            if not device.is_out_of_memory(error):
                raise
            # Other ranks may be inside a collective: end the launch; the coordinator continues with the next point.
            _finish(task, point, {"status": "out_of_memory", "reason": first_line(error)}, 0)
            sys.exit(OUT_OF_MEMORY_EXIT_CODE)
        _finish(task, point, {"status": "ok", **json_of(replace(result, links=links, links_from=links_from))}, rank)
    return built


def _finish(task: MeasureTask, point: MeasuredAt, result: dict[str, object], rank: int) -> None:
    if rank == 0:
        write_json_atomic(task.result_file(point), {"schema_version": 1, "at": asdict(point), **result})
        print(f"measured {point.label()}: {result['status']}", flush=True)
