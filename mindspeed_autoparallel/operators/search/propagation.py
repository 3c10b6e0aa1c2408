"""Sharding propagation: pinned operators spread their strategy breadth first to the rest."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

import numpy

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.operators.graph.node import NO_CUT
from mindspeed_autoparallel.operators.search.problem import CutProblem
from mindspeed_autoparallel.operators.search.state import Decisions


def propagate(problem: CutProblem, pins: Collection[str]) -> list[int]:
    """Return the picks of one cut that spread from the operators ``pins`` (see ``solve_propagation``)."""
    return solve_propagation(problem, {v for v, names in enumerate(problem.members) if any(n in pins for n in names)})


def solve_propagation(problem: CutProblem, pinned: set[int]) -> list[int]:
    """Return the picks that spread from the variables ``pinned``, whose own picks never change.

    Each visited operator takes the choice of least redistribution against all neighbours decided so far; one with
    several inputs waits until all that can be reached are decided. A tie goes to the least pending sums (parameters not
    counted), then to a cut, then to the first axis. What a collective computes is proportional to what it sends here,
    so it breaks no tie. A second pass decides parameters of several readers again, when all readers are known: as the
    pinned readers need them, or at the least total cost. Raises ``ConfigError`` without a pin.
    """
    if not pinned:
        raise ConfigError("sharding_propagation propagates pinned operators, and none is pinned. Pin one (--pin).")
    number = len(problem.members)
    inputs: list[set[int]] = [set() for _ in range(number)]
    outputs: list[set[int]] = [set() for _ in range(number)]
    for a, b in problem.edges:
        first, second = (a, b) if a < b else (b, a)
        outputs[first].add(second)
        inputs[second].add(first)
    sources = {v for v in range(number) if not inputs[v]}
    picks: dict[int, int] = dict.fromkeys(pinned, 0)
    queue = deque(sorted(pinned))
    waiting: list[int] = []

    def visit(v: int) -> None:
        picks[v] = _best(problem, v, picks, inputs[v] | outputs[v])
        queue.append(v)

    while len(picks) < number:
        while queue:
            here = queue.popleft()
            for v in sorted(inputs[here]):
                if v not in picks:
                    visit(v)
            for v in sorted(outputs[here]):
                if v in picks:
                    continue
                if all(u in picks or u in sources for u in inputs[v]):
                    visit(v)
                else:
                    waiting.append(v)
        left = [v for v in dict.fromkeys(waiting) if v not in picks] or [v for v in range(number) if v not in picks]
        waiting = []
        if left:
            visit(left[0])
    for v in range(number):
        readers = outputs[v]
        if v not in pinned and len(readers) > 1 and problem.parameter_bytes[v].any():
            picks[v] = _best(problem, v, picks, readers & pinned or readers)
    return [picks[v] for v in range(number)]


def _best(problem: CutProblem, v: int, picks: dict[int, int], neighbours: set[int]) -> int:
    moved = numpy.zeros(len(problem.choices[v]))
    for u in neighbours:
        if u not in picks:
            continue
        if (u, v) in problem.edges:
            moved = moved + problem.edges[u, v][picks[u]]
        if (v, u) in problem.edges:
            moved = moved + problem.edges[v, u][:, picks[u]]
    pending = problem.pending_us[v]
    order = [(float(moved[c]), float(pending[c]), choice == NO_CUT, c) for c, choice in enumerate(problem.choices[v])]
    return min(order)[3]


def shared_parameter_conflicts(decisions: Decisions, pinned: Collection[str]) -> list[str]:
    """Return a note for each parameter of which two pinned operators need different pieces."""
    notes = []
    for name, readers in decisions.graph.consumers().items():
        wanted = {reader: decisions.operand_placements(reader, slot) for reader, slot in readers if reader in pinned}
        first = next(iter(wanted), None)
        other = next((reader for reader, placements in wanted.items() if placements != wanted[first or ""]), None)
        if decisions.graph.nodes[name].is_parameter and other is not None:
            notes.append(
                f"pinned {first} and {other} need their shared parameter {name} in different pieces: it is "
                "redistributed in every step. Pin them alike to avoid that."
            )
    return notes
