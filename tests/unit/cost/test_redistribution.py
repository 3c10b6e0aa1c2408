"""The planner's formulas of redistribution against the plan that training makes, for equal samples."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from redistribution_volume import received_bytes, sent_bytes, standard_placement

from mindspeed_autoparallel.cost.redistribution import EncoderExchange, exchange_of, moved_samples
from mindspeed_autoparallel.cost.staged_redistribution import MOST_ITEMS
from mindspeed_autoparallel.runtime.hetero.redistribution.placement import (
    Item,
    Placement,
    closed_sets,
    num_replicas,
    replica_ranks,
)
from mindspeed_autoparallel.runtime.hetero.redistribution.plan import make_plan
from mindspeed_autoparallel.spec import Layout, ModuleLayout

SIZES = (1, 2, 4)
LAYOUTS = [
    (world, tp, cp, pp, etp, ecp)
    for world in (4, 8, 12)
    for tp, cp, pp in product(SIZES, (1, 2), (1, 2, 4))
    for etp, ecp in product(SIZES, (1, 2))
    if world % (tp * cp * pp) == 0 and world % (etp * ecp) == 0
]
ROWS = 16
"""Of one sample: its whole sequence, so that every shard of it is equally long."""


def sizes_of(case: tuple[int, ...], sequence: bool) -> tuple[Layout, ModuleLayout]:
    world, tp, cp, pp, etp, ecp = case
    backbone = Layout(
        tensor_size=tp, context_size=cp, pipeline_size=pp, data_size=world // (tp * cp * pp), sequence_parallel=sequence
    )
    return backbone, ModuleLayout(tensor_size=etp, context_size=ecp, data_size=world // (etp * ecp))


def samples_moved(
    exchange: EncoderExchange, encoder: Placement, backbone: Placement, sequence: bool
) -> Iterator[tuple[int, int, float]]:
    """Yield samples per dp_replica, and of inputs, outputs and gradients what is predicted and what the busiest rank moves."""
    ranks = closed_sets([backbone, encoder])[0]
    dp_replicas = sorted({backbone[rank].data for rank in ranks})
    for per_dp_replica in (exchange.encoder_replicas, 2 * exchange.encoder_replicas, 1, 3):
        items = [
            Item(sample, ROWS, ROWS, 1.0, first_token=0, num_tokens=ROWS, dp_replica=dp_replica, microbatch=0)
            for dp_replica in dp_replicas
            for sample in range(per_dp_replica)
        ]
        plan = make_plan(
            items, encoder=encoder, backbone=backbone, ranks=ranks, mode="local", sequence_parallel=sequence
        )
        loads = [len(plan.owned_by(replica)) for replica in range(num_replicas(encoder))]
        assert max(loads) == exchange.samples_of_busiest(per_dp_replica)
        predicted = moved_samples(exchange, per_dp_replica)
        for pieces, expected in (
            (plan.inputs, predicted.inputs),
            (plan.outputs, predicted.outputs),
            (plan.gradients, predicted.gradients),
        ):
            busiest = max(max(received_bytes(pieces, r, 1), sent_bytes(pieces, r, 1)) for r in ranks) / ROWS
            yield per_dp_replica, expected, busiest


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence-parallel"])
@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_sets_loads_and_bytes_are_those_of_the_training(case: tuple[int, ...], sequence: bool) -> None:
    world, tp, cp, pp, etp, ecp = case
    layout, own = sizes_of(case, sequence)
    backbone = standard_placement(world, tensor=tp, context=cp, pipeline=pp)
    encoder = standard_placement(world, tensor=etp, context=ecp)
    exchange = exchange_of(layout, own, "local")
    sets = closed_sets([backbone, encoder])
    assert {len(ranks) for ranks in sets} == {exchange.encoder_replicas * etp * ecp}
    ranks = sets[0]
    dp_replicas = sorted({backbone[rank].data for rank in ranks})
    assert (len(dp_replicas), len({encoder[rank].data for rank in ranks})) == (
        exchange.backbone_replicas,
        exchange.encoder_replicas,
    )
    for per_dp_replica, expected, busiest in samples_moved(exchange, encoder, backbone, sequence):
        if exchange.nested:
            assert expected <= busiest <= expected + 1, (per_dp_replica, expected, busiest)
            # Senders take turns by pieces: where these are not even, one has up to a sample more.
            assert expected == busiest or per_dp_replica % exchange.encoder_replicas, (
                per_dp_replica,
                expected,
                busiest,
            )
        elif per_dp_replica * exchange.backbone_replicas <= MOST_ITEMS:
            assert expected == pytest.approx(busiest), (per_dp_replica, expected, busiest)
        else:
            # Of many samples the turns of senders are not followed one by one.
            assert expected <= busiest + 1e-9 and busiest <= expected + 1, (per_dp_replica, expected, busiest)


STAGED = [
    (world, tp, cp, pp, etp, ecp, epp)
    for world in (4, 8, 12)
    for tp, cp, pp in product(SIZES, (1, 2), (1, 2, 3, 4))
    for etp, ecp, epp in product((1, 2), (1, 2), (2, 3, 4))
    if world % (tp * cp * pp) == 0 and world % (etp * ecp * epp) == 0
]


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence-parallel"])
def test_exchanges_of_encoders_in_stages_are_counted_rank_by_rank(sequence: bool) -> None:
    for world, tp, cp, pp, etp, ecp, epp in STAGED:
        layout, _ = sizes_of((world, tp, cp, pp, etp, ecp), sequence)
        own = ModuleLayout(tensor_size=etp, context_size=ecp, pipeline_size=epp, data_size=world // (etp * ecp * epp))
        backbone = standard_placement(world, tensor=tp, context=cp, pipeline=pp)
        encoder = standard_placement(world, tensor=etp, context=ecp, pipeline=epp)
        exchange = exchange_of(layout, own, "local")
        ranks = closed_sets([backbone, encoder])[0]
        assert exchange.num_ranks == len(ranks)
        dp_replicas = sorted({backbone[rank].data for rank in ranks})
        assert (len(dp_replicas), len({encoder[rank].data for rank in ranks})) == (
            exchange.backbone_replicas,
            exchange.encoder_replicas,
        )
        assert exchange.nested == (len(dp_replicas) == 1)
        for per_dp_replica, expected, busiest in samples_moved(exchange, encoder, backbone, sequence):
            few = per_dp_replica * exchange.backbone_replicas <= MOST_ITEMS
            # Of many samples the turns of senders are not followed one by one.
            assert expected <= busiest + 1e-9, (layout, own, per_dp_replica, expected, busiest)
            assert busiest <= expected + (1e-9 if few else 1), (layout, own, per_dp_replica, expected, busiest)


def test_whole_world_balance_ties_all_replicas() -> None:
    layout, own = sizes_of((8, 2, 1, 1, 1, 1), sequence=False)
    assert exchange_of(layout, own, "local").backbone_replicas == 1
    assert (
        exchange_of(layout, own, "global").backbone_replicas,
        exchange_of(layout, own, "global").encoder_replicas,
    ) == (4, 8)


def test_first_stage_ranks_of_the_busiest_stage_are_the_only_receivers_of_outputs() -> None:
    backbone, encoder = standard_placement(4, pipeline=4), standard_placement(4)
    items = [Item(sample, 1, 1, 1.0, dp_replica=0, microbatch=0) for sample in range(4)]
    plan = make_plan(items, encoder=encoder, backbone=backbone, ranks=[0, 1, 2, 3], mode="local")
    assert {piece.target for piece in plan.outputs} == set(replica_ranks(backbone, 0, 0))
