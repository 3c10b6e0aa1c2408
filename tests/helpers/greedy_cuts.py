"""The plain greedy baseline: each operator in order takes what is cheapest against the operators before it."""

from __future__ import annotations

from mindspeed_autoparallel.operators.search.problem import CutProblem


def solve_greedy(problem: CutProblem) -> list[int]:
    """Pick made in order, never revised; shown beside the search modes, not offered as one."""
    before: dict[int, list[int]] = {}
    for a, b in problem.edges:
        before.setdefault(max(a, b), []).append(min(a, b))
    picks: list[int] = []
    for v in range(len(problem.members)):
        cost = problem.node_us[v].copy()
        for u in before.get(v, ()):
            matrix = problem.edges[u, v][picks[u]] if (u, v) in problem.edges else problem.edges[v, u][:, picks[u]]
            cost = cost + matrix
        picks.append(int(cost.argmin()))
    return picks
