"""Runs in a tracing process: the user's own script sets itself up on fake ranks, and every layout is traced.

The script builds its model, optimizer and data as usual, but its tensors have shapes only. One microbatch then runs
through the script's forward step and Megatron's schedule, so custom layers, losses and batches are traced as they are.
"""

from __future__ import annotations

import argparse
import functools
import os
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError, ProfileError
from mindspeed_autoparallel.files import write_json_atomic
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.profiles.knowledge import Operator
from mindspeed_autoparallel.profiles.records import (
    BlockCalls,
    BlockTrace,
    Calls,
    CollectiveCalls,
    Failure,
    VariantName,
    json_of,
    record_of,
)
from mindspeed_autoparallel.runtime.megatron.hybrid import hybrid_pattern, num_pattern_layers
from mindspeed_autoparallel.runtime.profiling.balanced_routing import balance_routing
from mindspeed_autoparallel.runtime.profiling.measure import worker
from mindspeed_autoparallel.runtime.profiling.measure.costs import Interval, batch_bytes, block_costs, blocks_of
from mindspeed_autoparallel.runtime.profiling.measure.point import Microbatch, describe_stack, num_optimizer_shards
from mindspeed_autoparallel.runtime.profiling.measure.relayout import Built, reinitialize_model_parallel
from mindspeed_autoparallel.runtime.profiling.measure.state import (
    bytes_per_parameter,
    execution_order,
    parameters_by_block,
    release,
    resident_bytes,
    workspace_bytes,
)
from mindspeed_autoparallel.runtime.profiling.measure.structure import (
    MIN_LAYERS,
    fewest_layers,
    find_stacks,
    shorten,
    ties_embeddings,
    unwrap,
)
from mindspeed_autoparallel.runtime.profiling.measure.task import MeasureTask
from mindspeed_autoparallel.runtime.profiling.operator_calls import Collective
from mindspeed_autoparallel.runtime.profiling.trace.fake_host import FakeCalls, FakeDevice, missing_state_bytes
from mindspeed_autoparallel.runtime.profiling.trace.fake_tensors import (
    FakeTensorTracer,
    Log,
    convert_by_replacing,
    keep_dispatch_real,
    silence_timers,
    use_fake_process_groups,
)
from mindspeed_autoparallel.runtime.profiling.trace.layer_signatures import fits_without_recompute, kinds_by_computing
from mindspeed_autoparallel.runtime.profiling.trace.task import TraceTask
from mindspeed_autoparallel.runtime.profiling.trace.work_queue import WorkQueue

TRACE_SCHEMA_VERSION = 1
_NUM_ERROR_LINES = 6


def prepare(arguments: argparse.Namespace, data: dict[str, Any]) -> None:
    """Handle tasks of kind ``trace``: a measuring task on fake ranks, in several variants."""
    if getattr(arguments, "mm_model", None):
        raise ConfigError(
            f"a model that a file describes (--mm-model {arguments.mm_model}) cannot be traced: measure it with "
            "--auto-parallel-mm."
        )
    session = worker.measuring()
    order = record_of(data, "task of this process", TraceTask)
    # The script's launcher started one process; Megatron reads the world from here.
    os.environ["WORLD_SIZE"] = str(order.world_size)
    arguments.world_size = order.world_size
    use_fake_process_groups()
    convert_by_replacing()
    balance_routing()
    keep_dispatch_real()
    silence_timers()
    # The whole model is set up first: it shows which layers are alike.
    num_layers = num_pattern_layers(hybrid_pattern(arguments)) or arguments.num_layers
    worker.prepare(arguments, replace(order.measure, num_layers={"text_decoder": num_layers}).to_json())
    arguments.num_workers = 0
    if getattr(arguments, "moe_permute_fusion", False):
        arguments.moe_permute_fusion = False  # its kernels run on accelerators only
    go_without_gloo(arguments)
    session.calls = FakeCalls()
    session.take_over = functools.partial(_trace_all, order=order)


def go_without_gloo(arguments: argparse.Namespace) -> None:
    """Prevent Megatron from making Gloo groups, which fake ranks cannot, and from requiring them for a checkpoint
    format.

    Nothing is saved here. A distributed optimizer with ``--ckpt-format torch`` needs Gloo, and Megatron asserts it.
    """
    settings = {"use_gloo_process_groups": False, "enable_gloo_process_groups": False, "ckpt_format": "torch_dist"}
    for name, value in settings.items():
        if hasattr(arguments, name):
            setattr(arguments, name, value)


def _trace_all(
    task: MeasureTask, forward_step: Callable[..., Any], config: Any, built: Built, order: TraceTask
) -> None:
    """Trace the points that this process claims from the queue."""
    import torch
    from megatron.training import get_args

    arguments, calls = get_args(), worker.measuring().calls
    assert isinstance(calls, FakeCalls)
    plain = {name: getattr(arguments, name, None) for changes in order.variants.values() for name in changes}
    world_size = torch.distributed.get_world_size()
    kinds = _kinds_of_layers(built, forward_step, arguments, calls.tracer)
    shorten(arguments, max(map(fewest_layers, kinds.values()), default=MIN_LAYERS))
    queue = WorkQueue(Path(order.queue))
    for point, names in zip(task.points, order.wanted, strict=True):
        if not queue.claim(point, order.process):
            continue
        result: dict[str, Any] = {"status": "ok", "variants": {}}
        fitting: set[str] = set()
        for variant in names:
            way = VariantName.parse(variant).variant
            if way in fitting:
                result["variants"][variant] = {"status": "not_needed"}
                result["headroom_bytes"] = order.headroom_bytes
                continue
            if built.model is not None:
                # The host's frames still hold the first layout's objects.
                release(built.model, built.optimizer)
            for name, value in {**plain, **order.variants[variant]}.items():
                setattr(arguments, name, value)
            try:
                built = reinitialize_model_parallel(calls, arguments, point, world_size)
                traced = _trace(built, forward_step, arguments, calls.tracer, kinds)
                result["variants"][variant] = {"status": "ok", **json_of(traced)}
                if fits_without_recompute(traced, order.headroom_bytes):
                    fitting.add(way)
            except Exception as error:  # any error of the user's code in this layout: continue with the others
                built = Built(None, None, None)
                failure = Failure(reason=_reason(error), refused=_is_refusal(error))
                result["variants"][variant] = {"status": "failed", **asdict(failure)}
        _finish(task, point, result)


def _kinds_of_layers(
    built: Built, forward_step: Callable[..., Any], arguments: Any, tracer: FakeTensorTracer
) -> dict[str, tuple[int, ...]]:
    """Return the kinds of the whole model's layers; empty without stacks, which the trace of every point reports."""
    import torch

    chunks = built.model if isinstance(built.model, list) else [built.model]
    try:
        stacks = find_stacks(unwrap(chunks))
    except ProfileError:
        return {}
    device = FakeDevice(tracer)
    microbatch = Microbatch(chunks, built.data_iterator, forward_step, arguments, stacks, device)
    tracer.log = Log()

    def forward() -> None:
        with torch.no_grad():
            microbatch.run(tracked=False, forward_only=True)

    try:
        return kinds_by_computing(stacks, tracer.log, forward)
    except Exception:  # any error of the user's code: tracing a point reports it
        return {stack.name: stack.kinds for stack in stacks}


def _finish(task: MeasureTask, point: MeasuredAt, result: dict[str, Any]) -> None:
    first = next(iter(result["variants"].values()))
    if first.get("status") == "failed":
        result.update(
            status="failed", reason=first["reason"], summary=first["reason"].splitlines()[-1], refused=first["refused"]
        )
    write_json_atomic(task.result_file(point), {"schema_version": TRACE_SCHEMA_VERSION, "at": asdict(point), **result})
    print(f"traced {point.label()}: {result['status']}", flush=True)


def _is_refusal(error: BaseException) -> bool:
    """Return whether Megatron itself refuses, as it would on real ranks, where measuring would fail, too."""
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    says_no = isinstance(error, (AssertionError, ValueError, NotImplementedError))
    return says_no and "megatron" in Path(raised_in).parts


def _reason(error: BaseException) -> str:
    lines = "".join(traceback.format_exception(error)).strip().splitlines()
    return "\n".join(lines[-_NUM_ERROR_LINES:])


def _trace(
    built: Built,
    forward_step: Callable[..., Any],
    arguments: Any,
    tracer: FakeTensorTracer,
    kinds: Mapping[str, Sequence[int]],
) -> BlockTrace:
    """Trace the blocks of one layout as ``measure_point`` measures them, with calls instead of times.

    ``kinds``: of every layer of the whole model's stacks.
    """
    chunks = built.model if isinstance(built.model, list) else [built.model]
    model = unwrap(chunks)
    stacks = find_stacks(model, kinds)
    order, handles = execution_order(model, stacks)
    device = FakeDevice(tracer)
    microbatch = Microbatch(chunks, built.data_iterator, forward_step, arguments, stacks, device)
    microbatch.run(tracked=False)
    for handle in handles:
        handle.remove()
    tracer.log = Log()
    tracked = microbatch.run(tracked=True)
    ratio = bytes_per_parameter(
        model, built.optimizer, num_optimizer_shards(arguments), missing_state_bytes(built.optimizer)
    )
    parameters = parameters_by_block(model, stacks, order)
    costs = block_costs([], tracked, lambda start, end: 0.0)
    table: dict[Operator, int] = {}
    modules = []
    for stack in tracked.stacks:
        calls = {
            block: BlockCalls(
                forward=_calls(tracked.forward(stack, block), tracer.log, table),
                backward=_calls(tracked.backward(stack, block), tracer.log, table),
            )
            for block in blocks_of(stack)
        }
        module = describe_stack(stack, costs[stack.name], parameters[stack.name], microbatch, tracked)
        modules.append(replace(module, kinds=tuple(kinds[stack.name]), calls=calls))
    resident = resident_bytes(model, built.optimizer) + workspace_bytes()
    return BlockTrace(
        modules=tuple(modules),
        operators=tuple(table),
        batch_bytes=batch_bytes(tracked),
        bytes_per_trained_parameter=ratio,
        workspace_bytes=workspace_bytes(),
        host_bytes=max(0, tracked.marks["forward begin"].live_bytes - resident),
        tied_embeddings=ties_embeddings(model, arguments),
    )


def _calls(intervals: Sequence[Interval], log: Log, table: dict[Operator, int]) -> Calls:
    """Return the calls within ``intervals`` of equal blocks, per block; ``table``: operators by index, extended
    here."""
    counts: Counter[int] = Counter()
    collectives: Counter[Collective] = Counter()
    num_calls = 0
    for interval in intervals:
        start, end = interval.start.clock, interval.end.clock
        num_calls += end - start
        for place in range(start, end):
            operator = log.operators[place]
            if operator is not None:
                counts[table.setdefault(operator, len(table))] += 1
            if place in log.collectives:
                collectives[log.collectives[place]] += 1
    share = 1 / max(1, len(intervals))
    return Calls(
        operators=tuple((place, count * share) for place, count in sorted(counts.items())),
        collectives=tuple(CollectiveCalls(**vars(call), count=count * share) for call, count in collectives.items()),
        num_calls=num_calls * share,
    )
