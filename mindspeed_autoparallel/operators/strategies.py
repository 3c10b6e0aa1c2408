"""Search over a graph: one cut after another by the chosen mode, and the plan with its costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from mindspeed_autoparallel.operators.config import SearchOptions
from mindspeed_autoparallel.operators.graph.node import NO_CUT, Graph
from mindspeed_autoparallel.operators.plan import Bound, OperatorPlan
from mindspeed_autoparallel.operators.search.fill import fill_rest
from mindspeed_autoparallel.operators.search.pins import pinned_choices
from mindspeed_autoparallel.operators.search.problem import cut_by_cut
from mindspeed_autoparallel.operators.search.recursive import ExplainedCut, cut_all_products
from mindspeed_autoparallel.operators.search.state import device_factors


def search_graph(graph: Graph, devices: int, **options: Any) -> OperatorPlan:
    """Cut ``graph`` for ``devices``; ``options`` are the fields of ``SearchOptions``.

    Recursive programming halves: on a number of devices that is not a power of two the exact mode replaces it, with a
    note. Raises ``ConfigError`` for invalid input, ``InfeasiblePlan`` if the limit of parameters cannot be met.
    """
    if options.get("machine", True) is None:
        del options["machine"]
    asked = SearchOptions(**options)
    mesh = device_factors(devices)
    mode, notes = asked.search_mode, []
    if mode == "recursive_programming" and set(mesh) - {2}:
        notes.append(f"{devices} devices are not a power of two: recursive_programming halves, so exact was used.")
        mode = "exact"
    fixed, tied = pinned_choices(graph, asked.pins or {}, mesh), asked.tied is not False
    started = time.perf_counter()
    explained: list[ExplainedCut] = []
    bound: Bound | None = None
    repeat: Callable[[float], list[ExplainedCut]] | None = None
    if mode == "recursive_programming" and asked.mem_coeff is None:
        from mindspeed_autoparallel.operators.search.exact import solve_exact

        decisions = cut_by_cut(
            graph,
            mesh,
            fixed,
            asked.machine,
            lambda _, problem: solve_exact(problem),
            tied=tied,
            most_row_parts=asked.most_row_parts,
        )
    elif mode == "recursive_programming" and asked.mem_coeff is not None:
        by_weight, most = devices > 32 and asked.num_microbatches < 8, asked.most_row_parts
        cut = partial(cut_all_products, graph, fixed, by_weight=by_weight, most_row_parts=most)
        decisions, explained, decided = cut(asked.mem_coeff)
        decisions = fill_rest(decisions, decided)

        def repeat(mem_coeff: float) -> list[ExplainedCut]:
            return cut(mem_coeff)[1]
    elif mode == "sharding_propagation":
        from mindspeed_autoparallel.operators.search.propagation import propagate, shared_parameter_conflicts

        decisions = cut_by_cut(
            graph, mesh, fixed, asked.machine, lambda dim, problem: propagate(problem, fixed[dim]), tied=tied
        )
        notes += shared_parameter_conflicts(decisions, {name for dim in fixed for name in dim})
    else:
        from mindspeed_autoparallel.operators.exact import ExactSearch

        decisions, bound, more = ExactSearch(graph, mesh, asked, fixed).run()
        notes += more
    notes += _not_cut([entry for entry in explained if entry.operator not in fixed[entry.cut]])
    for dim, parts in enumerate(mesh):
        if all(choices[dim] == NO_CUT for choices in decisions.choices.values()):
            notes.append(f"cut {dim + 1} into {parts}: no operator is cut there, those devices repeat the same work.")
    taken = time.perf_counter() - started
    return OperatorPlan(decisions, mode, tuple(explained), taken, tuple(notes), bound=bound, repeat=repeat)


def _not_cut(explained: list[ExplainedCut]) -> list[str]:
    """Return one note about the products that are not cut."""
    entries = [entry for entry in explained if entry.costs.choice == "none"]
    if not entries:
        return []
    names = list(dict.fromkeys(entry.operator for entry in entries))
    first = ", ".join(str(entry.cut + 1) for entry in entries if entry.operator == names[0])
    more = f" and {len(names) - 1} more products" if len(names) > 1 else ""
    return [f"{names[0]}{more}: Choose NOT to cut (cut {first}); --explain {names[0]} gives the mem_coeff to set."]
