"""The step of a plan, replayed: what every rank computes when."""

from __future__ import annotations

from mindspeed_autoparallel.errors import PlanError
from mindspeed_autoparallel.schedule import SimulatedStep, StepTimes, make_program, simulate
from mindspeed_autoparallel.spec.plan import Plan

MAX_ROUNDS = 40
TOLERANCE = 1e-6
"""Share of the pipeline time by which a replay may miss it."""


def replay(plan: Plan) -> tuple[SimulatedStep, float]:
    """The timeline in microseconds, and the time of one message between stages that it was drawn with.

    A plan holds the stages' times and the pipeline's, not the links': every message gets the same time, the one with
    which the replay takes ``plan.step.pipeline_us``. It is 0 where the stages alone take that long or longer; compare
    ``step_time`` with ``pipeline_us`` to see whether the replay agrees.
    """
    layout = plan.layout
    for module in layout.modules.values():
        if module.pipeline_size != layout.pipeline_size:
            raise PlanError("modules with pipelines of their own are not drawn yet.")
    program = make_program(layout.schedule, layout.pipeline_size, plan.num_microbatches, layout.virtual_size)

    def run(message_us: float) -> SimulatedStep:
        times = StepTimes(
            forward=[stage.forward_us for stage in plan.stages], backward=[stage.backward_us for stage in plan.stages],
            per_message=message_us,
        )  # fmt: skip
        return simulate(program, times, rendezvous=layout.schedule != "interleaved", with_timeline=True)

    message_us, target = 0.0, plan.step.pipeline_us
    step = run(message_us)
    if layout.num_virtual_stages == 1 or step.step_time >= target * (1 - TOLERANCE):
        return step, message_us
    # The step is convex and increasing in the message's time: Newton from above, where it is at least one message.
    message_us = target - step.step_time
    for _ in range(MAX_ROUNDS):
        step = run(message_us)
        excess = step.step_time - target
        num_messages = sum(label == "p2p" for label, _ in step.critical_path)
        if abs(excess) <= target * TOLERANCE or not num_messages:
            break
        message_us = max(0.0, message_us - excess / num_messages)
    return step, message_us
