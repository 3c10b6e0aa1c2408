"""Sharding propagation: pinned operators spread their strategy breadth first to the rest."""

from __future__ import annotations

from collections import deque

import numpy

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.operators.graph.node import NO_CUT
from mindspeed_autoparallel.operators.search.problem import CutProblem


def solve_propagation(problem: CutProblem, pinned: set[int]) -> list[int]:
    """Picks spread from the variables ``pinned``, whose own picks never change.

    An operator decides when it is visited, against every neighbour decided so far; one with several inputs waits until
    all that can be reached are decided. A tie goes to less redistribution, then less compute, then the operator that
    is cut. Raises ``ConfigError`` without a pin.
    """
    if not pinned:
        raise ConfigError("sharding_propagation spreads pinned operators, and none is pinned. Pin one (--pin).")
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
    compute = problem.node_us[v]
    order = [(float(moved[c]), float(compute[c]), choice == NO_CUT, c) for c, choice in enumerate(problem.choices[v])]
    return min(order)[3]
