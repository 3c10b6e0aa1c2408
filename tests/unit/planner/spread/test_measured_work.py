"""Work fitted to times at several lengths: the function that made them, never below 0, nothing from noise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from small_profile import small_profile

from mindspeed_autoparallel.data.distribution import DataSource, make_distribution
from mindspeed_autoparallel.data.work import SampleSize
from mindspeed_autoparallel.errors import ProfileError
from mindspeed_autoparallel.planner.spread.factors import measured_work, sample_factors
from mindspeed_autoparallel.profiles import read_profile


@pytest.mark.parametrize(("fixed", "linear", "quadratic"), [(0.2, 1e-3, 1e-6), (0, 1e-3, 0), (0.3, 0, 2e-6), (1, 0, 0)])
def test_parts_that_made_the_times_are_found(fixed: float, linear: float, quadratic: float) -> None:
    points = [(n, fixed + linear * n + quadratic * n * n) for n in (64, 64, 300, 1024)]
    work = measured_work("text_decoder", "tokens", points, 0.01, 500)
    assert work is not None
    sizes = numpy.array([SampleSize(tokens=n) for n in (16, 200, 4096)])
    expected = [fixed + linear * n + quadratic * n * n for n in (16, 200, 4096)]
    assert work.of(sizes) == pytest.approx(expected, rel=1e-6)


def test_noise_never_makes_a_part_negative_and_growth_stays() -> None:
    draw = numpy.random.default_rng(1)
    for _ in range(50):
        lengths = draw.permutation([32, 40, 64, 300, 310, 500, 1800, 2000, 2048])
        times = (0.1 + 5e-4 * lengths + 1e-7 * lengths**2) * draw.lognormal(0, 0.1, 9)
        work = measured_work("text_decoder", "tokens", list(zip(lengths.tolist(), times.tolist(), strict=True)), 0, 1)
        assert work is not None and min(work.fixed, work.linear, work.quadratic) >= 0
        short, long = work.of(numpy.array([SampleSize(tokens=64), SampleSize(tokens=1024)]))
        assert 2 < long / short < 10


def test_lengths_too_near_one_another_tell_nothing() -> None:
    assert measured_work("text_decoder", "tokens", [(100, 1.0), (110, 1.3), (105, 0.9)], 0, 1) is None
    assert measured_work("text_decoder", "tokens", [(100, 1.0), (900, 9.0)], 0, 1) is None
    assert measured_work("text_decoder", "tokens", [], 0, 1) is None


def test_pictures_keep_the_share_of_their_attention() -> None:
    # Rows in pictures of 50 patches: time 0.1 + rows x (1 + 0.01 x 50) / 1000.
    points = [(rows, 0.1 + rows * 1.5 / 1000) for rows in (50, 400, 1200)]
    work = measured_work("image_encoder", "patches", points, 0.01, 50)
    assert work is not None
    two_pictures = numpy.array([SampleSize(tokens=0, images=2, patches=100, squared_patches=5000)])
    assert work.of(two_pictures) == pytest.approx(0.1 + 0.15)
    one_large = numpy.array([SampleSize(tokens=0, images=1, patches=100, squared_patches=10_000)])
    assert work.of(one_large) == pytest.approx(0.1 + 0.1 + 0.1)


def test_a_profile_with_lengths_plans_by_them(tmp_path: Path) -> None:
    profile = small_profile()
    encoder, text = profile.model.modules
    model = replace(profile.model, sequence_length=1024, modules=(encoder, replace(text, hidden_size=8)))
    points = tuple((float(n), 0.5 + n / 1024) for n in (64, 512, 1024))
    profile = replace(profile, model=model, time_by_rows={text.name: points})
    source = DataSource(kind="lengths", files=("x",), sha256="x", tokens_by="given", num_records=2, num_read=2)
    data = make_distribution(source, [SampleSize(tokens=64), SampleSize(tokens=1024)])
    sizes = numpy.array([[SampleSize(tokens=64)], [SampleSize(tokens=1024)]])
    times, _ = sample_factors(profile, data).of(sizes)
    assert times[:, 1] == pytest.approx([0.5625, 1.5], rel=1e-6)
    profile.write(tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile
    with pytest.raises(ProfileError, match="rows must be above 0"):
        replace(profile, time_by_rows={text.name: ((0.0, 1.0),)})
