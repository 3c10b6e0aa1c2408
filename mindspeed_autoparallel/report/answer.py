"""The answer in a few figures: what trains where, how fast, how far below the device's peak, and what is left free."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from mindspeed_autoparallel.spec.plan import Plan
from mindspeed_autoparallel.units import US_PER_MS, US_PER_S, format_bytes, format_us

TRILLION = 1e12
_DAY_S = 86_400


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Figures of a plan that a person acts on."""

    model: str
    num_parameters: int
    """0: unknown, like the next."""
    num_active_parameters: int
    device: str
    num_nodes: int
    devices_per_node: int
    layout: str
    step_us: float
    tokens_per_s: float
    """Of all devices together."""
    tokens_per_s_per_device: float
    mfu: float | None
    """Share of the devices' 16-bit peak that the model's own operations reach, recompute not counted; ``None``: the
    profile has no operations or no peak."""
    peak_bytes: int
    """Of the fullest rank."""
    limit_bytes: int
    """Of that rank, the safety margin already taken off."""
    capacity_bytes: int
    """Of a device; the limit where the plan does not have it."""
    plain_us: float | None
    """Step of the best plain recipe: any layout, even layers, no virtual stages, the same recompute everywhere."""
    plain_layout: str

    @property
    def plain_loss(self) -> float | None:
        """Return how much longer than the plan's the plain recipe's step is, as a share."""
        return None if self.plain_us is None else self.plain_us / self.step_us - 1

    def days(self, tokens: float) -> float:
        """Return days that a training on ``tokens`` takes."""
        return tokens / self.tokens_per_s / _DAY_S

    @property
    def num_devices(self) -> int:
        """Return devices of the cluster."""
        return self.num_nodes * self.devices_per_node


def answer_of(plan: Plan) -> Answer:
    """Return the figures of ``plan``."""
    cluster, model = plan.cluster, plan.model
    fullest = max(plan.memory, key=lambda rank: rank.peak_bytes / max(1, rank.limit_bytes))
    plain = next((base for base in plan.baselines if base.layout is not None), None)
    return Answer(
        model=model.name,
        num_parameters=model.num_parameters,
        num_active_parameters=model.num_active_parameters,
        device=plan.profile.device,
        num_nodes=cluster.num_nodes,
        devices_per_node=cluster.devices_per_node,
        layout=plan.layout.label(),
        step_us=plan.step.total_us,
        tokens_per_s=plan.throughput_tokens_per_s_per_device * cluster.num_devices,
        tokens_per_s_per_device=plan.throughput_tokens_per_s_per_device,
        mfu=_utilization(plan),
        peak_bytes=fullest.peak_bytes,
        limit_bytes=fullest.limit_bytes,
        capacity_bytes=int(_of_device(plan, "memory_capacity_bytes")) or fullest.limit_bytes,
        plain_us=plain.step_us if plain is not None else None,
        plain_layout=plain.layout.label() if plain is not None and plain.layout is not None else "",
    )


def answer_data(plan: Plan) -> dict[str, object]:
    """Return the figures as JSON-ready values."""
    answer = answer_of(plan)
    return {
        **asdict(answer),
        "parameters": parameters(answer),
        "plain_loss": answer.plain_loss,
        "days_per_trillion": answer.days(TRILLION),
        "headroom_bytes": answer.limit_bytes - answer.peak_bytes,
        "memory": memory_line(answer).removeprefix("memory: "),
    }


def answer_lines(plan: Plan, tokens: float | None = None) -> list[str]:
    """Return the answer as text. ``tokens``: of the whole training, whose days are added."""
    answer = answer_of(plan)
    lines = [
        f"{answer.model}{parameters(answer)} on {answer.num_nodes} x {answer.devices_per_node} {answer.device}: "
        f"{answer.layout}",
        f"  step {answer.step_us / US_PER_MS:,.1f} ms, {answer.tokens_per_s:,.0f} tokens/s in all, "
        f"{answer.tokens_per_s_per_device:,.0f} per device" + (f", MFU {answer.mfu:.1%}" if answer.mfu else ""),
    ]
    if tokens is not None:
        hours = answer.days(tokens) * 24 * answer.num_devices
        lines.append(f"  {amount(tokens)} tokens take {answer.days(tokens):,.1f} days ({hours:,.0f} device hours)")
    return [*lines, f"  {memory_line(answer)}", *([f"  {plain_line(answer)}"] if answer.plain_us else [])]


def parameters(answer: Answer) -> str:
    """Return `` (30.5 B parameters, 3.3 B active)``, nothing where they are unknown."""
    if not answer.num_parameters:
        return ""
    total, active = answer.num_parameters / 1e9, answer.num_active_parameters / 1e9
    return f" ({total:.1f} B parameters" + (f", {active:.1f} B active)" if 0 < active < 0.95 * total else ")")


def amount(tokens: float) -> str:
    """Return ``1T``, ``300B``, ``2.5M``."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if tokens >= size:
            return f"{tokens / size:.4g}{unit}"
    return f"{tokens:.4g}"


def memory_line(answer: Answer) -> str:
    """Return what the fullest rank leaves free."""
    margin = answer.capacity_bytes - answer.limit_bytes
    beside = f", beside a margin of {format_bytes(margin)}" if margin > 0 else ""
    if answer.peak_bytes > answer.limit_bytes:
        return f"memory: {format_bytes(answer.peak_bytes - answer.limit_bytes)} too much on the fullest rank{beside}"
    free = format_bytes(answer.limit_bytes - answer.peak_bytes)
    return f"memory: {format_bytes(answer.peak_bytes)} on the fullest rank, {free} free{beside}"


def plain_line(answer: Answer) -> str:
    """Return the plan beside the best plain recipe."""
    assert answer.plain_us is not None and answer.plain_loss is not None
    return (
        f"without a search: {format_us(answer.plain_us)} ({answer.plain_loss:+.1%}) by the best plain recipe, "
        f"{answer.plain_layout} (even layers, no virtual stages)"
    )


def _utilization(plan: Plan) -> float | None:
    operations, peak = plan.model.operations_per_sample, _of_device(plan, "peak_flops_per_s")
    if not operations or not peak or not plan.step.total_us:
        return None
    seconds = plan.step.total_us / US_PER_S
    return operations * plan.global_batch_size / (seconds * plan.cluster.num_devices * peak)


def _of_device(plan: Plan, key: str) -> float:
    """Return a figure of the device that the plan was made for, 0 where the plan does not have it."""
    device = plan.extra.costs.get("device")
    value = device.get(key) if isinstance(device, dict) else None
    return float(value) if isinstance(value, (int, float)) else 0.0
