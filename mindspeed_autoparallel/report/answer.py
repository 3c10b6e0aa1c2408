"""The answer in a few figures: model and cluster, speed, share of the device's peak, and free memory."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_autoparallel.report.headline import at_mean_sample
from mindspeed_autoparallel.spec.plan import Plan
from mindspeed_autoparallel.units import US_PER_MS, US_PER_S, format_bytes, format_us

TRILLION = 1e12
_DAY_S = 86_400


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The figures of a plan that a decision needs."""

    model: str
    num_parameters: int
    """0: unknown, also for the active ones."""
    num_active_parameters: int
    device: str
    num_nodes: int
    devices_per_node: int
    layout: str
    step_us: float
    """``Plan.mean_us``, to which throughput and MFU refer; comparisons are of the mean sample."""
    tokens_per_s: float
    """Throughput of all devices together."""
    tokens_per_s_per_device: float
    mfu: float | None
    """Share of the devices' 16-bit peak that the model's operations reach, without recompute; ``None``: the profile has
    no operations or no peak."""
    peak_bytes: int
    """Peak of the fullest rank."""
    limit_bytes: int
    """Limit of that rank, after the safety margin."""
    capacity_bytes: int
    """Memory of a device; the limit if the plan lacks it."""
    plain_us: float | None
    """Step of the best plain recipe: any layout, even layers, no virtual stages, the same recompute everywhere."""
    plain_layout: str
    unoverlapped_us: float
    """Step without ``--tp-comm-overlap`` if the plan was priced with it; 0: unknown or priced without."""
    parameters: str
    """`` (30.5 B parameters, 3.3 B active)``, empty if unknown."""
    plain_loss: float | None
    """Share by which the plain recipe's step exceeds the plan's."""
    days_per_trillion: float
    """Days that a training on 1T tokens takes."""
    headroom_bytes: int
    """Free bytes below the limit of the fullest rank."""
    memory: str
    """Peak and free memory as text."""

    def days(self, tokens: float) -> float:
        """Return the days that a training on ``tokens`` takes."""
        return tokens / self.tokens_per_s / _DAY_S


def answer_of(plan: Plan) -> Answer:
    cluster, model, at_mean_sample_us = plan.cluster, plan.model, plan.step.total_us
    fullest = max(plan.memory, key=lambda rank: rank.peak_bytes / max(1, rank.limit_bytes))
    plain = next((base for base in plan.baselines if base.layout is not None), None)
    plain_us = plain.step_us if plain is not None else None
    capacity = int(_of_device(plan, "memory_capacity_bytes")) or fullest.limit_bytes
    tokens_per_s = plan.mean_throughput * cluster.num_devices
    return Answer(
        model=model.name,
        num_parameters=model.num_parameters,
        num_active_parameters=model.num_active_parameters,
        device=plan.profile.device,
        num_nodes=cluster.num_nodes,
        devices_per_node=cluster.devices_per_node,
        layout=plan.layout.label(),
        step_us=plan.mean_us,
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_device=plan.mean_throughput,
        mfu=_utilization(plan),
        peak_bytes=fullest.peak_bytes,
        limit_bytes=fullest.limit_bytes,
        capacity_bytes=capacity,
        plain_us=plain_us,
        plain_layout=plain.layout.label() if plain is not None and plain.layout is not None else "",
        unoverlapped_us=plan.extra.unoverlapped_us,
        parameters=_parameters(model.num_parameters, model.num_active_parameters),
        plain_loss=None if plain_us is None else plain_us / at_mean_sample_us - 1,
        days_per_trillion=TRILLION / tokens_per_s / _DAY_S,
        headroom_bytes=fullest.limit_bytes - fullest.peak_bytes,
        memory=_memory(fullest.peak_bytes, fullest.limit_bytes, capacity) + at_mean_sample(plan) + _worst(plan),
    )


def answer_lines(plan: Plan, tokens: float | None = None) -> list[str]:
    """Return the answer as text. ``tokens``: those of the whole training, to add its days."""
    answer, cluster = answer_of(plan), plan.cluster
    lines = [
        f"{answer.model}{answer.parameters} on {cluster.num_nodes} x {cluster.devices_per_node} {answer.device}: "
        f"{answer.layout}",
        f"  step {answer.step_us / US_PER_MS:,.1f} ms, {answer.tokens_per_s:,.0f} tokens/s in all, "
        f"{answer.tokens_per_s_per_device:,.0f} per device" + (f", MFU {answer.mfu:.1%}" if answer.mfu else ""),
    ]
    if tokens is not None:
        hours = answer.days(tokens) * 24 * cluster.num_devices
        lines.append(f"  {amount(tokens)} tokens take {answer.days(tokens):,.1f} days ({hours:,.0f} device hours)")
    if answer.unoverlapped_us:
        more = answer.unoverlapped_us / plan.step.total_us - 1
        lines.append(
            f"  without --tp-comm-overlap: {format_us(answer.unoverlapped_us)} ({more:+.1%}){at_mean_sample(plan)}"
        )
    return [
        *lines,
        f"  memory: {answer.memory}",
        *([_plain_line(answer) + at_mean_sample(plan)] if answer.plain_us else []),
    ]


def _parameters(total: int, active: int) -> str:
    """Return `` (30.5 B parameters, 3.3 B active)``, or millions (`` M``) below 0.1 B."""
    if not total:
        return ""
    unit, name = (1e9, "B") if total >= 1e8 else (1e6, "M")
    some = f", {active / unit:.1f} {name} active" if 0 < active < total else ""
    return f" ({total / unit:.1f} {name} parameters{some})"


def amount(tokens: float) -> str:
    """Return ``1T``, ``300B``, ``2.5M``."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if tokens >= size:
            return f"{tokens / size:.4g}{unit}"
    return f"{tokens:.4g}"


def _memory(peak: int, limit: int, capacity: int) -> str:
    """Return text on the fullest rank's free memory."""
    beside = f", plus a margin of {format_bytes(capacity - limit)}" if capacity > limit else ""
    if peak > limit:
        return f"{format_bytes(peak - limit)} too much on the fullest rank{beside}"
    return f"{format_bytes(peak)} on the fullest rank, {format_bytes(limit - peak)} free{beside}"


def _worst(plan: Plan) -> str:
    """Return the peak of the heaviest microbatches of drawn data."""
    if plan.data is None or not plan.data.worst_bytes:
        return ""
    return f"; {format_bytes(plan.data.worst_bytes)} on rank {plan.data.worst_rank} with the heaviest samples"


def _plain_line(answer: Answer) -> str:
    """Return the line that compares the plan with the best plain recipe."""
    assert answer.plain_us is not None and answer.plain_loss is not None
    return (
        f"  without a search: {format_us(answer.plain_us)} ({answer.plain_loss:+.1%}) by the best plain recipe, "
        f"{answer.plain_layout} (even layers, no virtual stages)"
    )


def _utilization(plan: Plan) -> float | None:
    operations, peak = plan.model.operations_per_sample, _of_device(plan, "peak_flops_per_s")
    # The operations are those of one sample; samples of drawn data have others.
    if not operations or not peak or not plan.mean_us or plan.data is not None:
        return None
    seconds = plan.mean_us / US_PER_S
    return operations * plan.global_batch_size / (seconds * plan.cluster.num_devices * peak)


def _of_device(plan: Plan, key: str) -> float:
    """Return a figure of the plan's device, 0 if the plan lacks it."""
    device = plan.extra.costs.get("device")
    value = device.get(key) if isinstance(device, dict) else None
    return float(value) if isinstance(value, (int, float)) else 0.0
