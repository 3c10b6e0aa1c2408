"""A search described by a YAML block: the three parallel modes over one graph, and the report of the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.operators.config import OperatorConfig
from mindspeed_autoparallel.operators.constraints import ConstraintCost, Constraints, Search, constraint_costs
from mindspeed_autoparallel.operators.graph.node import Graph
from mindspeed_autoparallel.operators.lowering.megatron import MegatronConfiguration, derive_megatron
from mindspeed_autoparallel.operators.moves import list_moves
from mindspeed_autoparallel.operators.picture import picture_data
from mindspeed_autoparallel.operators.pipeline import Pipeline, data_parallel, search_pipelined, stage_bytes
from mindspeed_autoparallel.operators.plan import OperatorPlan
from mindspeed_autoparallel.operators.search.matmul_cut import advise
from mindspeed_autoparallel.operators.search.pins import Pins
from mindspeed_autoparallel.operators.search.recursive import ExplainedCut
from mindspeed_autoparallel.units import format_bytes


def search_configured(
    graph: Graph, devices: int, config: OperatorConfig, *, pins: Pins, pipeline: Pipeline, **options: Any
) -> OperatorPlan:
    """Return the plan of ``config``: data parallel (mode 0), propagated from pins (1) or searched (2).

    ``options``: further options of ``search_graph``. Raises ``ConfigError`` if parallelism is switched off, or if mode
    1 has no pin.
    """
    if not config.use_parallel:
        raise ConfigError("use_parallel is false, so there is nothing to search. Set it to true.")
    if config.parallel_mode == 0:
        return data_parallel(graph, devices)
    mode = config.search_mode
    if config.parallel_mode == 1:
        if not pins:
            raise ConfigError("parallel_mode 1 propagates pinned operators; give one with --pin (--operator-pin).")
        mode = "sharding_propagation"
    return search_pipelined(
        graph,
        devices,
        auto_pipeline=config.auto_pipeline,
        pipeline=pipeline,
        search_mode=mode,
        mem_coeff=config.mem_coeff,
        pins=pins,
        **options,
    )


def explain(plan: OperatorPlan, operator: str) -> list[str]:
    """Return, as lines, the costs of every cut of ``operator`` and, where it is not cut, a ``mem_coeff`` that cuts it.

    Raises ``ConfigError`` for an operator whose cuts were not decided by the symbolic cost model.
    """
    cuts = [entry for entry in plan.explained if entry.operator == operator]
    if not cuts:
        known = ", ".join(dict.fromkeys(entry.operator for entry in plan.explained))
        if plan.devices == 1:
            raise ConfigError(f"--explain {operator}: on one device nothing is cut; give more devices.")
        if not known and plan.search_mode == "recursive_programming":
            raise ConfigError(
                f"--explain {operator}: without mem_coeff every halving is solved to its least modelled time; give "
                "--mem-coeff 0.1."
            )
        if not known:
            raise ConfigError(
                f"--explain {operator}: only recursive_programming has costs to explain, not {plan.search_mode}."
            )
        raise ConfigError(f"--explain {operator}: it is not a matrix product of that search; these are: {known[:300]}.")
    lines: list[str] = []
    assert plan.repeat is not None, "a plan of recursive programming can be searched again"
    plan = replace(plan, repeat=cache(partial(_of_operator, plan.repeat, operator)))
    for entry in cuts:
        lines += [f"operator {operator}, cut {entry.cut + 1}", *entry.costs.log_lines()]
        if entry.costs.choice == "none":
            if entry.costs.threshold is not None:
                lines.append(f"mem_coeff where cutting I alone costs what no cut does: {entry.costs.threshold:.6g}")
            lines.append(advise(entry.costs, _choice_at(plan, entry)).line())
    return lines


def _of_operator(repeat: Callable[[float], list[ExplainedCut]], operator: str, mem_coeff: float) -> list[ExplainedCut]:
    """Search again and return only the decisions of ``operator``."""
    return [entry for entry in repeat(mem_coeff) if entry.operator == operator]


def _choice_at(plan: OperatorPlan, entry: ExplainedCut) -> Callable[[float], str]:
    """Return a function from a ``mem_coeff`` to the cut that a new search makes in place of ``entry``."""
    assert plan.repeat is not None, "a plan of recursive programming can be searched again"
    repeat = plan.repeat

    def choice(mem_coeff: float) -> str:
        found = (other for other in repeat(mem_coeff) if (other.operator, other.cut) == (entry.operator, entry.cut))
        return next(found).taken

    return choice


def _products(plan: OperatorPlan) -> list[str]:
    """Return a line per matrix product; equal ones of repeated layers share a line, with their count."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, parts in plan.degrees().items():
        cuts = ", ".join(f"{axis} / {count}" for axis, count in parts.items()) or "not cut"
        alike.setdefault((plan.decisions.graph.nodes[name].role or name, cuts), []).append(name)
    counted = [(names[0] + (f" x{len(names)}" if len(names) > 1 else ""), cuts) for (_, cuts), names in alike.items()]
    return [f"{label:32} {cuts}" for label, cuts in counted]


class SearchResult:
    """A plan with the Megatron configuration derived from it, or the reason for its absence."""

    def __init__(self, plan: OperatorPlan, *, micro_batch_size: int | None = None) -> None:
        self.plan = plan
        self.constraints: tuple[ConstraintCost, ...] = ()
        self.reason = ""
        self.megatron: MegatronConfiguration | None = None
        try:
            self.megatron = derive_megatron(plan, micro_batch_size=micro_batch_size)
        except InfeasiblePlan as error:
            self.reason = str(error)

    def flags(self) -> list[str]:
        """Return Megatron's command-line arguments; ``InfeasiblePlan`` if no configuration was derived."""
        if self.megatron is None:
            raise InfeasiblePlan(self.reason)
        return self.megatron.flags()

    def shortages(self, memory_bytes: int) -> dict[str, str]:
        """Return a message for each of ``plan`` and ``megatron`` that needs more than ``memory_bytes`` per device."""
        plans = {"plan": self.plan, **({"megatron": self.megatron.uniform} if self.megatron else {})}
        found = {}
        for name, each in plans.items():
            given = Pipeline(micro_batch_num=self.plan.num_microbatches)
            needed, _ = stage_bytes(each.decisions, given, self.plan.stages)
            if needed > memory_bytes > 0:
                found[name] = (
                    f"the {'plan' if name == 'plan' else 'Megatron run'} does not fit: it needs {format_bytes(needed)} "
                    "per device for weights, their states and the outputs kept for backward, and "
                    f"{format_bytes(memory_bytes)} are there (--memory-gib)."
                )
        return found

    def as_json(self) -> dict[str, object]:
        derived = self.megatron.as_json() if self.megatron else None
        return {
            **self.plan.as_json(),
            "megatron": derived,
            "megatron_reason": self.reason,
            "moves": [move.as_json() for move in list_moves(self.plan)],
            "constraints": [constraint.as_json() for constraint in self.constraints],
        }

    def price_constraints(self, search: Search, given: Constraints) -> None:
        """Set ``constraints`` to the costs of ``given``: one search without each (see ``constraint_costs``)."""
        self.constraints = tuple(constraint_costs(self.plan, search, given, self.megatron))

    def lines(self) -> list[str]:
        """Return lines for the terminal: cuts of products, totals, Megatron configuration, constraints and notes."""
        plan = self.plan
        dp, mp = plan.dp_mp()
        sent = sum(forward + backward for forward, backward in plan.edge_bytes().values())
        return [
            *_products(plan),
            f"{plan.search_mode} on {plan.devices} devices: stages {plan.stages}, data parallel {dp}, "
            f"model parallel {mp}; {format_bytes(sent)} sent per device and step; searched in {plan.search_s:.2f} s",
            *([f"  {plan.bound.line()}"] if plan.bound else []),
            *(self.megatron.lines() if self.megatron else [f"Megatron: none: {self.reason}"]),
            *(line for constraint in self.constraints for line in constraint.lines()),
            *(f"note: {note}" for note in plan.notes),
        ]

    def picture(self) -> dict[str, object]:
        """Return the data that ``report.operator_page`` draws."""
        derived = self.megatron.as_json() if self.megatron else None
        return picture_data(self.plan, derived, self.reason, self.constraints)
