"""The replayed step of a plan: the timeline of every rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mindspeed_autoparallel.errors import AutoParallelError, PlanError
from mindspeed_autoparallel.planner.replay import replay as planner_replay
from mindspeed_autoparallel.report.stages import rank_label
from mindspeed_autoparallel.schedule import SimulatedStep, StepTimes, make_program, simulate
from mindspeed_autoparallel.spec.plan import Plan

NS_PER_US = 1000
MAX_ROUNDS = 40
MOST_INFERRED = 20_000
"""Operations of a step whose messages are inferred: it is replayed up to ``MAX_ROUNDS`` times."""
TOLERANCE = 1e-6
"""Share of the pipeline time by which a replay may miss it."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A timeline and how its messages were timed."""

    step: SimulatedStep
    """Times in microseconds."""
    message_us: float
    """Time of the slowest message between stages."""
    inferred: bool
    """Whether that time was derived from the predicted pipeline time because the plan lacks its costs."""


def replay(plan: Plan) -> Replay:
    """Return the planner's replay if the plan contains its costs, otherwise one with inferred messages.

    Raises ``PlanError`` or ``ConfigError`` if the schedule cannot be replayed.
    """
    if plan.extra.costs:
        try:
            found = planner_replay(plan)[1]
        except AutoParallelError:
            # The costs were edited or come from another release; the page marks its messages as inferred.
            return _inferred(plan)
        step = found.simulated
        return Replay(
            step=replace(
                step,
                step_time=step.step_time / NS_PER_US,
                busy=tuple(busy / NS_PER_US for busy in step.busy),
                critical_path=tuple((label, length / NS_PER_US) for label, length in step.critical_path),
                timeline=tuple((rank, act, a / NS_PER_US, b / NS_PER_US) for rank, act, a, b in step.timeline),
            ),
            message_us=max(found.link_us, default=0.0),
            inferred=False,
        )
    return _inferred(plan)


def _inferred(plan: Plan) -> Replay:
    """Return a replay whose messages all take the same time, chosen so that it takes ``plan.step.pipeline_us``.

    That time is 0 if the stages alone take as long or longer; compare ``step_time`` with ``pipeline_us``.
    """
    layout = plan.layout
    if any(module.pipeline_size != layout.pipeline_size for module in layout.modules.values()):
        raise PlanError("modules with separate pipelines are not drawn yet.")
    operations = 2 * layout.num_virtual_stages * plan.num_microbatches
    if operations > MOST_INFERRED:
        raise PlanError(
            f"{operations} operations a step are more than the {MOST_INFERRED} that are drawn of a plan without costs."
        )
    program = make_program(*layout.program_sizes(plan.num_microbatches))

    def run(message_us: float) -> SimulatedStep:
        times = StepTimes(
            forward=[stage.forward_us for stage in plan.stages],
            backward=[stage.backward_us for stage in plan.stages],
            per_message=message_us,
        )
        return simulate(program, times, rendezvous=True, with_timeline=True)

    message_us, target = 0.0, plan.step.pipeline_us
    step = run(message_us)
    if layout.num_virtual_stages == 1 or step.step_time >= target * (1 - TOLERANCE):
        return Replay(step=step, message_us=0.0, inferred=True)
    # The step is convex and increasing in the message's time: Newton from above, where it is at least one message.
    message_us = target - step.step_time
    for _ in range(MAX_ROUNDS):
        step = run(message_us)
        excess = step.step_time - target
        num_messages = sum(label == "p2p" for label, _ in step.critical_path)
        if abs(excess) <= target * TOLERANCE or not num_messages:
            break
        message_us = max(0.0, message_us - excess / num_messages)
    return Replay(step=step, message_us=message_us, inferred=True)


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
