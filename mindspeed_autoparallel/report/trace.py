"""The simulated step in the trace event format, for Perfetto and chrome://tracing."""

from __future__ import annotations

from mindspeed_autoparallel.report.replay import replay
from mindspeed_autoparallel.report.stages import rank_label
from mindspeed_autoparallel.spec.plan import Plan

PIPELINE, REST = 1, 2


def chrome_trace(plan: Plan) -> dict[str, object]:
    """Return ``{"traceEvents": [...]}``; times in microseconds, a thread per pipeline rank and one for the rest.

    Raises ``PlanError`` if the plan's pipeline cannot be replayed.
    """
    found = replay(plan)
    step = found.step
    labels = [rank_label(plan, rank) for rank in range(plan.layout.pipeline_size)]
    events: list[dict[str, object]] = [
        _name("process_name", PIPELINE, 0, f"{plan.model.name}: {plan.layout.label()}"),
        _name("process_name", REST, 0, "outside the pipeline"),
        _name("thread_name", REST, 0, "every rank"),
    ]
    for rank, label in enumerate(labels):
        events.append(_name("thread_name", PIPELINE, rank, f"rank {rank}: {label}"))
        events.append(_name("thread_sort_index", PIPELINE, rank, rank, key="sort_index"))
    phases = plan.hetero.encoders if plan.hetero is not None else ()
    clock = 0.0
    for phase in phases:
        events.append(_rest(f"{phase.module} forward", clock, phase.forward_us))
        clock += phase.forward_us
    for rank, action, start, end in sorted(step.timeline, key=lambda item: (item[0], item[2])):
        chunk = f".{action.chunk}" if plan.layout.virtual_size > 1 else ""
        forward = action.kind == "F"
        events.append(
            {
                "name": f"{action.kind}{action.microbatch}{chunk}",
                "cat": "forward" if forward else "backward",
                "ph": "X",
                "pid": PIPELINE,
                "tid": rank,
                "ts": clock + start,
                "dur": end - start,
                "cname": "thread_state_running" if forward else "thread_state_runnable",
                "args": {"microbatch": action.microbatch, "chunk": action.chunk},
            }
        )
    clock += step.step_time
    parts = plan.step
    for name, length in (
        *((f"{phase.module} backward", phase.backward_us) for phase in phases),
        ("redistribution", sum(phase.exchange_us for phase in phases)),
        *((f"{phase.module} gradients and optimizer", phase.reduction_us + phase.optimizer_us) for phase in phases),
        ("gradient reduction", parts.data_parallel_us),
        ("tied embeddings", parts.embedding_us),
        ("optimizer", parts.optimizer_us),
    ):
        if length > 0:
            events.append(_rest(name, clock, length))
            clock += length
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "layout": plan.layout.label(),
            "message_us": found.message_us,
            "predicted_step_us": parts.total_us,
            "tool_version": plan.tool_version,
        },
    }


def _rest(name: str, start_us: float, length_us: float) -> dict[str, object]:
    return {"name": name, "cat": "step", "ph": "X", "pid": REST, "tid": 0, "ts": start_us, "dur": length_us}


def _name(event: str, process: int, thread: int, value: str | int, key: str = "name") -> dict[str, object]:
    return {"name": event, "ph": "M", "pid": process, "tid": thread, "args": {key: value}}
