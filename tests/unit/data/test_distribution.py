"""The distribution's file, and the figures drawn from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_autoparallel.data.distribution import DataSource, Distribution, make_distribution
from mindspeed_autoparallel.data.statistics import histogram, joint, padding_share, quantile, unseen_share
from mindspeed_autoparallel.data.work import SampleSize
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.report.data_page import render_data_page


def distribution(tokens: list[int], num_records: int = 0) -> Distribution:
    source = DataSource(
        kind="lengths",
        files=("x",),
        sha256="",
        tokens_by="given",
        num_records=max(num_records, len(tokens)),
        num_read=len(tokens),
    )
    return make_distribution(source, [SampleSize(tokens=size, patches=2 * size) for size in tokens])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=40))
def test_the_file_gives_back_what_was_written(tmp_path_factory: Any, tokens: list[int]) -> None:
    path = tmp_path_factory.mktemp("d") / "d.json"
    data = distribution(tokens)
    data.write(path)
    assert Distribution.read(path) == data
    values, counts = data.column("tokens")
    assert sorted(tokens) == numpy.repeat(values, counts).tolist()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "other"}, "is not a data distribution"),
        ({"schema_version": 9}, "schema_version 9"),
        ({"rows": []}, "rows and"),
        ({"rows": [[-5, 0, 0, 0, 0, 0, 0]], "weights": [2]}, "not a sample of at least one token"),
        ({"rows": [[5, 0]], "weights": [2]}, "not a sample"),
        ({"weights": [1, 5]}, "add up to 6, 2 records were read"),
        ({"columns": ["tokens"]}, "columns must be"),
        ({"more": 1}, "unknown key 'more'"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = tmp_path / "d.json"
    distribution([3, 4]).write(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=words):
        Distribution.read(path)


def test_intervals_of_quantiles_hold_with_their_confidence() -> None:
    generator = numpy.random.default_rng(5)
    everything = numpy.round(generator.lognormal(6, 1, 20000)).astype(int)
    true = numpy.sort(everything)[int(0.95 * 20000) - 1]
    held = 0
    for _ in range(400):
        values, counts = numpy.unique(generator.choice(everything, 800, replace=False), return_counts=True)
        figure = quantile(values, counts, 0.95, 20000)
        held += figure.low <= true <= figure.high
    assert 0.925 <= held / 400 <= 0.985


def test_the_bound_of_unseen_records_holds_with_its_confidence() -> None:
    assert unseen_share(100, 100) == 0
    # The largest of n draws lies below the (1 - share) quantile with probability (1 - share)^n = 5 %.
    assert (1 - unseen_share(200, 1000)) ** 200 == pytest.approx(0.05)


def test_padding_equals_that_of_drawn_groups() -> None:
    values, counts = numpy.array([1, 10, 100]), numpy.array([5, 3, 2])
    drawn = numpy.random.default_rng(1).choice(numpy.repeat(values, counts), (200000, 4))
    expected = 1 - drawn.mean() / drawn.max(axis=1).mean()
    assert padding_share(values, counts, 4) == pytest.approx(expected, abs=2e-3)
    assert padding_share(values, counts, 1) == pytest.approx(0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=60))
def test_histograms_hold_every_sample(tokens: list[int]) -> None:
    data = distribution(tokens)
    found = histogram(*data.column("tokens"))
    assert sum(found.counts) == len(tokens) and len(found.edges) == len(found.counts) + 1
    together = joint(data, ("tokens", "patches"))
    assert sum(map(sum, together.counts)) == len(tokens)
    assert together.correlation == pytest.approx(1 if len(set(tokens)) > 1 else 0)


def test_the_page_has_axes_of_sizes_and_of_samples() -> None:
    page = render_data_page(distribution([10] * 6 + [20, 30]))
    drawing = page[page.index('class="histogram"') :]
    drawing = drawing[: drawing.index("</svg>")]
    for words in (">6</text>", ">3</text>", ">10</text>", ">30</text>", ">samples</text>", ">tokens</text>"):
        assert words in drawing
