"""Compares the first steps of a training with its plan: step time and peak memory per stage, and each phase of the step
if encoders have their own layouts."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict

from mindspeed_autoparallel.runtime.devices.adapter import shared_cores
from mindspeed_autoparallel.runtime.state import of_process
from mindspeed_autoparallel.spec.plan import Plan
from mindspeed_autoparallel.units import MIB, US_PER_MS

_EXCHANGE, _FINALIZE = "redistribution", "gradient reduction of encoders"


def phases_so_far(plan: Plan) -> dict[str, float]:
    """Return the microseconds this rank spent in each phase since the last log line; empty without hetero parallel."""
    if plan.hetero is None:
        return {}
    from mindspeed_autoparallel.runtime.hetero.job import current_job

    session = current_job().session
    if session is None:
        return {}
    seconds: dict[str, float] = {}
    for comm in session.encoder_comms:
        seconds[_forward(comm.encoder.name)] = comm.seconds["encode"]
        seconds[_backward(comm.encoder.name)] = comm.seconds["encoder_backward"]
    times = session.times
    for comm in session.generator_comms:
        seconds[_between_passes(comm.encoder.name)] = times.generate
    seconds[_EXCHANGE] = times.redistribute + times.metadata + times.planning
    seconds[_backbone(plan)] = times.backbone
    seconds[_FINALIZE] = times.finalize
    return {name: value * 1e6 for name, value in seconds.items()}


def predicted_us(plan: Plan) -> dict[str, float]:
    """Return the plan's microseconds of each phase, by the names of ``phases_so_far``."""
    record = plan.hetero
    assert record is not None
    found: dict[str, float] = {}
    encoders = [phase for phase in record.encoders if not phase.generator]
    inside = [phase for phase in record.encoders if phase.generator]
    for phase in encoders:
        found[_forward(phase.module)], found[_backward(phase.module)] = phase.forward_us, phase.backward_us
    found[_EXCHANGE] = sum(phase.exchange_us for phase in encoders)
    for phase in inside:
        found[_between_passes(phase.module)] = phase.forward_us + phase.backward_us + phase.exchange_us
    # Megatron reduces the backbone's gradients at the end of its schedule.
    found[_backbone(plan)] = plan.step.pipeline_us + plan.step.data_parallel_us + plan.step.embedding_us
    found[_FINALIZE] = sum(phase.reduction_us for phase in record.encoders)
    return found


def phase_lines(plan: Plan, ranks: Sequence[Mapping[str, float]]) -> list[str]:
    """Return a table with the slowest rank of each phase; empty unless encoders have their own layouts."""
    if plan.hetero is None:
        return []
    lines = [f"{'phase':34s}  predicted ms  measured ms (slowest rank)"]
    for name, predicted in predicted_us(plan).items():
        measured = [rank[name] for rank in ranks if name in rank]
        text = f"{max(measured) / US_PER_MS:12.1f}" if measured else "not measured"
        lines.append(f"{name:34s} {predicted / US_PER_MS:13.1f} {text}")
    return lines


def _between_passes(module: str) -> str:
    return f"{module} between passes"


def _forward(module: str) -> str:
    return f"{module} forward"


def _backward(module: str) -> str:
    return f"{module} backward"


def _backbone(plan: Plan) -> str:
    return f"{plan.backbone} pipeline and reduction"


class MeasuredPhases(TypedDict, total=False):
    """Times of the phases of a rank's steps, if encoders have their own layouts."""

    phase_us: dict[str, float]


class MeasuredRank(MeasuredPhases):
    """Time and memory of a rank's first steps."""

    step_us: float
    step_spread: float
    """Relative standard deviation of ``step_us``, by the scatter of the steps that it summarizes."""
    peak_bytes: int
    steps_us: list[float]
    """Every timed step, in order."""


class PlanCheck:
    """The plan of this training, and its first steps."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.num_steps = 0
        self.step_us: list[float] = []
        self.phase_us: list[dict[str, float]] = []
        self.peak_bytes = 0
        self.num_seen = 0
        self.on_report: Callable[[list[MeasuredRank]], None] | None = None

    def begin(self, plan: Plan, num_steps: int, on_report: Callable[[list[MeasuredRank]], None] | None = None) -> None:
        """Watch the first ``num_steps`` steps, at least 3: one to warm up, then a third for memory, the rest for time.

        ``on_report``: called on rank 0 with the measurements of every global rank.
        """
        self.plan, self.num_steps, self.on_report = plan, max(3, num_steps), on_report


def _num_memory_steps(num_steps: int) -> int:
    """Return the number of steps that track memory: samples differ, so one step rarely has the largest."""
    return max(1, (num_steps - 1) // 3)


def watch_step(wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, object]) -> Any:
    """Wrap the host's ``train_step``. Step 0 warms up, the next ones track memory, the others are timed."""
    check = of_process(PlanCheck)
    plan = check.plan
    if plan is None or check.num_seen >= check.num_steps:
        return wrapped(*args, **kwargs)
    from mindspeed_autoparallel.runtime.devices.selection import current_device

    device = current_device()
    step, check.num_seen = check.num_seen, check.num_seen + 1
    if 1 <= step <= _num_memory_steps(check.num_steps):
        # Positions in train_step's signature: forward step function, data iterator, model, ...
        data_iterator = kwargs.get("data_iterator", args[1] if len(args) > 1 else None)
        with without_host_batches(device, data_iterator), device.tracked_memory() as memory:
            result = wrapped(*args, **kwargs)
            device.synchronize()
            check.peak_bytes = max(check.peak_bytes, memory.take_peak_bytes())
    else:
        device.synchronize()
        begin, phases = time.perf_counter(), phases_so_far(plan)
        result = wrapped(*args, **kwargs)
        device.synchronize()
        if step > 0:
            check.step_us.append((time.perf_counter() - begin) * 1e6)
            check.phase_us.append({name: us - phases[name] for name, us in phases_so_far(plan).items()})
    if check.num_seen == check.num_steps:
        _report(check, plan)
    return result


@contextmanager
def without_host_batches(device: Any, data_iterator: Any) -> Iterator[None]:
    """Exclude waiting batches from the memory that the CPU device counts: on accelerators they are in host memory."""
    from mindspeed_autoparallel.runtime.hetero.batches import packed_while_waiting
    from mindspeed_autoparallel.runtime.megatron.short_training import without_kept_batches

    if device.name != "cpu":
        yield
        return
    with without_kept_batches(data_iterator), packed_while_waiting():
        yield


def _report(check: PlanCheck, plan: Plan) -> None:
    import torch.distributed as distributed

    own: MeasuredRank = {
        "step_us": settled_us(check.step_us),
        "step_spread": _spread(check.step_us),
        "peak_bytes": check.peak_bytes,
        "steps_us": check.step_us,
    }
    if check.phase_us[0]:
        own["phase_us"] = {name: settled_us([step[name] for step in check.phase_us]) for name in check.phase_us[0]}
    ranks: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(ranks, own)
    if distributed.get_rank() == 0:
        from mindspeed_autoparallel.runtime.devices.selection import current_device

        print(comparison(plan, ranks), flush=True)
        if check.on_report is not None:
            check.on_report(ranks)
        if current_device().name == "cpu":
            num_processes = int(os.environ.get("LOCAL_WORLD_SIZE", len(ranks)))
            print(crowding(num_processes, os.cpu_count() or 1), end="", flush=True)


def settled_us(steps_us: Sequence[float]) -> float:
    """Return the median of the later half: allocators and caches need some steps to reach a steady state."""
    return statistics.median(_settled(steps_us))


def _settled(steps_us: Sequence[float]) -> Sequence[float]:
    return steps_us[len(steps_us) // 2 :]


def _spread(steps_us: Sequence[float]) -> float:
    """Return the relative standard deviation of ``settled_us`` (of a median: 1.25 times that of a mean)."""
    steps = _settled(steps_us)
    if len(steps) < 2:
        return 0.0
    return 1.25 * statistics.stdev(steps) / statistics.median(steps) / math.sqrt(len(steps))


def comparison(plan: Plan, ranks: Sequence[MeasuredRank]) -> str:
    """Return a table of prediction and measurement. ``ranks``: the measurements of every global rank.

    The range of the timed steps shows how much of an error comes from a machine whose speed changes."""
    slowest = max(ranks, key=lambda rank: rank["step_us"])
    measured_us, steps_us = slowest["step_us"], slowest["steps_us"]
    predicted_us = plan.mean_us
    timed = f"(timed steps: {min(steps_us) / US_PER_MS:.1f} to {max(steps_us) / US_PER_MS:.1f} ms)"
    lines = [
        "plan against the first steps of this training",
        f"step        predicted {predicted_us / US_PER_MS:10.1f} ms  measured {measured_us / US_PER_MS:10.1f} ms  "
        f"{_error(predicted_us, measured_us)}  {timed}",
        *phase_lines(plan, [rank.get("phase_us", {}) for rank in ranks]),
        "stage       predicted peak_MiB  measured peak_MiB   error",
    ]
    width = len(ranks) // plan.layout.pipeline_size
    for memory in plan.memory:
        stage = memory.pipeline_rank
        measured = max(rank["peak_bytes"] for rank in ranks[stage * width : (stage + 1) * width])
        predicted = memory.peak_bytes
        lines.append(f"{stage:5d} {predicted / MIB:24.1f} {measured / MIB:18.1f}   {_error(predicted, measured)}")
    if (data := plan.data) is not None:
        lines.append(
            "samples differ: the predicted step is the mean drawn one, peaks are those of the mean sample; the "
            f"heaviest samples together need {data.worst_bytes / MIB:.1f} MiB on rank {data.worst_rank} of the pipeline"
        )
    return "\n".join(lines)


def crowding(num_processes: int, num_cores: int) -> str:
    """Return a line that explains a slow step if ranks share a device: a plan assumes one device for each rank.
    Otherwise return an empty string."""
    shared = shared_cores(num_processes, num_cores)
    if not shared:
        return ""
    return f"{shared} here, the plan gives each a device of its own: step times are not comparable, memory is.\n"


def _error(predicted: float, measured: float) -> str:
    return f"{(predicted - measured) / measured * 100:+.1f} %" if measured else "not measured"
