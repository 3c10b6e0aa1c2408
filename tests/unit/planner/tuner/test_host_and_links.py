"""Rates are recovered from samples made with them; tiers without samples come from the datasheet."""

import pytest

from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.cost.collectives import all_gather_us, all_reduce_us, reduce_scatter_us
from mindspeed_autoparallel.planner.tuner.host import Anchor, BlockSums, HostModel, fit_host
from mindspeed_autoparallel.planner.tuner.links import SIZES, catalogue_tier, fit, fitted_tiers, link_samples
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.profiles.calibration_records import LinkRow
from mindspeed_autoparallel.profiles.device import LinkTier
from mindspeed_autoparallel.profiles.knowledge import KnowledgeBase

TRUTH = HostModel(
    scale=1.3, per_call_us=7.0, communication_scales={"all_reduce": 2.0, "all_gather": 1.5, "reduce_scatter": 1.5}
)
AT = MeasuredAt()
SUMS = [
    (100.0, 50, {}),
    (900.0, 60, {}),
    (4000.0, 120, {}),
    (900.0, 70, {"all_reduce": 300.0}),
    (900.0, 70, {"all_gather": 200.0, "reduce_scatter": 100.0}),
]


def anchors(model, block="layer", factor=1.0):
    for operators, calls, communication in SUMS:
        sums = BlockSums(operators_us=operators, num_calls=calls, communication_us=communication)
        measured_us = factor * model.plain_us(sums)
        yield Anchor(block=block, direction="forward", at=AT, sums=sums, measured_us=measured_us)


def test_rates_are_found_again_in_blocks_that_were_made_with_them():
    found = fit_host(list(anchors(TRUTH)), asynchronous=False)
    assert found.scale == pytest.approx(1.3)
    assert found.per_call_us == pytest.approx(7.0)
    assert found.communication_scales == pytest.approx(TRUTH.communication_scales)
    for anchor in anchors(TRUTH):
        assert found.block_us("layer", "forward", AT, anchor.sums) == pytest.approx(anchor.measured_us)


def test_a_block_slower_than_its_parts_keeps_its_own_correction():
    sums = BlockSums(operators_us=50.0, num_calls=10)
    slow = Anchor(block="post", direction="forward", at=AT, sums=sums, measured_us=400.0)
    found = fit_host([*anchors(TRUTH), *anchors(TRUTH), slow], asynchronous=False)
    assert found.block_us("post", "forward", AT, slow.sums) == pytest.approx(400.0)


def test_the_error_is_that_of_anchors_predicted_from_the_others():
    exact = fit_host([*anchors(TRUTH), *anchors(TRUTH, "post")], asynchronous=False)
    spread = fit_host([*anchors(TRUTH), *anchors(TRUTH, factor=1.5)], asynchronous=False)
    assert exact.relative_error < 0.05 < spread.relative_error


def test_without_anchors_other_models_rates_are_used():
    assert fit_host([], asynchronous=False, fallback=TRUTH) is TRUTH
    assert fit_host([], asynchronous=True).scale == 1.0


def test_beside_an_accelerator_the_longer_of_host_and_kernels_counts():
    model = HostModel(scale=1.0, per_call_us=10.0, asynchronous=True)
    few = BlockSums(operators_us=500.0, num_calls=10)
    many = BlockSums(operators_us=500.0, num_calls=100)
    assert model.block_us("layer", "forward", AT, few) == 500.0
    assert model.block_us("layer", "forward", AT, many) == 1000.0


@pytest.mark.parametrize(
    ("kind", "time_us"),
    [("all_reduce", all_reduce_us), ("all_gather", all_gather_us), ("reduce_scatter", reduce_scatter_us)],
)
def test_a_fitted_link_gives_its_samples_back_by_the_ring_formulas(kind, time_us):
    samples = [(size, 12.0 + size / 3000) for size in SIZES]
    link = LinkTier(default=fit(kind, 4, samples), operations={kind: fit(kind, 4, samples)})
    for size, wanted in samples:
        assert time_us(size, 4, link) == pytest.approx(wanted, rel=1e-6)


def test_tiers_come_from_the_knowledge_base_with_the_largest_group(tmp_path):
    base = KnowledgeBase(tmp_path / "base.sqlite")
    rows = [
        {
            "kind": "all_reduce",
            "tier": "intra",
            "ranks": ranks,
            "size_bytes": size,
            "median_us": time,
            "p10_us": time,
            "p90_us": time,
            "num_runs": 5,
        }
        for ranks, scale in ((2, 1.0), (4, 3.0))
        for size in SIZES
        for time in [scale * (5.0 + size / 1000)]
    ]
    base.record("gpu", "torch 2", link_samples([LinkRow(**row) for row in rows], "test"))
    assert fitted_tiers(base, "other gpu", "torch 2") == {}
    tier = fitted_tiers(base, "gpu", "torch 2")["intra"]
    assert all_reduce_us(SIZES[1], 4, tier) == pytest.approx(3 * (5.0 + SIZES[1] / 1000), rel=1e-6)


def test_a_tier_without_samples_is_slower_between_nodes_than_inside():
    device = find_device("H100")
    inside, between = (catalogue_tier(device, tier, 8).default.bytes_per_s for tier in ("intra", "inter"))
    assert inside > between > 0
