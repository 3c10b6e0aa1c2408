"""The search over choices of encoder layouts for every backbone layout.

An item is refined step by step, each time to a higher bound: the cheap bound of a backbone layout, then every choice of
encoder layouts beside it, then the linear relaxation, then the exact solve. Proofs:
docs/decisions/0012-planning-hetero.md.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import inf

from mindspeed_autoparallel.planner.best_first import EXACT, Open, Progress, Search, bounded_reason
from mindspeed_autoparallel.planner.evaluate import Evaluation
from mindspeed_autoparallel.planner.hetero.assembly import Solved, reserved_by
from mindspeed_autoparallel.planner.hetero.backbone import BackboneSolver, Reserved, least_of, outside_pipeline_fits
from mindspeed_autoparallel.planner.hetero.encoder_costs import EncoderCosts
from mindspeed_autoparallel.planner.hetero.space import records
from mindspeed_autoparallel.planner.hetero.tight import search_tight
from mindspeed_autoparallel.planner.layouts.layout_solver import LayoutResult
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.spec.hetero import HeteroRecord
from mindspeed_autoparallel.spec.plan_records import Verdict

NOT_FOUND = "no split that fits next to the encoders was found, and none was proved impossible."
ENOUGH = 1e-4
"""Share of a pipeline's step: a bound within this distance is not tightened."""
SOLVE_S = 10.0
"""Time limit for one pipeline, in seconds; the gap includes what remains open."""


@dataclass(frozen=True)
class Choice:
    """A backbone layout, and the encoders' layouts once they are chosen."""

    solver: BackboneSolver
    record: HeteroRecord | None = None
    relaxed: bool = False
    """Whether its bound is that of the linear relaxation."""

    @property
    def label(self) -> str:
        """Return the backbone layout's name."""
        return self.solver.label

    @property
    def virtual(self) -> bool:
        """Return whether the backbone has virtual stages."""
        return self.solver.candidate.layout.virtual_size > 1


class ChoiceSearch(Search[Choice]):
    """Searches encoder and backbone layouts together; also solves a few layouts to list as alternatives."""

    def __init__(
        self,
        costs: list[list[EncoderCosts]],
        memory_modes: Sequence[str],
        balance: str,
        options: SearchOptions,
        *,
        deadline: float,
        progress: Progress,
    ) -> None:
        """Search until ``deadline``. Virtual stages that were not requested come last, and remain open after
        ``options.virtual_s`` processor seconds."""
        self.solved: list[Solved] = []
        self.verdicts: dict[str, Verdict] = {}
        """Outcome by the backbone's label."""
        self.open_us: list[float] = []
        """Bounds of choices that were not settled."""
        self.least_reserved_bytes: int | None = None
        self._costs, self._memory_modes, self._balance = costs, memory_modes, balance
        self._deadline, self._progress = deadline, progress
        self._num_alternatives = self._alternatives_left = options.top_k
        self._virtual_last, self._virtual_left_s = options.virtual_s < inf, options.virtual_s
        self._order = count()

    @property
    def best_us(self) -> float:
        """Return the step time of the best choice solved."""
        return min((found.step_us for found in self.solved), default=inf)

    def settled_bound_us(self) -> float:
        """Return the smallest bound of the choices that ended without a proof; it also bounds the answer."""
        return min([*self.open_us, *(found.lower_bound_us for found in self.solved)], default=inf)

    def opened(self, bound_us: float, choice: Choice) -> Open[Choice]:
        """Return ``choice`` as an item that sorts after those of equal bound."""
        return Open(self._virtual_last and choice.virtual, bound_us, next(self._order), choice)

    def start(self, solvers: Sequence[BackboneSolver]) -> list[Open[Choice]]:
        """Return the backbone layouts with their cheapest bounds."""
        return [
            self.opened(solver.cheap_bound_us + _least_encoder_us(self._costs, solver), Choice(solver))
            for solver in solvers
        ]

    def cutoff_us(self) -> float:
        """Return the best step time."""
        return self.best_us * (1 - EXACT)

    def admits(self, item: Open[Choice], cutoff_us: float) -> bool:
        """Return whether a choice may win, or become an alternative because its layout has no plan yet."""
        if item.bound_us < cutoff_us or item.late:
            return item.bound_us < cutoff_us
        num_layouts = sum(verdict.outcome == "solved" for verdict in self.verdicts.values())
        enough = self._alternatives_left <= 0 or num_layouts > self._num_alternatives
        return not enough and not self._has_plan(item.item)

    def discard(self, item: Open[Choice]) -> None:
        """Record a bound that the best plan beats."""
        self._bounded(item.item, item.bound_us)

    def stop(self, left: list[Open[Choice]]) -> None:
        """Leave open the choices that may still win."""
        cutoff_us = self.cutoff_us()
        for item in sorted(left):
            if item.bound_us >= cutoff_us:
                self._bounded(item.item, item.bound_us)
            else:
                self._leave_open(item, "the time limit came first.")

    def expand(self, group: Sequence[Open[Choice]], cutoff_us: float) -> list[Open[Choice]]:
        """Refine each choice by one step."""
        found: list[Open[Choice]] = []
        for item in group:
            if item.late and self._virtual_left_s <= 0:
                self._leave_open(
                    item, "the processor time for virtual stages is used up: request them to search them fully."
                )
                continue
            started = time.process_time()
            found += self._refined(item, cutoff_us)
            if item.late:
                self._virtual_left_s -= time.process_time() - started
        return found

    def _refined(self, item: Open[Choice], cutoff_us: float) -> list[Open[Choice]]:
        choice, bound = item.item, item.bound_us
        self._alternatives_left -= bound >= cutoff_us and choice.relaxed
        if choice.record is None:
            return self._choices(choice, bound)
        if choice.relaxed:
            self._solve(choice, choice.record, bound)
            return []
        relaxed_us = choice.solver.bound_us(reserved_by(choice.record), self._deadline) + choice.record.total_us
        if relaxed_us == inf:
            self._note_short(choice, choice.record)
            return []
        return [self.opened(max(bound, relaxed_us), replace(choice, relaxed=True))]

    def _leave_open(self, item: Open[Choice], reason: str) -> None:
        self.open_us.append(item.bound_us)
        self._note(item.item, "unsolved", reason, item.bound_us)

    def _choices(self, choice: Choice, bound: float) -> list[Open[Choice]]:
        """Return the encoder choices for one backbone layout, each with its bound; none if the layout is settled."""
        solver, seconds = choice.solver, self._seconds(choice)
        costs = solver.all_costs(self._costs)
        made_records = records(costs, solver.candidate, self._memory_modes, self._balance)
        reserved = least_of([reserved_by(made) for made in made_records])
        least_us = min(made.total_us for made in made_records)
        bound = max(bound, solver.cheap_bound_us + least_us)
        if self.solved:
            if bound < self.cutoff_us():
                bound = max(bound, self._bound_beside_us(choice, reserved, least_us) + least_us)
            if self.cutoff_us() <= bound < inf:
                self._bounded(choice, bound)
                return []
        # Solved with the least memory that any choice reserves: often the plan for all of them, else a bound for all.
        least = solver.solve(reserved, seconds) if bound < inf else None
        if least is None or least.proved_infeasible:
            self._note_short(choice, min(made_records, key=lambda made: made.reserved_bytes))
            return []
        return [
            self.opened(max(bound, least.lower_bound_us + made.total_us), replace(choice, record=made))
            for made in made_records
        ]

    def _bound_beside_us(self, choice: Choice, reserved: Reserved, encoders_us: float) -> float:
        """Return a bound of the pipeline next to ``reserved``; infinite if it does not fit."""
        if not choice.virtual:
            return choice.solver.bound_us(reserved, self._deadline)
        deadline = time.monotonic() + self._seconds(choice)
        return choice.solver.virtual_bound_us(reserved, self.cutoff_us() - encoders_us, deadline)

    def _solve(self, choice: Choice, record: HeteroRecord, bound: float) -> None:
        """Solve one choice, again with memory reserved for an encoder that does not fit next to the plan's state."""
        solver, reserved = choice.solver, reserved_by(record)
        result = solver.solve(reserved, self._seconds(choice))
        if result.proved_infeasible:
            self._note_short(choice, record)
            return
        lower = max(bound, result.lower_bound_us + record.total_us)
        found = result.evaluation
        limit = solver.candidate.limit_bytes
        fits = found is not None and outside_pipeline_fits(found, limit, reserved, record.transient_bytes)
        if not fits or (found is not None and found.step_us > result.lower_bound_us * (1 + ENOUGH)):
            tight = search_tight(solver, reserved, record.transient_bytes, time.monotonic() + self._seconds(choice))
            if tight is not None and tight.proved_infeasible:
                self._note_short(choice, record)
                return
            if tight is not None:
                result, found = tight, tight.evaluation
                lower = max(lower, tight.lower_bound_us + record.total_us)
        if found is not None and not outside_pipeline_fits(found, limit, reserved, record.transient_bytes):
            if solver.no_split_leaves(reserved, record.transient_bytes):
                self._note_short(choice, record)
                return
            result, found = self._with_more_reserved(choice, record)
        if found is None:
            self.open_us.append(lower)
            self._note(choice, "unsolved", NOT_FOUND, lower)
            return
        step = found.step_us + record.total_us
        self._keep(Solved(solver=solver, record=record, result=result, step_us=step, lower_bound_us=min(step, lower)))

    def _keep(self, found: Solved) -> None:
        if found.step_us < self.best_us:
            self._progress(f"{found.layout.label()}: {found.step_us / 1000:.2f} ms")
        self.solved.append(found)
        label = found.solver.label
        before = self.verdicts.get(label)
        if before is None or before.step_us is None or found.step_us < before.step_us:
            self.verdicts[label] = Verdict(
                layout=found.layout,
                outcome="solved",
                reason=f"solved; bound {found.lower_bound_us / 1000:.3f} ms.",
                lower_bound_us=found.lower_bound_us,
                step_us=found.step_us,
            )

    def _with_more_reserved(self, choice: Choice, record: HeteroRecord) -> tuple[LayoutResult, Evaluation | None]:
        """Return a split whose state leaves memory for the encoders to run, found by reserving more in each try."""
        solver, reserved = choice.solver, reserved_by(record)
        limit, result = solver.candidate.limit_bytes, LayoutResult()
        for quarter in range(1, 5):
            extra = record.transient_bytes * quarter // 4
            more = replace(reserved, everywhere_bytes=reserved.everywhere_bytes + extra)
            result = solver.solve(more, self._seconds(choice))
            found = result.evaluation
            if found is None:
                break
            if outside_pipeline_fits(found, limit, reserved, record.transient_bytes):
                return result, found
        return result, None

    def _seconds(self, choice: Choice) -> float:
        """Return the time limit of one solve."""
        left = self._virtual_left_s if choice.virtual else inf
        return max(0.1, min(SOLVE_S, self._deadline - time.monotonic(), left))

    def _has_plan(self, choice: Choice) -> bool:
        known = self.verdicts.get(choice.label)
        return known is not None and known.outcome == "solved"

    def _bounded(self, choice: Choice, bound: float) -> None:
        reason = bounded_reason(bound, self.best_us)
        self._note(choice, "bounded", reason, bound)

    def _note(self, choice: Choice, outcome: str, reason: str, bound: float | None) -> None:
        """Add a verdict, unless the layout has one; any other verdict replaces "memory"."""
        known = self.verdicts.get(choice.label)
        if known is None or known.outcome == "memory":
            self.verdicts[choice.label] = Verdict(
                layout=choice.solver.candidate.layout, outcome=outcome, reason=reason, lower_bound_us=bound
            )

    def _note_short(self, choice: Choice, record: HeteroRecord) -> None:
        reserved = record.reserved_bytes
        if self.least_reserved_bytes is None or reserved < self.least_reserved_bytes:
            self.least_reserved_bytes = reserved
        self._note(choice, "memory", "no split fits in memory next to any choice of encoder layouts.", None)


def _least_encoder_us(costs: Sequence[Sequence[EncoderCosts]], solver: BackboneSolver) -> float:
    """Return a lower bound of the encoders' time: every sample is encoded once, by the best batch.

    With a pipeline, the busiest stage takes at least the mean stage's time for proportionally more samples: the same.
    """
    total = 0.0
    for own in solver.all_costs(costs):
        least: list[float] = []
        batch, devices = solver.candidate.global_batch_size, solver.candidate.cluster.num_devices
        for cost in own:
            width = cost.point.tensor_size * cost.point.context_size
            least.append(batch * width / devices * cost.least_us_per_sample(batch))
        total += min(least)
    return total
