"""The loop that all searches share: its order, its groups and cutoff, what is left when time is up, and its proof."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_autoparallel.planner import best_first as module
from mindspeed_autoparallel.planner.best_first import Open, Proof, Search, best_first
from mindspeed_autoparallel.spec import Layout
from mindspeed_autoparallel.spec.plan_records import Verdict

Tree = tuple[float, list["Tree"]]
"""What a node adds to its parent's bound, and its children; a leaf's bound is its step time."""


class TreeSearch(Search[Tree]):
    def __init__(self) -> None:
        self.steps: list[float] = []
        self.expanded: list[float] = []
        self.groups: list[tuple[list[float], float]] = []
        self.discarded: list[float] = []
        self.left: list[float] = []
        self.order = 0

    @property
    def best_us(self) -> float:
        return min(self.steps, default=inf)

    def cutoff_us(self) -> float:
        return self.best_us

    def opened(self, bound: float, tree: Tree) -> Open[Tree]:
        self.order += 1
        return Open(False, bound + tree[0], self.order, tree)

    def expand(self, group: Sequence[Open[Tree]], cutoff_us: float) -> list[Open[Tree]]:
        self.groups.append(([item.bound_us for item in group], cutoff_us))
        found = []
        for item in group:
            if not item.item[1]:
                self.steps.append(item.bound_us)
            found += [self.opened(item.bound_us, child) for child in item.item[1]]
        return found

    def discard(self, item: Open[Tree]) -> None:
        self.discarded.append(item.bound_us)

    def stop(self, left: list[Open[Tree]]) -> None:
        self.left = [item.bound_us for item in left]


TREES = st.recursive(
    st.tuples(st.integers(0, 5).map(float), st.just([])),
    lambda trees: st.tuples(st.integers(0, 5).map(float), st.lists(trees, min_size=1, max_size=4)),
    max_leaves=40,
)


def leaves(tree: Tree, bound: float = 0.0) -> list[float]:
    bound += tree[0]
    return [bound] if not tree[1] else [leaf for child in tree[1] for leaf in leaves(child, bound)]


@given(TREES, st.integers(1, 5))
def test_the_best_leaf_is_found_and_nothing_discarded_is_better(tree: Tree, group_size: int) -> None:
    search = TreeSearch()
    best_first(search, [search.opened(0.0, tree)], group_size=group_size)
    assert search.best_us == min(leaves(tree))
    assert all(bound >= search.best_us for bound in search.discarded)
    assert all(len(group) <= group_size for group, _ in search.groups)
    assert all(bound < cutoff for group, cutoff in search.groups for bound in group)


def test_equal_bounds_are_taken_in_order_and_late_items_last() -> None:
    search, taken = TreeSearch(), []
    search.expand = lambda group, cutoff_us: taken.extend(item.item for item in group) or []  # type: ignore[method-assign]
    items = [Open(True, 0.0, 0, "late"), Open(False, 1.0, 2, "second"), Open(False, 1.0, 1, "first")]
    best_first(search, items)  # type: ignore[arg-type]
    assert taken == ["first", "second", "late"]


def test_when_time_is_up_everything_open_is_handed_over() -> None:
    search = TreeSearch()
    best_first(search, [search.opened(0.0, (bound, [])) for bound in (3.0, 1.0)], deadline=time.monotonic())
    assert sorted(search.left) == [1.0, 3.0] and not search.groups


def test_another_round_is_searched_under_another_cutoff() -> None:
    class TwoRounds(TreeSearch):
        def next_round(self) -> list[Open[Tree]]:
            again, self.discarded = self.discarded, []
            self.cutoff_us = lambda: inf  # type: ignore[method-assign]
            return [self.opened(bound, (0.0, [])) for bound in again]

    search = TwoRounds()
    best_first(search, [search.opened(0.0, (bound, [])) for bound in (1.0, 2.0, 3.0)])
    assert search.steps == [1.0, 2.0, 3.0]


def test_progress_lists_the_open_layouts_and_the_proved_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPORT_EVERY_S", -1.0)
    search, lines = TreeSearch(), []
    best_first(search, [search.opened(0.0, (1000.0, [])), search.opened(0.0, (3000.0, []))], progress=lines.append)
    assert lines[0] == "1 layouts left, best 1.00 ms, none below 1.00 ms"


def test_a_proof_states_the_gap_and_the_status() -> None:
    proof = Proof(step_us=200.0, lower_bound_us=150.0, seconds=1.5)
    assert proof.gap_fraction == 0.25 and not proof.is_optimal
    assert proof.record(num_configurations=3, num_solved=1).status == "feasible"
    assert proof.record(num_configurations=3, num_solved=1, unproved="improved").status == "improved"
    record = proof.of(150.0).record(num_configurations=3, num_solved=1)
    assert (record.status, record.gap_fraction, record.lower_bound_us) == ("optimal", 0.0, 150.0)


def test_progress_has_no_bound_above_that_of_what_ended_without_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPORT_EVERY_S", -1.0)
    search, lines = TreeSearch(), list[str]()
    monkeypatch.setattr(search, "settled_bound_us", lambda: 500.0)
    best_first(search, [search.opened(0.0, (1000.0, [])), search.opened(0.0, (3000.0, []))], progress=lines.append)
    assert lines and all(line.endswith("none below 0.50 ms") for line in lines)


@given(st.floats(1.0, 1e9), st.sampled_from(["unsolved", "memory", "solved"]), st.none() | st.floats(0.5, 2.0))
def test_a_layout_that_cannot_win_counts_as_bounded(step_us: float, outcome: str, times: float | None) -> None:
    bound_us = None if times is None else times * step_us
    verdict = Verdict(layout=Layout(), outcome=outcome, reason="as it was.", lower_bound_us=bound_us)
    record = Proof(step_us=step_us, lower_bound_us=0.5 * step_us, seconds=1.0).record(
        num_configurations=1, num_solved=0, verdicts=[verdict]
    )
    if outcome == "unsolved" and times is not None and times >= 1.0:
        assert record.verdicts[0].outcome == "bounded" and "the best plan takes" in record.verdicts[0].reason
    elif times is None or times < 1.0 - 1e-5 or outcome != "unsolved":
        assert record.verdicts == (verdict,)
