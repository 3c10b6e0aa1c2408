"""The search equals trying all configurations, and lists the omitted ones."""

import pytest
from language_profile import language_profile

from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.planner.tuner.candidates import Dimensions, ProfileVariant, enumerate_space
from mindspeed_autoparallel.planner.tuner.placements import improved, solve
from mindspeed_autoparallel.planner.tuner.search import search
from mindspeed_autoparallel.spec import Cluster


def variants(**changes):
    return [ProfileVariant(name="", settings={}, profile=language_profile(**changes))]


def everything(space, cluster, batch, dimensions):
    best = {}
    for configuration in space.configurations:
        found, _ = solve(configuration, dimensions)
        if found is not None:
            step_us = improved(found, dimensions).step_us
            best[configuration.key] = min(step_us, best.get(configuration.key, step_us))
    return sorted(best.values())


@pytest.mark.parametrize("capacity_mib", [20_000, 60_000])
@pytest.mark.parametrize("num_layers", [8, 10])
def test_the_first_three_are_those_of_trying_everything(num_layers, capacity_mib):
    cluster, dimensions = Cluster(num_nodes=2, devices_per_node=4), Dimensions(virtual_sizes=(1, 2))
    space = enumerate_space(
        variants(num_layers=num_layers, capacity_mib=capacity_mib, tensor=(1, 2), batches=(1, 2)),
        cluster,
        32,
        dimensions,
    )
    outcome = search(space, dimensions, 3)
    assert [found.step_us for found in outcome.top] == pytest.approx(everything(space, cluster, 32, dimensions)[:3])
    assert outcome.num_solved + outcome.num_bounded == outcome.num_legal == len(space.configurations)
    assert 0.8 * outcome.top[0].step_us < outcome.proof.lower_bound_us <= outcome.top[0].step_us


def test_without_pipelines_the_fastest_is_proved():
    cluster, dimensions = Cluster(num_nodes=1, devices_per_node=8), Dimensions()
    space = enumerate_space(variants(num_layers=1), cluster, 64, dimensions)
    outcome = search(space, dimensions, 3)
    assert outcome.proof.lower_bound_us == outcome.top[0].step_us


def test_recommendations_fit_and_differ_in_more_than_switches():
    cluster, dimensions = Cluster(num_nodes=2, devices_per_node=8), Dimensions()
    space = enumerate_space(variants(), cluster, 64, dimensions)
    outcome = search(space, dimensions, 3)
    assert all(found.evaluation.fits for found in outcome.top)
    assert len({found.configuration.key for found in outcome.top}) == 3
    assert sorted(outcome.top, key=lambda found: found.step_us) == list(outcome.top)


def test_the_same_input_gives_the_same_answer():
    cluster, dimensions = Cluster(num_nodes=1, devices_per_node=8), Dimensions()
    answers = [
        [found.configuration.layout.label() for found in search(space, dimensions, 3).top]
        for space in (enumerate_space(variants(), cluster, 32, dimensions) for _ in range(2))
    ]
    assert answers[0] == answers[1]


def test_layers_that_stages_do_not_divide_are_split_unevenly_only_where_the_host_can():
    cluster = Cluster(num_nodes=1, devices_per_node=4)
    found = {}
    for uneven in (True, False):
        dimensions = Dimensions(virtual_sizes=(1,), uneven_stages=uneven)
        space = enumerate_space(variants(num_layers=10, tensor=(1,)), cluster, 16, dimensions)
        found[uneven] = {
            item.configuration.layout.pipeline_size: sorted(set(item.placement.layers["text_decoder"]))
            for item in search(space, dimensions, 99).top
        }
    assert found[True][4] in ([2, 3], [1, 3], [1, 2, 3])
    assert 4 not in found[False]


def test_less_memory_brings_recomputation_of_as_few_layers_as_fit():
    cluster, dimensions = Cluster(num_nodes=1, devices_per_node=8), Dimensions(virtual_sizes=(1,))
    kinds = {}
    for capacity in (60_000, 17_000):
        space = enumerate_space(variants(tensor=(2,), batches=(1,), capacity_mib=capacity), cluster, 64, dimensions)
        best = search(space, dimensions, 1).top[0]
        kinds[capacity] = best.recompute
        if best.recompute == "full":
            held = best.placement.recomputed("text_decoder")
            assert max(held) == best.num_recomputed
    assert kinds[60_000] == "none" != kinds[17_000]


def test_an_infeasible_search_names_the_layout_that_needs_least():
    cluster, dimensions = Cluster(num_nodes=1, devices_per_node=2), Dimensions()
    space = enumerate_space(variants(capacity_mib=100), cluster, 8, dimensions)
    with pytest.raises(InfeasiblePlan, match=r"The one that needs least memory: PP.* needs .* of 100.0 MiB"):
        search(space, dimensions)


def test_a_search_without_legal_layouts_names_the_rules():
    cluster, dimensions = Cluster(num_nodes=1, devices_per_node=4), Dimensions()
    space = enumerate_space(variants(tensor=(1,), batches=(8,)), cluster, 7, dimensions)
    with pytest.raises(ConfigError, match="global batch N is not divisible"):
        search(space, dimensions)


def test_every_combination_is_legal_or_counted_with_a_rule():
    cluster, dimensions = Cluster(num_nodes=1, devices_per_node=8), Dimensions(virtual_sizes=(1, 2))
    space = enumerate_space(variants(tensor=(1, 2), batches=(1,)), cluster, 12, dimensions)
    # TP1: PP 1, 2, 4, 8; TP2 with and without SP: PP 1, 2, 4; two chunks wherever PP is above 1.
    total = (1 + 3 * 2) + 2 * (1 + 2 * 2)
    assert len(space.configurations) + sum(space.left_out.values()) == total * len(dimensions.distributed_optimizer)
