"""Properties of the redistribution plan: complete, exact, balanced; forward and backward are adjoint."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redistribution_volume import received_bytes, sent_bytes, standard_placement

from mindspeed_autoparallel.runtime.attention.shards import zigzag_positions
from mindspeed_autoparallel.runtime.hetero.redistribution.placement import (
    Item,
    closed_sets,
    num_replicas,
    replica_ranks,
)
from mindspeed_autoparallel.runtime.hetero.redistribution.plan import (
    contiguous,
    longest_first,
    make_plan,
    replicas_nested,
)

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
    dp_replicas = sorted({backbone[rank].data for rank in ranks})
    found = draw(st.lists(st.tuples(st.sampled_from(dp_replicas), st.integers(1, 9), st.integers(1, 4)), max_size=12))
    items = [
        Item(i, rows * 4, rows, float(rows * weight), dp_replica=dp_replica, microbatch=i)
        for i, (dp_replica, rows, weight) in enumerate(sorted(found))
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
        for rank in replica_ranks(backbone, item.dp_replica, 0)
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


def placed(problem, draw_first):
    """The same items, each somewhere in a sequence of 64 tokens."""
    items, *rest = problem
    return [[dataclasses.replace(item, first_token=draw_first(item), num_tokens=64) for item in items], *rest]


@given(problems(), st.booleans(), st.randoms(use_true_random=False))
def test_sharded_merge_gives_each_rank_the_rows_of_its_tokens_and_takes_each_gradient_once(problem, sequence, random):
    problem = placed(problem, lambda item: random.randrange(64 - item.output_rows + 1))
    items, encoder, backbone, _, _ = problem
    plan = plan_of(problem, sequence_parallel=sequence)
    size = (1 + max(at.context for at in backbone), 1 + max(at.tensor for at in backbone) if sequence else 1)

    def keeps(rank, item, row):
        """Megatron's cuts, token by token: zigzag over context ranks, then equal runs over tensor ranks."""
        at, token = backbone[rank], item.first_token + row
        mine = zigzag_positions(item.num_tokens, size[0], at.context)
        share = len(mine) // size[1]
        return token in (mine[at.tensor * share : (at.tensor + 1) * share] if sequence else mine)

    wanted = sorted(
        (rank, i, row)
        for i, item in enumerate(items)
        for rank in replica_ranks(backbone, item.dp_replica, 0)
        for row in range(item.output_rows)
        if keeps(rank, item, row)
    )
    assert sorted((p.target, p.item, row) for p in plan.outputs for row in range(p.start, p.stop)) == wanted
    for i, owner in enumerate(plan.owners):
        for member in replica_ranks(encoder, owner):
            back = [
                (p.source, row)
                for p in plan.gradients
                if (p.item, p.target) == (i, member)
                for row in range(p.start, p.stop)
            ]
            assert sorted(row for _, row in back) == list(range(items[i].output_rows))
            assert all(keeps(source, items[i], row) for source, row in back)


@given(problems())
def test_a_sequence_that_cannot_be_cut_evenly_gets_whole_items(problem):
    uneven = placed(problem, lambda item: 0)
    uneven[0] = [dataclasses.replace(item, num_tokens=63) for item in uneven[0]]
    # 63 tokens: no context or tensor rank can hold an equal share.
    whole = plan_of(problem, sequence_parallel=True)
    found = plan_of(uneven, sequence_parallel=True)
    if any(at.tensor or at.context for at in problem[2]):
        assert (found.outputs, found.gradients) == (whole.outputs, whole.gradients)


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
