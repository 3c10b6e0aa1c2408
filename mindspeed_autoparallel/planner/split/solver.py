"""Find the fastest placement of layers on the stages of one pipeline, with a lower bound of its step time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from threadpoolctl import ThreadpoolController

from mindspeed_autoparallel.planner.split.model.integer_master import IntegerMaster
from mindspeed_autoparallel.planner.split.model.layer_row import fits_a_row, is_one_row
from mindspeed_autoparallel.planner.split.model.problem import SplitProblem
from mindspeed_autoparallel.planner.split.model.ranges import is_chain
from mindspeed_autoparallel.planner.split.model.solution import Placement, SplitSolution, check_schedule
from mindspeed_autoparallel.planner.split.settings import SETTINGS
from mindspeed_autoparallel.planner.split.state import Beginning, Limits, State, nothing_found
from mindspeed_autoparallel.planner.split.strategies.chain_solver import search_chain
from mindspeed_autoparallel.planner.split.strategies.enumeration import enumerate_all
from mindspeed_autoparallel.planner.split.strategies.integers import search_by_integers
from mindspeed_autoparallel.planner.split.strategies.side_by_side import may_be_side_by_side, search_side_by_side
from mindspeed_autoparallel.planner.split.strategies.virtual_stages import search_long_step, search_row


class Strategy(NamedTuple):
    """A search strategy, and the problems that it suits."""

    name: str
    suits: Callable[[State], bool]
    run: Callable[[State], object]
    """Improves plan and bound of the state, may mark it done, or raises ``InfeasiblePlan`` if that is proved."""


def _search_row(state: State) -> None:
    """Search cuts of the row of layers; for parallel branches half of the time is left for the integer solver."""
    limits, one_row = state.limits, is_one_row(state.problem)
    exhausted = search_row(state, limits.after(1 if one_row else 0.5))
    if state.placement is not None:
        state.done = one_row and not exhausted
    elif one_row and limits.below is not None and limits.most_effort <= SETTINGS.virtual_little_effort:
        state.done = True


def _is_row(state: State) -> bool:
    return not state.excluded and not state.by_stages and fits_a_row(state.problem)


def _is_long_row(state: State) -> bool:
    return _is_row(state) and is_one_row(state.problem) and state.limits.below is None and state.problem.num_chunks > 1


def _is_side_by_side(state: State) -> bool:
    return _is_row(state) and not is_one_row(state.problem) and may_be_side_by_side(state.problem)


def _is_chain(state: State) -> bool:
    return _is_free(state) and is_chain(state.problem)


def _is_free(state: State) -> bool:
    return not state.excluded


def _is_any(state: State) -> bool:
    return True


PORTFOLIO = (
    Strategy("chain", _is_chain, search_chain),
    Strategy("enumeration", _is_free, enumerate_all),
    Strategy("side by side", _is_side_by_side, search_side_by_side),
    Strategy("long step", _is_long_row, search_long_step),
    Strategy("row", _is_row, _search_row),
    Strategy("integers", _is_any, search_by_integers),
)
"""Tried in this order: the first ones find a proved optimum, later ones pass plan, bound and cuts on."""


def solve(
    problem: SplitProblem,
    *,
    time_limit_s: float = 60.0,
    seed: int = 0,
    below: int | None = None,
    effort: float | None = None,
    excluded: Sequence[Placement] = (),
    begin: Beginning | None = None,
) -> SplitSolution:
    """Return the fastest placement that fits, with a lower bound of the step time.

    Times are in the units of ``problem``.

    Args:
        time_limit_s: wall-clock limit in seconds.
        below: return only a plan with a smaller step time.
        excluded: plans to exclude; the solution's layers differ from those of each.
        effort: limit that does not depend on the machine, in units of about a processor second: the integer solver's
            deterministic clock, and counts of the other searches (``Settings.effort_...``).
        begin: plan and cuts of the same pipeline under another memory limit, to start from.

    Raises:
        InfeasiblePlan: no plan fits; the message names the tightest stage of the best simple split.
        NoneBelow: proved that no plan takes less than ``below``, or that none fits.
        StoppedEarly: a limit was reached before a plan was found.
    """
    limits = Limits(time_limit_s=time_limit_s, below=below, effort=effort, seed=seed)
    check_schedule(problem)
    state = State(problem=problem, limits=limits, excluded=tuple(excluded), begin=begin)
    # Matrices are small: with more threads, BLAS spends the search's limit of processor seconds on waiting.
    with _thread_pools().limit(limits=1, user_api="blas"):
        for strategy in PORTFOLIO:
            if strategy.suits(state):
                strategy.run(state)
                if state.done or state.closed:
                    break
    return state.solution()


@cache
def _thread_pools() -> ThreadpoolController:
    return ThreadpoolController()


def fits_within(problem: SplitProblem, extra: int, time_limit_s: float) -> bool:
    """Return whether any plan fits with ``extra`` added to every stage's limit. Raises ``StoppedEarly``."""
    master = IntegerMaster(replace(problem, memory_limit=tuple(limit + extra for limit in problem.memory_limit)), 0)
    master.model.clear_objective()
    status, _, placements = master.solve(time_limit_s, 0, None, None, None)
    if status == "unknown":
        raise nothing_found(time_limit_s, 0)
    return bool(placements)
