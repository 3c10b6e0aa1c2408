"""The replayed step of a plan: the timeline of every rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mindspeed_autoparallel.errors import AutoParallelError, PlanError
from mindspeed_autoparallel.planner.replay import replay as planner_replay
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
