"""The best of the splits that a host runs equals the best of all of them tried one by one."""

import itertools

import pytest
from language_profile import language_profile

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.candidate import Splits
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.layouts.given_splits import search_given
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions, enumerate_layouts
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.spec import Cluster

LAYERS, BATCH = 6, 8
CLUSTER = Cluster(num_nodes=1, devices_per_node=4)
OPTIONS = SpaceOptions(virtual_sizes=(1,))


def uneven(layout):
    size = layout.pipeline_size
    rows = itertools.product(range(1, LAYERS + 1), repeat=size)
    return [{"text_decoder": row} for row in rows if sum(row) == LAYERS and len(set(row[1:-1])) <= 1]


def splits(by_stage):
    return Splits(of_layout=uneven, recompute_by_stage=by_stage, description="rows of the test")


def brute_force(profile, by_stage):
    best = float("inf")
    candidates, _ = enumerate_layouts(profile, CLUSTER, BATCH, OPTIONS)
    for candidate in candidates:
        for layers in uneven(candidate.layout):
            row = layers["text_decoder"]
            again = itertools.product(*(range(count + 1) for count in row)) if by_stage else ((0,) * len(row), row)
            for recomputed in again:
                placement = ModulePlacement(layers=layers, recompute={"text_decoder": {"full": recomputed}})
                found = evaluate(profile, CLUSTER, candidate.layout, placement, BATCH, with_timeline=False)
                if found.fits:
                    best = min(best, found.step.total_us)
    return best


@pytest.mark.parametrize("by_stage", [True, False])
@pytest.mark.parametrize("capacity_mib", [60_000, 14_000, 9_000])
def test_no_listed_split_is_faster(capacity_mib, by_stage):
    profile = language_profile(num_layers=LAYERS, tensor=(1, 2), batches=(1, 2), capacity_mib=capacity_mib)
    best = brute_force(profile, by_stage)
    if best == float("inf"):
        with pytest.raises(InfeasiblePlan, match=r"rows of the test.* needs least"):
            search_given(profile, CLUSTER, BATCH, splits(by_stage), SearchOptions(space=OPTIONS))
        return
    plan = search_given(profile, CLUSTER, BATCH, splits(by_stage), SearchOptions(space=OPTIONS))
    assert plan.step.total_us == pytest.approx(best, rel=1e-12)
    assert (plan.search.status, plan.search.scope) == ("optimal", "rows of the test")
    assert {"text_decoder": plan.layers_of("text_decoder")} in uneven(plan.layout)
    for simple in plan.baselines:
        row, recomputed = simple.layers["text_decoder"], simple.recompute["text_decoder"]
        assert not simple.feasible or simple.step_us >= best * (1 - 1e-12), "faster than the best that the host runs"
        assert {"text_decoder": row} in uneven(plan.layout)
        assert by_stage or recomputed in (row, (0,) * len(row))
