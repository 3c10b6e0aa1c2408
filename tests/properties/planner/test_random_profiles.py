"""`plan` on random profiles: a plan, or an error for people; never a traceback."""

from __future__ import annotations

from dataclasses import replace

import pytest
from how_many import how_many
from random_profiles import random_job
from small_profile import block, small_profile

from mindspeed_autoparallel.errors import AutoParallelError, ConfigError
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.split import LayerKind, Segment, SplitProblem, solve
from mindspeed_autoparallel.profiles import ModuleCost
from mindspeed_autoparallel.report import render_table
from mindspeed_autoparallel.spec import Cluster, Layout, Module

SHORT, LONG, TIME_LIMIT_S = 40, 10_000, how_many(1, 4) / 4


def planned(seed: int) -> str:
    """Return the plan's label, or the first line of an error for people."""
    job = random_job(seed)
    options = SearchOptions(time_limit_s=TIME_LIMIT_S, num_workers=1, space=job.space, with_relaxations=False)
    try:
        plan = search(job.profile, job.cluster, job.global_batch_size, options)
    except AutoParallelError as error:
        assert "\n" not in str(error)
        return f"{type(error).__name__}: {error}"
    assert 0 <= plan.search.gap_fraction < 1
    assert plan.layout.label() in render_table(plan)
    return plan.layout.label()


def test_random_profiles_are_planned_or_refused_in_one_line():
    assert len({planned(seed).split(":")[0] for seed in range(SHORT)}) > 5


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, LONG, 1000))
def test_ten_thousand_random_profiles(first: int):
    for seed in range(first, first + 1000):
        planned(seed)


def test_two_encoders_of_which_no_module_reads_one():
    """Four virtual stages of four layers: no boundary of the local search can move."""
    profile = small_profile()
    image, text = profile.model.modules
    audio = Module(name="audio_encoder", result_key="audio", num_layers=1)
    modules = (replace(image, num_layers=1), audio, replace(text, num_layers=2))
    costs = {"image_encoder": 2000, "audio_encoder": 40, "text_decoder": 1500}
    measured = {name: ModuleCost(layer=block(us, recomputable=name == "text_decoder")) for name, us in costs.items()}
    profile = replace(
        profile,
        model=replace(profile.model, modules=modules),
        measurements=(replace(profile.measurements[0], modules=measured),),
    )
    options = SearchOptions(
        num_workers=1,
        layouts=[Layout(pipeline_size=2, virtual_size=2, schedule="interleaved", microbatch_group_size=3)],
    )
    plan = search(profile, Cluster(num_nodes=1, devices_per_node=2), 3, options)
    assert plan.search.status == "optimal"


def test_memory_beyond_any_device_is_refused_in_one_line():
    kinds = (LayerKind(name="none", memory=(2**54,) * 2),)
    with pytest.raises(ConfigError, match="more than 36,028,797,018,963,968"):
        solve(
            SplitProblem(
                segments=(Segment(name="layer", num_layers=4, forward=1, backward=2, kinds=kinds),),
                num_stages=2,
                num_microbatches=4,
                memory_limit=(2**36,) * 2,
            )
        )


@pytest.mark.parametrize("layer_bytes", [2**51, 2**52])
def test_layers_larger_than_a_device_raise_infeasible_with_the_true_excess(layer_bytes: int):
    from mindspeed_autoparallel.planner.split.analysis import least_excess

    kinds = (LayerKind(name="none", memory=(layer_bytes,) * 2),)
    problem = SplitProblem(
        segments=(Segment(name="layer", num_layers=4, forward=1, backward=2, kinds=kinds),),
        num_stages=2,
        num_microbatches=4,
        memory_limit=(2**36,) * 2,
    )
    assert least_excess(problem) == 2 * layer_bytes - 2**36
