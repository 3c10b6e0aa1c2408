"""The cost of each constraint: the plan is searched again without it, and the resulting cuts are given as pins."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from mindspeed_autoparallel.errors import AutoParallelError
from mindspeed_autoparallel.operators.costs import plan_cost
from mindspeed_autoparallel.operators.lowering.megatron import MegatronConfiguration
from mindspeed_autoparallel.operators.plan import OperatorPlan
from mindspeed_autoparallel.units import format_us

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class Constraints:
    """The constraints of a plan; ``tied`` as in ``SearchOptions``, limits in bytes of one device or None."""

    pins: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    tied: bool | None = None
    parameter_limit_bytes: int | None = None
    memory_limit_bytes: int | None = None
    stages: int = 1


Search = Callable[[Constraints], OperatorPlan]


@dataclass(frozen=True)
class ConstraintCost:
    """One constraint, priced by the cost model: microseconds of a step with it and without it.

    ``pins``: cuts that products have only without it, in the form of ``--pin``. ``note``: why there is no plan without
    it, or other remarks.
    """

    name: str
    with_us: float
    without_us: float | None
    pins: tuple[str, ...] = ()
    note: str = ""

    @property
    def cost_us(self) -> float | None:
        """Return the constraint's cost; negative if a search without proof found a more expensive plan without it."""
        return None if self.without_us is None else self.with_us - self.without_us

    def as_json(self) -> dict[str, object]:
        return {
            "constraint": self.name,
            "with_us": self.with_us,
            "without_us": self.without_us,
            "cost_us": self.cost_us,
            "pins": list(self.pins),
            "note": self.note,
        }

    def lines(self) -> list[str]:
        if self.without_us is None or self.cost_us is None:
            return [f"constraint {self.name}: {self.note}"]
        share = self.cost_us / self.with_us if self.with_us else 0.0
        told = f"costs {format_us(self.cost_us)} of {format_us(self.with_us)} ({share:.1%})"
        if abs(share) < 1e-9:
            told = "costs nothing"
        if share < -1e-9:
            told = (
                f"helps: without it the search finds a plan more expensive by {format_us(-self.cost_us)} ({-share:.1%})"
            )
        note = f"; {self.note}" if self.note else ""
        return [f"constraint {self.name}: {told}{note}", *(f"    without it: --pin '{pin}'" for pin in self.pins)]


def constraint_costs(
    plan: OperatorPlan, search: Search, given: Constraints, megatron: MegatronConfiguration | None
) -> list[ConstraintCost]:
    """Price each constraint of ``plan``: pins, tied layers, memory limits, stages, and one Megatron layout.

    Each constraint of ``given`` takes one ``search``; the Megatron layout takes none.
    """
    found = [_without(plan, search, name, left) for name, left in _constraints(plan, given)]
    if megatron is not None:
        # The uniform plan obeys this constraint; the plan per operator is the one without it.
        free, bound = megatron.plan_cost.total_us, megatron.uniform_cost.total_us
        name = f"one layout for all operators ({megatron.layout.label()}, as Megatron has it)"
        found.append(ConstraintCost(name, bound, free, _pins(megatron.uniform, plan)))
    return found


def _constraints(plan: OperatorPlan, given: Constraints) -> Iterator[tuple[str, Constraints]]:
    """Yield the name of each constraint, and the other constraints without it."""
    for pattern, wanted in given.pins.items():
        shown = ",".join(f"{axis}={parts}" for axis, parts in wanted.items())
        left = {other: parts for other, parts in given.pins.items() if other != pattern}
        yield f"--pin {pattern}:{shown}", replace(given, pins=left)
    if plan.search_mode != "recursive_programming" and given.tied is not False and _repeats(plan):
        yield "repeated layers are cut alike", replace(given, tied=False)
    if given.parameter_limit_bytes is not None:
        name = f"--parameter-limit-gib {given.parameter_limit_bytes / 2**30:g}"
        yield name, replace(given, parameter_limit_bytes=None)
    if plan.search_mode == "exact" and given.memory_limit_bytes is not None:
        name = f"{given.memory_limit_bytes / 2**30:g} GiB of memory per device"
        yield name, replace(given, memory_limit_bytes=None)
    if given.stages > 1:
        yield f"{given.stages} pipeline stages", replace(given, stages=1)


def _repeats(plan: OperatorPlan) -> bool:
    roles = [node.role for node in plan.decisions.graph.nodes.values() if node.role and node.matmul]
    return len(set(roles)) < len(roles)


def _without(plan: OperatorPlan, search: Search, name: str, left: Constraints) -> ConstraintCost:
    with_us = plan_cost(plan).total_us
    try:
        free = search(left)
    except AutoParallelError as error:
        return ConstraintCost(name, with_us, None, note=f"without it there is no plan: {error}")
    without_us = plan_cost(free).total_us
    heuristic = "" if free.search_mode == "exact" else f"both by {free.search_mode}, which proves nothing"
    cheaper = without_us < with_us * (1 - 1e-9) and free.decisions.mesh == plan.decisions.mesh
    return ConstraintCost(name, with_us, without_us, _pins(plan, free) if cheaper else (), heuristic)


def _pins(plan: OperatorPlan, free: OperatorPlan) -> tuple[str, ...]:
    """Return, as pins, the cuts of ``free`` that products of ``plan`` lack; repeated layers share a pattern."""
    before, after = plan.degrees(), free.degrees()
    written: dict[str, None] = {}
    for name, parts in after.items():
        if not parts or parts == before[name]:
            continue
        pattern = _NUMBER.sub("*", name)
        if any(after[other] != parts for other in after if fnmatch.fnmatchcase(other, pattern)):
            pattern = name
        written[f"{pattern}:" + ",".join(f"{axis}={count}" for axis, count in parts.items())] = None
    return tuple(written)
