"""Measures one layout: block times, block memory, model state, optimizer step."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from mindspeed_autoparallel.profiles import layer_block
from mindspeed_autoparallel.profiles.records import (
    BlockParameters,
    BlockRecord,
    ModuleRecord,
    OptimizerRecord,
    ParameterCount,
    PointResult,
    StepsRecord,
)
from mindspeed_autoparallel.runtime.devices.cpu.edits import replaced
from mindspeed_autoparallel.runtime.profiling.measure.communication import CommunicationClock, with_communication
from mindspeed_autoparallel.runtime.profiling.measure.costs import Run, batch_bytes, block_costs, blocks_of
from mindspeed_autoparallel.runtime.profiling.measure.recorder import Recorder
from mindspeed_autoparallel.runtime.profiling.measure.relayout import Built
from mindspeed_autoparallel.runtime.profiling.measure.sampling import (
    largest_of_next,
    rows_of,
    runs_at_lengths,
    samples_differ,
    times_by_rows,
)
from mindspeed_autoparallel.runtime.profiling.measure.state import (
    bytes_per_parameter,
    execution_order,
    parameters_by_block,
    resident_bytes,
    workspace_bytes,
)
from mindspeed_autoparallel.runtime.profiling.measure.steps import whole_steps
from mindspeed_autoparallel.runtime.profiling.measure.structure import Stack, find_stacks, ties_embeddings, unwrap
from mindspeed_autoparallel.runtime.profiling.measure.task import MeasureTask

_NUM_STEPS = 3


def measure_point(
    built: Built, forward_step: Callable[..., Any], arguments: Any, device: Any, task: MeasureTask
) -> PointResult:
    """Measure everything about one layout except the links between ranks."""
    chunks = built.model if isinstance(built.model, list) else [built.model]
    model = unwrap(chunks)
    stacks = find_stacks(model, task.kinds)
    order, handles = execution_order(model, stacks)
    microbatch = Microbatch(chunks, built.data_iterator, forward_step, arguments, stacks, device)
    microbatch.run(tracked=False)
    for handle in handles:
        handle.remove()
    for _ in range(task.num_warmup):
        microbatch.run(tracked=False)
    timed = [microbatch.run(tracked=False) for _ in range(task.num_repeats)]
    at_lengths = [*timed, *runs_at_lengths(microbatch)] if task.with_lengths else []
    communication = None
    if task.played is not None:
        with CommunicationClock(task.played) as clock:
            communication = microbatch.run_on(clock)
    finalize_us, optimizer_us = _step(chunks, built.optimizer, device)
    # After the step everything that a training keeps exists; live bytes beyond it are the host's own.
    if samples_differ(arguments):
        # A plan must fit the largest microbatch.
        microbatch.iterator = largest_of_next(microbatch.iterator)
    tracked = microbatch.run(tracked=True)
    kept = resident_bytes(model, built.optimizer)
    shards = num_optimizer_shards(arguments)
    parameters = parameters_by_block(model, stacks, order)
    costs = block_costs(timed, tracked, device.seconds_between)
    if communication is not None:
        costs = with_communication(costs, communication, tracked)
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return PointResult(
        modules=tuple(
            describe_stack(stack, costs[stack.name], parameters[stack.name], microbatch, tracked)
            for stack in tracked.stacks
        ),
        batch_bytes=batch_bytes(tracked),
        bytes_per_trained_parameter=bytes_per_parameter(model, built.optimizer, shards),
        optimizer=OptimizerRecord(step_us=optimizer_us, finalize_us=finalize_us, parameter_bytes=trained // shards),
        steps=whole_steps(built, forward_step, arguments, device) if task.with_steps else StepsRecord(),
        time_by_rows=times_by_rows(at_lengths, costs, arguments, device.seconds_between),
        tied_embeddings=ties_embeddings(model, arguments),
        workspace_bytes=workspace_bytes(),
        host_bytes=max(0, tracked.marks["forward begin"].live_bytes - kept - workspace_bytes()),
        memory_capacity_bytes=device.total_memory_bytes(),
    )


class Microbatch:
    """Runs the host's step with one microbatch through Megatron's own schedule, without gradient reduction."""

    def __init__(
        self,
        chunks: list[Any],
        iterator: Any,
        forward_step: Callable[..., Any],
        arguments: Any,
        stacks: tuple[Stack, ...],
        device: Any,
    ) -> None:
        self.chunks, self.iterator, self.forward_step = chunks, iterator, forward_step
        self.arguments, self.stacks, self.device = arguments, stacks, device
        self.shapes: dict[str, tuple[int, ...]] = {}

    def run(self, tracked: bool, *, forward_only: bool = False) -> Run:
        """Run one microbatch; ``tracked`` also follows live memory, which makes times meaningless."""
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.utils import get_model_config

        config = get_model_config(self.chunks[0])
        config.no_sync_func = getattr(self.chunks[0], "no_sync", None)
        for chunk in self.chunks:
            if hasattr(chunk, "zero_grad_buffer"):
                chunk.zero_grad_buffer()
        tracking = self.device.tracked_memory() if tracked else contextlib.nullcontext()
        with replaced(config, "finalize_model_grads_func", None), tracking as memory:
            return self._run_recorded(get_forward_backward_func(), memory, forward_only)

    def run_on(self, device: Any) -> Run:
        """Run one microbatch with another ``device``, whose clock times the marks."""
        with replaced(self, "device", device):
            return self.run(tracked=False)

    def _run_recorded(self, schedule: Callable[..., Any], memory: Any, forward_only: bool) -> Run:
        recorder = Recorder(self.stacks, self.device.clock, memory, unwrap(self.chunks))
        self.device.synchronize()
        with recorder.attached():
            schedule(
                forward_step_func=recorder.forward_step(self.forward_step),
                data_iterator=self.iterator,
                model=self.chunks,
                num_microbatches=1,
                seq_length=self.arguments.seq_length,
                micro_batch_size=self.arguments.micro_batch_size,
                decoder_seq_length=getattr(self.arguments, "decoder_seq_length", None),
                forward_only=forward_only,
            )
            recorder.mark("backward end")
        self.device.synchronize()
        self.shapes.update(recorder.shapes)
        side = {name: inputs.total_and_kept_bytes() for name, inputs in recorder.side.items()}
        return Run(recorder.marks, self.stacks, side, dict(recorder.shapes), dict(recorder.input_bytes))


def _step(chunks: list[Any], optimizer: Any, device: Any) -> tuple[float, float]:
    """Return median microseconds of finalizing gradients (with their reduction) and of the optimizer's step."""
    from megatron.core.distributed import finalize_model_grads

    times = []
    for _ in range(1 + _NUM_STEPS):
        device.synchronize()
        begin = time.perf_counter()
        finalize_model_grads(chunks)
        device.synchronize()
        middle = time.perf_counter()
        optimizer.step()
        device.synchronize()
        times.append(((middle - begin) * 1e6, (time.perf_counter() - middle) * 1e6))
    # The first step allocates the optimizer state.
    finalize, step = zip(*times[1:], strict=True)
    return statistics.median(finalize), statistics.median(step)


def num_optimizer_shards(arguments: Any) -> int:
    """Return the number of ranks that share the optimizer state of dense parameters."""
    if not arguments.use_distributed_optimizer:
        return 1
    return int(arguments.data_parallel_size * arguments.context_parallel_size)


def describe_stack(
    stack: Stack,
    costs: Mapping[str, Mapping[str, float]],
    parameters: Mapping[str, list[Any]],
    microbatch: Microbatch,
    tracked: Run,
) -> ModuleRecord:
    """Return a stack as a module: sizes, and costs and parameters by block; ``costs``: of ``block_costs``."""
    config, arguments = stack.config, microbatch.arguments
    shape = microbatch.shapes.get(f"{stack.name} 1", ())
    layers = Counter(map(layer_block, stack.kinds))
    return ModuleRecord(
        name=stack.name,
        result_key=stack.result_key,
        frozen=stack.frozen,
        num_layers=len(stack.layers),
        kinds=stack.kinds,
        hidden_size=int(shape[-1]) if shape else 0,
        tokens_per_sample=rows_of(stack, microbatch.shapes, arguments) // arguments.micro_batch_size,
        num_heads=int(getattr(config, "num_attention_heads", 0) or 0),
        num_kv_heads=int(getattr(config, "num_query_groups", 0) or 0),
        num_experts=int(getattr(config, "num_moe_experts", 0) or 0),
        side_bytes=tracked.side_bytes.get(stack.name, (0, 0)),
        input_bytes=tracked.input_bytes.get(stack.name, 0),
        blocks={
            block: BlockRecord(**costs[block], parameters=_count(parameters[block], layers.get(block, 1)))
            for block in blocks_of(stack)
        },
    )


def _count(parameters: list[Any], divisor: int) -> BlockParameters:
    """Count parameters per layer, dense and expert ones (Megatron marks experts with ``allreduce=False``)."""

    def count(expert: bool) -> ParameterCount:
        own = [parameter for parameter in parameters if (not getattr(parameter, "allreduce", True)) is expert]
        return ParameterCount(
            num_parameters=sum(parameter.numel() for parameter in own) // divisor,
            parameter_bytes=sum(parameter.numel() * parameter.element_size() for parameter in own) // divisor,
            num_trained=sum(parameter.numel() for parameter in own if parameter.requires_grad) // divisor,
        )

    return BlockParameters(dense=count(False), expert=count(True))
