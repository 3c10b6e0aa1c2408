"""Hetero plans for data whose samples differ: steps, choice, the command, and a script's search."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from small_profile import small_profile

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.data.distribution import DataSource, Distribution, make_distribution
from mindspeed_autoparallel.data.work import SampleSize
from mindspeed_autoparallel.planner.hetero.encoders import SUMMED_MODES
from mindspeed_autoparallel.planner.hetero.search import search_hetero
from mindspeed_autoparallel.planner.spread.factors import sample_factors
from mindspeed_autoparallel.planner.spread.hetero_choice import HeteroPlanUnderData, choose_hetero
from mindspeed_autoparallel.planner.spread.samples import SpreadOptions
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.report.encoders import encoders, rival
from mindspeed_autoparallel.report.headline import warnings
from mindspeed_autoparallel.spec import Cluster, Layout, Plan

LENGTH, PATCHES = 1024, 64
FOUR = Cluster(num_nodes=1, devices_per_node=4)


def data_of(samples: list[SampleSize]) -> Distribution:
    source = DataSource(
        kind="lengths", files=("x",), sha256="abc", tokens_by="given", num_records=len(samples), num_read=len(samples)
    )
    return make_distribution(source, samples)


def sample(tokens: int, patches: int, images: int = 1) -> SampleSize:
    each = patches // max(images, 1)
    return SampleSize(tokens=tokens, images=images, patches=patches, squared_patches=images * each**2)


def profile_of(capacity_mib: int = 4000) -> Profile:
    profile = small_profile(capacity_mib=capacity_mib)
    encoder, decoder = profile.model.modules
    modules = (
        replace(encoder, tokens_per_sample=PATCHES, hidden_size=512),
        replace(decoder, tokens_per_sample=LENGTH, hidden_size=512),
    )
    return replace(profile, model=replace(profile.model, modules=modules, sequence_length=LENGTH))


def planned(profile: Profile, backbone: Layout, batch: int = 8, balance: str = "local") -> Plan:
    from mindspeed_autoparallel.planner.layouts.options import SearchOptions

    return search_hetero(
        profile, FOUR, batch, SearchOptions(layouts=[backbone]), memory_modes=SUMMED_MODES, balance=balance
    )


def long_tail(number: int = 300) -> list[SampleSize]:
    draw = numpy.random.default_rng(3)
    tokens = numpy.clip(draw.lognormal(5, 1, number), 8, LENGTH).astype(int)
    images = draw.integers(0, 4, number)
    return [
        sample(int(size), int(count) * 4 * int(draw.integers(1, 6)), int(count))
        for size, count in zip(tokens, images, strict=True)
    ]


@pytest.mark.parametrize("backbone", [Layout(data_size=4), Layout(pipeline_size=2, data_size=2)])
def test_samples_like_the_profiles_have_the_planned_step(backbone: Layout) -> None:
    profile, data = profile_of(), data_of([sample(LENGTH, PATCHES)] * 9)
    plan = planned(profile, backbone)
    drawn = HeteroPlanUnderData(profile, plan, sample_factors(profile, data), numpy.ones(2)).drawn(data, 3)
    assert drawn.in_order == pytest.approx(plan.step.total_us, rel=1e-6)
    assert drawn.balanced == pytest.approx(plan.step.total_us, rel=1e-6) and drawn.imbalance == pytest.approx(1)


def test_a_replica_waits_for_the_busiest_owner_of_each_macro_batch() -> None:
    """Pictures of one sample on several owners; the expected sums are written out here."""
    profile = profile_of()
    data = data_of([sample(LENGTH, PATCHES), sample(LENGTH, 2 * PATCHES, 2), sample(LENGTH, 0, 0)])
    plan = planned(profile, Layout(pipeline_size=4), 4)
    assert plan.hetero is not None
    (phase,) = plan.hetero.encoders
    phase = replace(
        phase, layout=replace(phase.layout, tensor_size=1, pipeline_size=1, data_size=4, micro_batch_scale=2)
    )
    plan = replace(plan, hetero=replace(plan.hetero, encoders=(phase,)))
    under = HeteroPlanUnderData(profile, plan, sample_factors(profile, data), numpy.ones(2))
    one, two, none = (
        numpy.array(sample(LENGTH, size, count)) for size, count in ((PATCHES, 1), (2 * PATCHES, 2), (0, 0))
    )

    def step(*samples: numpy.ndarray) -> float:
        return under.step_us(numpy.stack(samples)[None, :, None, :])

    # Two macro-batches of two samples on four owners: one sample on the busiest, twice.
    unit = (phase.forward_us + phase.backward_us) / 2
    assert step(one, one, one, one) - step(none, none, none, none) == pytest.approx(2 * unit)
    assert step(one, one, none, none) - step(none, none, none, none) == pytest.approx(unit)
    # Four pictures of a macro-batch on four owners take no longer than one; a fifth does.
    five = numpy.array(sample(LENGTH, 3 * PATCHES, 3))
    assert step(two, two, none, none) == pytest.approx(step(one, none, none, none))
    assert step(two, five, none, none) - step(two, two, none, none) == pytest.approx(unit)


def test_the_chosen_plan_has_the_smallest_mean_of_drawn_steps() -> None:
    profile, data = profile_of(), data_of(long_tail())

    def searched(one: Profile, layouts: list[Layout] | None) -> Plan:
        from mindspeed_autoparallel.planner.layouts.options import SearchOptions

        return search_hetero(one, FOUR, 16, SearchOptions(layouts=layouts), memory_modes=SUMMED_MODES)

    plain = choose_hetero(profile, data, SpreadOptions(), searched)
    balanced = choose_hetero(profile, data, SpreadOptions(is_balanced=True), searched)
    assert plain.data is not None and balanced.data is not None and plain.hetero is not None
    assert plain.data.mean_us == min(one.mean_us for one in plain.data.considered)
    assert plain.data.by_means_us == pytest.approx(plain.step.total_us) and plain.data.mean_us > plain.data.by_means_us
    assert balanced.data.mean_us < plain.data.mean_us
    assert plain.data.oom_probability == 1 and plain.data.memory_note
    assert all(rank.peak_bytes <= rank.limit_bytes for rank in plain.memory)


def test_the_command_compares_by_drawn_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile_of().write(tmp_path / "profile.json")
    data_of(long_tail()).write(tmp_path / "data.json")
    words = ["plan", "--profile", str(tmp_path / "profile.json"), "--nnodes", "1", "--nproc-per-node", "4"]
    words += ["--global-batch-size", "16", "--num-workers", "1", "--hetero-parallel"]
    assert main([*words, "--data", str(tmp_path / "data.json"), "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for text in ("the spread costs", "no probability is given", "best homogeneous plan"):
        assert text in printed
    files = [file for file in ("plan.json", "hetero_plan.json", "homogeneous_plan.json") if (tmp_path / file).exists()]
    plans = {file: Plan.parse(json.loads((tmp_path / file).read_text())) for file in files}
    assert len(files) == 2 and plans["plan.json"].mean_us == min(plan.mean_us for plan in plans.values())
    hetero, other = sorted(plans.values(), key=lambda plan: plan.hetero is None)
    assert hetero.hetero is not None and hetero.hetero.homogeneous is not None and other.hetero_rival is not None
    assert hetero.mean_us > hetero.step.total_us
    assert (hetero.hetero.homogeneous.step_us, other.hetero_rival.step_us) == (other.mean_us, hetero.mean_us)
    assert (hetero.hetero.homogeneous.lower_bound_us, other.hetero_rival.lower_bound_us) == (None, None)
    assert "bound" not in rival(other)
    compared = json.loads((tmp_path / "auto_parallel_search_optimal_config.json").read_text())["hetero_parallel"]
    assert compared["e2e_time"] == pytest.approx(hetero.mean_us / 1000)
    assert compared["speed_up"] == pytest.approx(compared["homogeneous"]["e2e_time"] / compared["e2e_time"])
    assert "lower_bound" not in compared and "lower_bound" not in compared["homogeneous"]
    shown = encoders(hetero)
    assert shown is not None and shown.homogeneous is not None
    assert shown.homogeneous.speed_up == pytest.approx(compared["speed_up"])
    # Steps between the two would be those of the samples for which memory is planned.
    assert shown.homogeneous.gain.startswith("From it to this one (mean drawn steps): layouts with batch scale with ")
    assert f"{abs(hetero.mean_us / other.mean_us - 1):.1%}" in rival(other)
    for plan in plans.values():
        slower = plan is not plans["plan.json"]
        assert any("plan is faster" in text for text in warnings(plan)) == slower
    assert main(["report", "--plan", str(tmp_path / "plan.json"), "--page", str(tmp_path / "page.html")]) == 0
