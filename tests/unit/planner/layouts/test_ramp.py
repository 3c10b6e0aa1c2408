"""A batch that grows (``--rampup-batch-size``): Megatron asserts that layouts divide every batch on the way."""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from how_many import how_many
from small_profile import block, small_profile

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.layouts.group_sizes import three_chunks
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions, enumerate_layouts
from mindspeed_autoparallel.planner.tuner.candidates import Dimensions, ProfileVariant, enumerate_space
from mindspeed_autoparallel.profiles import MeasuredAt, Measurement, ModuleCost, Profile
from mindspeed_autoparallel.runtime.megatron.short_training import batch_ramp
from mindspeed_autoparallel.spec import Cluster, Layout, Model, Module

SOURCES = [Path(folder) for folder in os.environ.get("MEGATRON_LM_SOURCES", "").split(os.pathsep) if folder]


def _profile() -> Profile:
    points = [MeasuredAt(tensor_size=t, micro_batch_size=m) for t in (1, 2) for m in (1, 2, 4)]
    costs = {
        at: ModuleCost(pre=block(20.0), layer=block(900.0 * at.micro_batch_size**0.8), post=block(240.0))
        for at in points
    }
    module = Module(name="text_decoder", result_key="llm", num_layers=8)
    return small_profile(
        capacity_mib=400000,
        model=Model(name="small", modules=(module,), sequence_length=128),
        measurements=tuple(Measurement(at=at, modules={"text_decoder": cost}) for at, cost in costs.items()),
    )


PROFILE = _profile()


def _ramps(count: int) -> Iterator[tuple[int, int, int, Cluster]]:
    """Yield start, increment, last batch and a cluster."""
    draw = random.Random(7)
    for _ in range(count):
        start, increment = draw.choice([1, 2, 4, 6, 8, 12, 16]), draw.choice([1, 2, 4, 6, 8, 16])
        cluster = Cluster(num_nodes=draw.choice([1, 2]), devices_per_node=draw.choice([1, 2, 4]))
        yield start, increment, start + increment * draw.randint(1, 6), cluster


def _asserts(layout: Layout, start: int, increment: int, last: int) -> bool:
    """Return whether some batch on the way, counted as Megatron counts its samples, is no multiple of DP x MBS, or has
    microbatches that its interleaved schedule does not run."""
    consumed, ramp = 0, 10 * last
    batch, per_round = 0, layout.data_size * layout.micro_batch_size
    while batch < last:
        each = ramp / ((last - start) // increment)
        batch = last if consumed > ramp else start + int(consumed / each) * increment
        if batch % per_round:
            return True
        number, group = batch // per_round, layout.microbatch_group_size or layout.pipeline_size
        if layout.virtual_size > 1 and (number < group or 0 < number % group < layout.pipeline_size):
            return True
        consumed += batch
    return False


@pytest.mark.parametrize("drawn", list(_ramps(how_many(12, 60))))
def test_a_search_lists_the_layouts_that_run_every_batch_of_a_ramp(drawn: tuple[int, int, int, Cluster]) -> None:
    start, increment, last, cluster = drawn
    ramp = range(start, last, increment)
    listed, verdicts = enumerate_layouts(PROFILE, cluster, last, SpaceOptions(ramp=ramp))
    assert not [item.layout.label() for item in listed if _asserts(item.layout, *drawn[:3])]
    without = enumerate_layouts(PROFILE, cluster, last, SpaceOptions())[0]
    left_out = [verdict for verdict in verdicts if "--rampup-batch-size" in verdict.reason]
    named = {verdict.layout.label() for verdict in left_out}
    assert named >= {item.layout.label() for item in without} - {item.layout.label() for item in listed}
    assert all(_asserts(verdict.layout, *drawn[:3]) for verdict in left_out)


@pytest.mark.parametrize("drawn", list(_ramps(how_many(6, 30))))
def test_plans_of_every_search_run_every_batch_of_a_ramp(drawn: tuple[int, int, int, Cluster]) -> None:
    start, increment, last, cluster = drawn
    ramp = range(start, last, increment)
    space = SpaceOptions(ramp=ramp)
    dimensions = Dimensions(ramp=ramp)
    tuned = enumerate_space([ProfileVariant(name="", settings={}, profile=PROFILE)], cluster, last, dimensions)
    assert not [item.layout.label() for item in tuned.configurations if _asserts(item.layout, *drawn[:3])]
    try:
        plan = search(PROFILE, cluster, last, SearchOptions(time_limit_s=2.0, space=space, with_relaxations=False))
    except ConfigError as error:
        assert "--rampup-batch-size trains batches of" in str(error) or "is not divisible" in str(error)
        return
    found = [plan.layout, *(other.layout for other in plan.alternatives)]
    assert not [layout.label() for layout in found if _asserts(layout, *drawn[:3])]
    chunks = three_chunks([(layout, 1.0) for layout in found], last)
    kept = enumerate_layouts(PROFILE, cluster, last, space, [replace(one, virtual_size=3) for one in chunks])[0]
    assert not [item.layout.label() for item in kept if _asserts(item.layout, *drawn[:3])]


@pytest.mark.skipif(not SOURCES, reason="MEGATRON_LM_SOURCES names no Megatron-LM checkout (tests/hosts/README.md)")
@pytest.mark.parametrize("drawn", list(_ramps(how_many(12, 60))))
def test_megatrons_own_count_accepts_every_listed_layout(drawn: tuple[int, int, int, Cluster]) -> None:
    start, increment, last, cluster = drawn
    counters = [name for source in SOURCES if (name := _counter(source)) is not None]
    if not counters:
        pytest.skip("no checkout of MEGATRON_LM_SOURCES has a release below 0.18, which ignores the flag")
    listed, _ = enumerate_layouts(PROFILE, cluster, last, SpaceOptions(ramp=range(start, last, increment)))
    for counter in counters:
        for item in listed:
            sizes = (last, item.layout.micro_batch_size, item.layout.data_size)
            count = counter(*sizes, False, 1, start, increment, 10 * last)
            consumed = 0
            while consumed <= 10 * last + last:
                count.update(consumed, True)
                consumed += count.current_global_batch_size


def _counter(source: Path) -> type | None:
    file = source / "megatron" / "core" / "num_microbatches_calculator.py"
    spec = importlib.util.spec_from_file_location("counted", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, "RampupBatchsizeNumMicroBatchesCalculator", None)


def test_the_flag_is_read_as_megatron_reads_it() -> None:
    def ramp(**given: object) -> list[int]:
        return list(batch_ramp(argparse.Namespace(**given), 32))

    assert ramp(rampup_batch_size=["8", "12", "900"]) == [8, 20]
    assert ramp(rampup_batch_size=None) == ramp() == []
    assert ramp(rampup_batch_size=[8, 12, 900], decrease_batch_size_if_needed=True) == []
    assert ramp(rampup_batch_size=[8, 12, 900], step_batch_size_schedule=None) == []  # from 0.18 on
    for wrong in ([8, 7, 900], [64, 8, 9], [8, 0, 9], [8, 8], ["x", 8, 9], [32, 8, 9]):
        with pytest.raises(ConfigError, match=r"--rampup-batch-size .* START INCREMENT SAMPLES.* of 32\.$"):
            ramp(rampup_batch_size=wrong)
