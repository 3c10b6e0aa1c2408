"""Properties of the redistribution plan: complete, exact, balanced; forward and backward are adjoint."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_autoparallel.runtime.hetero.redistribution.balance import contiguous, longest_first
from mindspeed_autoparallel.runtime.hetero.redistribution.placement import (
    closed_sets,
    num_replicas,
    replica_ranks,
    standard_placement,
)
from mindspeed_autoparallel.runtime.hetero.redistribution.plan import Item, make_plan, replicas_nested
from mindspeed_autoparallel.runtime.hetero.redistribution.volume import received_bytes, sent_bytes

LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 1, 4), (1, 2, 2), (1, 1, 2), (8, 1, 1)]
ENCODERS = [layout for layout in LAYOUTS if layout[2] == 1]


@st.composite
def problems(draw, mode=None):
    tensor, context, _ = draw(st.sampled_from(ENCODERS))
    encoder = standard_placement(8, tensor=tensor, context=context)
    tensor, context, pipeline = draw(st.sampled_from(LAYOUTS))
    backbone = standard_placement(8, tensor=tensor, context=context, pipeline=pipeline)
    mode = mode or draw(st.sampled_from(["local", "global", "off"]))
    sets = closed_sets([encoder, backbone]) if mode != "global" else [list(range(8))]
    ranks = draw(st.sampled_from(sets))
    homes = sorted({backbone[rank].data for rank in ranks})
    found = draw(st.lists(st.tuples(st.sampled_from(homes), st.integers(1, 9), st.integers(1, 4)), max_size=12))
    items = [
        Item(home, i, i, rows * 4, rows, float(rows * weight)) for i, (home, rows, weight) in enumerate(sorted(found))
    ]
    return items, encoder, backbone, ranks, mode


def plan_of(problem, **more):
    items, encoder, backbone, ranks, mode = problem
    return make_plan(items, encoder=encoder, backbone=backbone, ranks=ranks, mode=mode, **more)


@given(problems())
def test_every_first_stage_rank_gets_every_row_of_its_samples_exactly_once(problem):
    items, encoder, backbone, ranks, _ = problem
    plan = plan_of(problem)
    got = {}
    for piece in plan.outputs:
        for row in range(piece.start, piece.stop):
            key = (piece.target, piece.item, row)
            got[key] = got.get(key, 0) + 1
            assert piece.source in replica_ranks(encoder, plan.owners[piece.item])
    wanted = {
        (rank, i, row)
        for i, item in enumerate(items)
        for rank in replica_ranks(backbone, item.home, 0)
        for row in range(item.output_rows)
    }
    assert set(got) == wanted
    assert set(got.values()) <= {1}
    assert {p.target for p in plan.outputs} <= set(ranks)


@given(problems())
def test_later_stages_receive_nothing(problem):
    backbone = problem[2]
    plan = plan_of(problem)
    assert all(backbone[piece.target].pipeline == 0 for piece in plan.outputs)


@given(problems())
def test_every_member_of_the_owner_gets_all_input_rows_once(problem):
    items, encoder, _, _, _ = problem
    plan = plan_of(problem)
    arrived = sorted((p.target, p.item, p.start, p.stop) for p in plan.inputs)
    wanted = sorted(
        (rank, i, 0, items[i].input_rows)
        for i, owner in enumerate(plan.owners)
        for rank in replica_ranks(encoder, owner)
    )
    assert arrived == wanted


@given(problems(), st.randoms(use_true_random=False))
def test_backward_is_the_exact_adjoint_of_forward(problem, random):
    """<F x, y> summed over one tensor replica of each context rank equals <x, B y> at every member of the owner."""
    items, encoder, backbone, _, _ = problem
    plan = plan_of(problem)
    x = {(i, row): random.randint(-9, 9) for i, item in enumerate(items) for row in range(item.output_rows)}
    # Partial gradients differ between context ranks and are equal between tensor ranks.
    contexts = sorted({at.context for at in backbone})
    y = {(i, c, row): random.randint(-9, 9) for (i, row) in x for c in contexts}
    forward = sum(
        x[p.item, row] * y[p.item, backbone[p.target].context, row]
        for p in plan.outputs
        if backbone[p.target].tensor == 0
        for row in range(p.start, p.stop)
    )
    for member in range(len(replica_ranks(encoder, 0))):
        backward = 0
        for i, owner in enumerate(plan.owners):
            rank = replica_ranks(encoder, owner)[member]
            for p in plan.gradients:
                if p.item == i and p.target == rank:
                    assert backbone[p.source].pipeline == 0
                    backward += sum(x[i, r] * y[i, backbone[p.source].context, r] for r in range(p.start, p.stop))
        assert backward == forward


@given(problems())
def test_without_replication_the_gradient_pieces_are_the_transposed_output_pieces(problem):
    _, encoder, backbone, _, _ = problem
    plan = plan_of(problem)
    replicated = any(at.tensor or at.context for at in encoder + backbone)
    if not replicated:
        swapped = sorted(dataclasses.replace(p, source=p.target, target=p.source) for p in plan.outputs)
        assert list(plan.gradients) == swapped


@given(problems())
def test_sharded_merge_delivers_each_shard_and_returns_the_transpose_to_every_member(problem):
    items, encoder, backbone, _, _ = problem
    needs = []
    for i, item in enumerate(items):
        ranks = replica_ranks(backbone, item.home, 0)
        cuts = [item.output_rows * k // len(ranks) for k in range(len(ranks) + 1)]
        needs += [(rank, i, (cuts[k], cuts[k + 1])) for k, rank in enumerate(ranks)]
    plan = plan_of(problem, sharded_needs=needs)
    assert sum(p.stop - p.start for p in plan.outputs) == sum(item.output_rows for item in items)
    back = sorted((p.source, p.target, p.item, p.start, p.stop) for p in plan.gradients)
    expected = sorted(
        (p.target, member, p.item, p.start, p.stop)
        for p in plan.outputs
        for member in replica_ranks(encoder, plan.owners[p.item])
    )
    assert back == expected


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60), st.integers(1, 16))
def test_longest_first_is_balanced_within_the_longest_item(costs, owners):
    loads = [0] * owners
    for cost, owner in zip(costs, longest_first(costs, owners), strict=True):
        loads[owner] += cost
    assert max(loads) - min(loads) <= max(costs)


@given(st.integers(0, 50), st.integers(1, 9))
def test_contiguous_runs_keep_order_and_differ_by_at_most_one(items, owners):
    found = contiguous(items, owners)
    assert found == sorted(found)
    counts = [found.count(owner) for owner in range(owners)]
    assert max(counts) - min(counts) <= 1


@given(problems(mode="local"))
@settings(max_examples=50)
def test_nested_replicas_move_no_input(problem):
    _, encoder, backbone, _, _ = problem
    plan = plan_of(problem)
    if replicas_nested(encoder, backbone):
        assert all(piece.source == piece.target for piece in plan.inputs)


@given(problems())
def test_bytes_sent_equal_bytes_received(problem):
    plan = plan_of(problem)
    for pieces in (plan.inputs, plan.outputs, plan.gradients):
        assert sum(sent_bytes(pieces, r, 2) for r in range(8)) == sum(received_bytes(pieces, r, 2) for r in range(8))


def test_closed_sets_hold_whole_replicas_of_both_layouts():
    encoder, backbone = standard_placement(4, tensor=2), standard_placement(4, pipeline=2)
    assert closed_sets([encoder, backbone]) == [[0, 1, 2, 3]]
    assert not replicas_nested(encoder, backbone)
    assert closed_sets([standard_placement(4), standard_placement(4, tensor=2)]) == [[0, 1], [2, 3]]


def test_sizes_that_do_not_divide_the_world_are_refused():
    with pytest.raises(ValueError, match="6 ranks are not a multiple"):
        standard_placement(6, tensor=4)
    assert num_replicas(standard_placement(8, tensor=2)) == 4
