"""A hetero plan replayed: the backbone anew, also after an edit; the encoders' phases as they were planned."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_autoparallel.errors import PlanError
from mindspeed_autoparallel.planner.evaluate import Evaluation
from mindspeed_autoparallel.planner.hetero.assembly import with_encoders
from mindspeed_autoparallel.planner.layouts.replay import replay_pipeline
from mindspeed_autoparallel.spec import Plan


def replay_hetero(plan: Plan) -> tuple[Plan, Evaluation]:
    """Return what ``planner.replay`` does; the evaluation is of the backbone's pipeline alone.

    Raises ``PlanError`` where an edit would change the encoders' phases: the batch, or a limit they do not fit in.
    """
    record = plan.hetero
    assert record is not None
    limit = plan.memory[0].limit_bytes
    if plan.cluster.memory_limit_bytes is not None:
        limit = plan.cluster.memory_limit_bytes
    left = limit - record.reserved_bytes
    if left <= 0:
        raise PlanError(f"the encoders hold {record.reserved_bytes} bytes, the limit is {limit}: plan again.")
    batches = {phase.num_macro_batches: phase for phase in record.encoders}
    for count, phase in batches.items():
        if -(-plan.num_microbatches // phase.layout.micro_batch_scale) != count:
            raise PlanError(
                f"{phase.module} was planned for {count} batches of {phase.layout.micro_batch_scale} microbatches, the "
                f"plan now has {plan.num_microbatches} microbatches. Plan again for another global batch."
            )
    own = {phase.module for phase in record.encoders}
    inner = replace(
        plan,
        hetero=None,
        layout=replace(plan.layout, modules={}),
        model=replace(
            plan.model,
            modules=tuple(
                replace(module, predecessors=tuple(name for name in module.predecessors if name not in own))
                for module in plan.model.modules
                if module.name not in own
            ),
        ),
        cluster=replace(plan.cluster, memory_limit_bytes=left),
    )
    again, found = replay_pipeline(inner)
    whole = replace(
        again,
        hetero=record,
        layout=plan.layout,
        model=plan.model,
        cluster=plan.cluster,
        # Baselines were of the whole step already.
        baselines=tuple(
            replace(base, step_us=None if base.step_us is None else base.step_us - record.total_us)
            for base in again.baselines
        ),
    )
    return with_encoders(whole, limit), found
