"""The Megatron configuration nearest to a plan per operator, and the cost of sharing it among all operators."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mindspeed_autoparallel.errors import InfeasiblePlan, flag_of
from mindspeed_autoparallel.operators.costs import PlanCost, plan_cost
from mindspeed_autoparallel.operators.graph.node import NO_CUT, Graph
from mindspeed_autoparallel.operators.lowering.uniform import (
    CONTEXT,
    DATA,
    EXPERT,
    IDLE,
    TENSOR,
    attention_limits,
    role_of_cut,
    samples_at_once,
    uniform_decisions,
    votes,
    winners,
)
from mindspeed_autoparallel.operators.plan import OperatorPlan
from mindspeed_autoparallel.operators.search.pricing import Machine
from mindspeed_autoparallel.operators.search.recursive import carried_axes
from mindspeed_autoparallel.operators.search.state import Decisions
from mindspeed_autoparallel.spec import Layout
from mindspeed_autoparallel.units import format_bytes, format_us

_RESULT_NAMES = {DATA: "DP", TENSOR: "TP", CONTEXT: "CP"}


@dataclass(frozen=True)
class MegatronConfiguration:
    """``layout``: the candidate for the other planners; ``uniform``: the same configuration per operator."""

    layout: Layout
    global_batch_size: int
    roles: tuple[tuple[int, str, float], ...]
    """Per mesh dim: devices, role, and the share of the FLOPs whose operators voted for it."""
    uniform: OperatorPlan
    plan_cost: PlanCost
    uniform_cost: PlanCost
    num_changed: int
    """Number of operators that the uniform plan cuts differently."""
    notes: tuple[str, ...] = ()

    @property
    def extra_us(self) -> float:
        """Return the modelled cost of uniformity per step; negative if the plan was not optimal."""
        return self.uniform_cost.total_us - self.plan_cost.total_us

    def flags(self) -> list[str]:
        """Return the command-line arguments of a Megatron script."""
        layout = self.layout
        sizes = {name: size for name, size in layout.megatron_sizes.items() if size > 1 or "expert" not in name}
        return [
            *(word for name, size in sizes.items() for word in (flag_of(name), str(size))),
            *(["--sequence-parallel"] if layout.sequence_parallel else []),
            *("--micro-batch-size", str(layout.micro_batch_size)),
            *("--global-batch-size", str(self.global_batch_size)),
        ]

    def as_json(self) -> dict[str, object]:
        layout = self.layout
        return {
            "data_parallel_size": layout.data_size,
            **layout.megatron_sizes,
            "sequence_parallel": layout.sequence_parallel,
            "micro_batch_size": layout.micro_batch_size,
            "global_batch_size": self.global_batch_size,
            "flags": self.flags(),
            "mesh_dims": [{"devices": n, "role": role, "share": share} for n, role, share in self.roles],
            "plan_cost": self.plan_cost.as_json(),
            "uniform_cost": self.uniform_cost.as_json(),
            "extra_us": self.extra_us,
            "operators_changed": self.num_changed,
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """Return the configuration, its cost and its flags as lines for the terminal."""
        plan, uniform = self.plan_cost, self.uniform_cost
        sign = "" if self.extra_us < 0 else "+"
        cheaper = " (cheaper: only the exact mode compares whole plans)" if self.extra_us < 0 else ""
        relative = self.extra_us / plan.total_us * 100 if plan.total_us else 0.0
        return [
            f"Megatron: {self.layout.label()}, global batch {self.global_batch_size}",
            f"  uniform costs {sign}{format_us(self.extra_us)} ({relative:+.1f} %) by the cost model{cheaper}: "
            f"{format_us(plan.total_us)} -> {format_us(uniform.total_us)}, "
            f"{format_bytes(plan.sent_bytes)} -> {format_bytes(uniform.sent_bytes)} sent and "
            f"{format_bytes(plan.parameter_bytes)} -> {format_bytes(uniform.parameter_bytes)} of weights per device; "
            f"{self.num_changed} operators change",
            "  " + " ".join(self.flags()),
            *(f"  note: {note}" for note in self.notes),
        ]


def _micro_batch(samples: int, num_microbatches: int, wanted: int | None) -> tuple[int, list[str]]:
    """Return the samples of a microbatch of a replica of ``samples``, and a note if the plan's number of microbatches
    does not divide them."""
    if wanted and samples % wanted == 0:
        return wanted, []
    if samples % num_microbatches:
        return 1, [f"{samples} samples of a replica are not a multiple of {num_microbatches} microbatches."]
    return samples // num_microbatches, []


def _first_legal(
    graph: Graph, mesh: tuple[int, ...], roles: list[str], dim: int, options: list[str], num_microbatches: int
) -> tuple[str, str]:
    """Return the first of ``options`` that the model allows on a mesh dim, and why an earlier one is refused."""
    refused = ""
    for role in options:
        reason = _illegal(graph, mesh[:dim], roles, mesh[dim], role, num_microbatches)
        if not reason:
            return role, refused
        refused = refused or reason
    raise InfeasiblePlan(
        f"no Megatron configuration uses the {mesh[dim]} devices of cut {dim + 1} in one role: {refused} "
        "Change the number of devices, or the batch."
    )


def derive_megatron(
    plan: OperatorPlan, *, machine: Machine | None = None, micro_batch_size: int | None = None
) -> MegatronConfiguration:
    """Return DP, TP, SP, CP, EP and PP: each mesh dim takes the role that has most of the FLOPs of ``plan``.

    A role that the model does not allow (samples, heads or tokens that do not divide) gives way to the next in the
    vote, with a note. ``micro_batch_size`` is kept if it divides the samples of a replica; otherwise the
    plan's number of microbatches gives it. Raises ``InfeasiblePlan`` if no role is left for a mesh dim.
    """
    made = plan.decisions
    graph, mesh = made.graph, made.mesh
    at_once = plan.num_microbatches if plan.stages > 1 else 1
    notes: list[str] = []
    roles: list[str] = []
    taken: list[tuple[int, str, float]] = []
    expert_dims: list[int] = []
    for dim, (parts, ballot) in enumerate(zip(mesh, votes(made, at_once), strict=True)):
        ranked = winners(ballot)
        if ballot.get(EXPERT, 0.0) and (ranked[0] == EXPERT or ballot.get(DATA, 0.0)):
            expert_dims.append(dim)
            ranked = [DATA, *(role for role in ranked if role not in (DATA, EXPERT))]
        wish = ranked[0] if ranked else IDLE
        options = list(dict.fromkeys([*(r for r in ranked if r not in (IDLE, EXPERT)), DATA, TENSOR, CONTEXT]))
        role, refused = _first_legal(graph, mesh, roles, dim, options, at_once)
        if role != wish:
            why = refused if refused and wish != IDLE else "most operators leave these devices idle."
            notes.append(f"cut {dim + 1} into {parts} becomes {_RESULT_NAMES[role]}, not {wish}: {why}")
        roles.append(role)
        taken.append((parts, role, ballot.get(role, 0.0) + (ballot.get(EXPERT, 0.0) if dim in expert_dims else 0.0)))
    expert_dims = [dim for dim in expert_dims if roles[dim] == DATA]
    sequence_parallel = TENSOR in roles and _streams_cut_by_rows(made, roles)
    experts = math.prod(mesh[dim] for dim in expert_dims)
    if experts > 1 and TENSOR in roles and not sequence_parallel:
        sequence_parallel = True
        notes.append("sequence parallelism is on because Megatron requires it with TP and EP together.")
    decisions = uniform_decisions(
        graph, mesh, roles, sequence_parallel=sequence_parallel, expert_dims=tuple(expert_dims)
    )
    uniform = OperatorPlan(decisions, "uniform", (), 0.0, stages=plan.stages, num_microbatches=plan.num_microbatches)
    size = {role: math.prod(n for n, r in zip(mesh, roles, strict=True) if r == role) for role in _RESULT_NAMES}
    each = max(1, graph.samples // size[DATA])
    micro, note = _micro_batch(each, plan.num_microbatches, micro_batch_size)
    notes += note
    layout = Layout(
        pipeline_size=plan.stages,
        tensor_size=size[TENSOR],
        data_size=size[DATA],
        context_size=size[CONTEXT],
        expert_size=experts,
        micro_batch_size=micro,
        sequence_parallel=sequence_parallel,
    )
    changed = sum(decisions.choices[n] != made.choices[n] for n, node in graph.nodes.items() if node.inputs)
    costs = plan_cost(plan, machine), plan_cost(uniform, machine)
    return MegatronConfiguration(layout, each * size[DATA], tuple(taken), uniform, *costs, changed, tuple(notes))


def _illegal(
    graph: Graph, mesh: tuple[int, ...], roles: list[str], parts: int, role: str, num_microbatches: int
) -> str:
    """Return why ``role`` cannot have ``parts`` times more devices; empty if it can."""
    size = parts * math.prod(n for n, r in zip(mesh, roles, strict=True) if r == role)
    samples, heads = attention_limits(graph)
    if role == DATA and samples and samples % size:
        return f"{size} replicas do not divide {samples} samples."
    at_once = samples_at_once(graph, num_microbatches)
    if role == DATA and at_once % size:
        return f"{size} replicas do not divide the {at_once} samples of one of {num_microbatches} microbatches."
    if role == TENSOR and heads and heads % size:
        return f"TP {size} does not divide {heads} key heads."
    tokens = _tokens_per_sample(graph)
    if role == CONTEXT and tokens % (2 * size):
        return f"CP {size} needs a sequence in multiples of {2 * size}, not {tokens} tokens."
    return ""


def _tokens_per_sample(graph: Graph) -> int:
    first = next((node for node in graph.nodes.values() if node.matmul), None)
    if first is None or first.matmul is None:
        return 0
    return math.prod(first.axes[axis].size for axis in first.matmul[0]) // max(1, graph.samples)


def _streams_cut_by_rows(made: Decisions, roles: list[str]) -> bool:
    """Return whether the plan cuts by rows most of the bytes that tensor parallelism leaves whole (norms, sums)."""
    graph = made.graph
    without = uniform_decisions(graph, made.mesh, roles, sequence_parallel=False)
    batch = carried_axes(graph)
    whole = by_rows = 0
    for name, node in graph.nodes.items():
        if not node.inputs or node.matmul or name not in batch:
            continue
        for dim, role in enumerate(roles):
            if role == TENSOR and without.choices[name][dim] == NO_CUT:
                whole += node.output_bytes
                axis = made.choices[name][dim]
                if role_of_cut(node, axis, batch[name], 1, 1, 0) in (DATA, CONTEXT):
                    by_rows += node.output_bytes
    return 2 * by_rows > whole
