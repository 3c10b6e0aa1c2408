"""Search over a graph: one cut after another by the chosen mode, and the plan with its costs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.operators.graph.node import NO_CUT, Graph
from mindspeed_autoparallel.operators.graph.redistribution import gradient_of_output, moved_bytes
from mindspeed_autoparallel.operators.search.pins import Pins, pinned_choices
from mindspeed_autoparallel.operators.search.problem import CutProblem, Machine, build_problem
from mindspeed_autoparallel.operators.search.recursive import ExplainedCut, solve_recursive
from mindspeed_autoparallel.operators.search.state import Decisions, device_factors

SEARCH_MODES = ("recursive_programming", "sharding_propagation", "exact")
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class OperatorPlan:
    """``decisions`` hold every operator's choice per mesh dim; ``search_mode`` is the one that made them."""

    decisions: Decisions
    search_mode: str
    explained: tuple[ExplainedCut, ...]
    search_s: float
    notes: tuple[str, ...] = ()
    capture_s: float = 0.0
    stages: int = 1
    num_microbatches: int = 1

    @property
    def devices(self) -> int:
        """Of all stages."""
        return self.stages * math.prod(self.decisions.mesh)

    def edge_bytes(self) -> dict[tuple[str, str, int], tuple[int, int]]:
        """Bytes one device sends on each edge, (forward, backward), by the steps an executor takes.

        Readers that want a tensor alike share one redistribution: the first of them carries its bytes.
        """
        made = self.decisions
        result = {}
        seen = set()
        for producer, consumer, slot in made.graph.edges():
            out, wanted = made.output_placements(producer.name), made.operand_placements(consumer.name, slot)
            back = made.gradient_placements(consumer.name, slot)
            if (producer.name, wanted, back) in seen:
                result[producer.name, consumer.name, slot] = (0, 0)
                continue
            seen.add((producer.name, wanted, back))
            forward = moved_bytes(out, wanted, producer.output_bytes, made.mesh)
            needed = gradient_of_output(out)
            backward = moved_bytes(back, needed, producer.output_bytes, made.mesh) if producer.needs_gradient else 0
            result[producer.name, consumer.name, slot] = (forward, backward)
        return result

    def degrees(self) -> dict[str, dict[str, int]]:
        """Parts per axis name of every matrix product."""
        made = self.decisions
        result = {}
        for name, node in made.graph.nodes.items():
            if node.matmul:
                parts: dict[str, int] = {}
                for axis, count in made.cuts(name):
                    parts[node.axes[axis].name] = parts.get(node.axes[axis].name, 1) * count
                result[name] = parts
        return result

    def dp_mp(self) -> tuple[int, int]:
        """(data parallel, model parallel) that most matrix products of the layers use: rows, and columns or inner."""
        votes: dict[tuple[int, int], int] = {}
        for parts in self.degrees().values():
            # Experts are divided among data-parallel devices.
            dp = math.prod(n for axis, n in parts.items() if axis.startswith(("rows", "experts")))
            mp = math.prod(parts.values()) // dp
            votes[dp, mp] = votes.get((dp, mp), 0) + 1
        return max(votes, key=lambda pair: votes[pair]) if votes else (1, 1)

    def as_json(self) -> dict[str, Any]:
        """Per operator: cut axes, bytes of inputs, placements (tensor dim, -1 whole, -2 pending sum) per mesh dim."""
        made, moved = self.decisions, self.edge_bytes()
        operators = {}
        for name, node in made.graph.nodes.items():
            operators[name] = {
                "kind": node.kind,
                "cut_axes": [None if c == NO_CUT else node.axes[c].name for c in made.choices[name]],
                "inputs": [
                    {
                        "from": source,
                        "placements": list(made.operand_placements(name, slot)),
                        "forward_bytes": moved[source, name, slot][0],
                        "backward_bytes": moved[source, name, slot][1],
                    }
                    for slot, source in enumerate(node.inputs)
                ],
                "output": list(made.output_placements(name)),
            }
        dp, mp = self.dp_mp()
        return {
            "schema_version": SCHEMA_VERSION,
            "search_mode": self.search_mode,
            "mesh": list(made.mesh),
            "data_parallel": dp,
            "model_parallel": mp,
            "search_s": self.search_s,
            "pipeline_stages": self.stages,
            "forward_bytes": sum(f for f, _ in moved.values()),
            "backward_bytes": sum(b for _, b in moved.values()),
            "unknown_operators": made.graph.unknown,
            "notes": list(self.notes),
            "operators": operators,
        }


def search_graph(
    graph: Graph,
    devices: int,
    *,
    search_mode: str = "recursive_programming",
    mem_coeff: float = 0.1,
    pins: Pins | None = None,
    tied: bool = True,
    machine: Machine | None = None,
    parameter_limit_bytes: int | None = None,
    num_microbatches: int = 1,
    most_row_parts: int | None = None,
) -> OperatorPlan:
    """Cut ``graph`` for ``devices``; see docs/operators.md for the modes and units.

    ``parameter_limit_bytes`` (mode exact): parameters of one device; ``most_row_parts`` (mode recursive_programming):
    parts that rows are cut into. Device counts that are not a power of two get the
    exact mode, with a note. Raises ``ConfigError`` for input that cannot be right and ``InfeasiblePlan`` for the limit.
    """
    if search_mode not in SEARCH_MODES:
        raise ConfigError(f"search_mode {search_mode!r} is none of {', '.join(SEARCH_MODES)}.")
    if not (isinstance(mem_coeff, (int, float)) and 0 < mem_coeff < math.inf):
        raise ConfigError(f"mem_coeff={mem_coeff}: give a positive number, for example 0.1.")
    mesh = device_factors(devices)
    if parameter_limit_bytes is not None and search_mode != "exact":
        raise ConfigError(f"a limit of parameter bytes is kept by search_mode exact only, not by {search_mode}.")
    notes = []
    if search_mode == "recursive_programming" and set(mesh) - {2}:
        notes.append(f"{devices} devices are not a power of two: recursive_programming halves, so exact was used.")
        search_mode = "exact"
    fixed = pinned_choices(graph, pins or {}, mesh)
    machine = machine or Machine()
    started = time.perf_counter()
    explained: list[ExplainedCut] = []
    if search_mode == "recursive_programming":
        by_weight = devices > 32 and num_microbatches < 8
        decisions, explained = solve_recursive(
            graph, mesh, mem_coeff, fixed, by_weight=by_weight, most_row_parts=most_row_parts
        )
    else:
        decisions = Decisions(graph, (), dict.fromkeys(graph.nodes, ()))
        for dim, parts in enumerate(mesh):
            problem = build_problem(decisions, parts, machine, fixed[dim], tied=tied)
            # The limit holds after all cuts: this one may leave as much as the cuts to come can still divide.
            later = math.prod(mesh[dim + 1 :])
            limit = None if parameter_limit_bytes is None else float(parameter_limit_bytes * later)
            decisions = decisions.extend(parts, problem.spread(_solver(search_mode, fixed[dim], limit)(problem)))
    if search_mode == "sharding_propagation":
        from mindspeed_autoparallel.operators.search.propagation import shared_parameter_conflicts

        notes += shared_parameter_conflicts(decisions, {name for dim in fixed for name in dim})
    if search_mode == "exact":
        from mindspeed_autoparallel.operators.lowering.start import improve_from_uniform

        decisions = improve_from_uniform(
            decisions, machine, fixed, tied=tied, parameter_limit_bytes=parameter_limit_bytes
        )
    notes += _not_cut([entry for entry in explained if entry.operator not in fixed[entry.cut]])
    for dim, parts in enumerate(mesh):
        if all(choices[dim] == NO_CUT for choices in decisions.choices.values()):
            notes.append(f"cut {dim + 1} into {parts}: no operator is cut there, those devices repeat the same work.")
    return OperatorPlan(decisions, search_mode, tuple(explained), time.perf_counter() - started, tuple(notes))


def _not_cut(explained: list[ExplainedCut]) -> list[str]:
    """One note for the products that chose not to be cut."""
    entries = [entry for entry in explained if entry.costs.choice == "none"]
    if not entries:
        return []
    names = list(dict.fromkeys(entry.operator for entry in entries))
    first = ", ".join(str(entry.cut + 1) for entry in entries if entry.operator == names[0])
    more = f" and {len(names) - 1} more products" if len(names) > 1 else ""
    return [f"{names[0]}{more}: Choose NOT to cut (cut {first}); --explain {names[0]} gives the mem_coeff to set."]


def _solver(mode: str, fixed: dict[str, int], limit: float | None) -> Callable[[CutProblem], list[int]]:
    if mode == "exact":
        from mindspeed_autoparallel.operators.search.exact import solve_exact

        return lambda problem: solve_exact(problem, parameter_limit_bytes=limit)
    from mindspeed_autoparallel.operators.search.propagation import solve_propagation

    return lambda problem: solve_propagation(
        problem, {v for v, names in enumerate(problem.members) if any(name in fixed for name in names)}
    )
