"""The bound on running out of memory against drawn batches: in order, balanced, ordered, packed, exchanged.

OOM_DRAWS=10000 python -m pytest -s tests/properties/planner/test_out_of_memory_bound.py      the long form
"""

import functools
import os
import types

import numpy
import pytest

from mindspeed_autoparallel.data.balance import BatchShape, as_loaded, balance, in_order, short_at_the_ends
from mindspeed_autoparallel.data.distribution import DataSource, make_distribution
from mindspeed_autoparallel.data.work import ModuleWork, SampleSize, WorkModel
from mindspeed_autoparallel.planner.spread import drawn_failures, memory
from mindspeed_autoparallel.planner.spread.factors import SampleFactors
from mindspeed_autoparallel.planner.spread.memory import out_of_memory
from mindspeed_autoparallel.planner.spread.rank_bytes import RankBytes
from mindspeed_autoparallel.spec import Layout

DRAWS = int(os.environ.get("OOM_DRAWS", "40"))
LENGTH, REPLICAS, MICROBATCHES = 4096, 2, 16
WORK = ModuleWork(name="text_decoder", rows="tokens", linear=1 / LENGTH, quadratic=0.0)
MODEL = WorkModel(phases=((WORK,),))
IS_LONG = DRAWS >= 1000
QUANTILES = (0.5, 0.9, 0.99, 0.999) if IS_LONG else (0.5, 0.9)
KINDS = ("in order", "balanced", "ordered", "packed", "exchanged")
HELD, PASSING, FIXED = 10**6, 2 * 10**5, 10**6


def distributions():
    draw = numpy.random.default_rng(1)
    return {
        "bimodal": numpy.where(draw.random(2000) < 0.05, LENGTH, 256),
        "long tail": numpy.clip(draw.lognormal(6, 1, 2000), 8, LENGTH).astype(int),
        "even": draw.integers(64, LENGTH, 2000),
        "narrow": numpy.clip(draw.normal(1500, 200, 2000), 64, LENGTH).astype(int),
    }


def shape_of(kind):
    size = 2 if kind in ("packed", "exchanged") else 1
    return BatchShape(
        num_replicas=REPLICAS, num_microbatches=MICROBATCHES, micro_batch_size=size, is_padded=kind != "packed"
    )


def arranged(sizes, kind):
    """Return how training arranges a batch: samples ``[replica, microbatch, place]``."""
    shape = shape_of(kind)
    if kind in ("balanced", "packed"):
        return balance(sizes, MODEL, shape)
    if kind == "exchanged":
        return as_loaded(sizes, MODEL, shape, is_exchanged=True)
    samples = in_order(sizes, shape)
    if kind == "ordered":
        order = numpy.stack([short_at_the_ends(row) for row in sizes[:, 0][samples].max(axis=2)])
        samples = numpy.take_along_axis(samples, order[:, :, None], axis=1)
    return samples


@functools.cache
def described(name):
    source = DataSource(kind="records", files=("x",), sha256="a", tokens_by="given", num_records=2000, num_read=2000)
    return make_distribution(source, [SampleSize(tokens=int(n)) for n in distributions()[name]])


@functools.cache
def held(name, kind):
    """Return ``[draw, replica, microbatch]``: tokens that drawn batches hold, padding included, over the reference."""
    data, shape = described(name), shape_of(kind)
    rows = numpy.random.default_rng(2).choice(len(data.sizes()), (DRAWS, shape.num_samples), p=data.shares())
    tokens = numpy.stack([data.sizes()[one][:, 0][arranged(data.sizes()[one], kind)] for one in rows])
    return (tokens.mean(axis=3) if kind == "packed" else tokens.max(axis=3)) / LENGTH


def peaks_of(factors, stages):
    """Return ``[draw]`` by the formula, written a second time: the heaviest window of any replica."""
    starts = range(MICROBATCHES - stages + 1)
    windows = [factors[:, :, start : start + stages] for start in starts]
    return FIXED + numpy.max([HELD * one.sum(axis=2) + PASSING * one.max(axis=2) for one in windows], axis=(0, 2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stages", [2, 4, 8, 16] if IS_LONG else [4, 16])
@pytest.mark.parametrize("name", ["bimodal", "long tail", "even", "narrow"] if IS_LONG else ["bimodal", "even"])
def test_no_arrangement_runs_out_of_memory_oftener_than_the_bound(monkeypatch, kind, stages, name):
    data, shape = described(name), shape_of(kind)
    factors = SampleFactors(
        work=(WORK,),
        reference_rows=(LENGTH,),
        padding="none" if kind == "packed" else "longest",
        sequence_length=LENGTH,
        notes=(),
    )
    peaks = peaks_of(held(name, kind), stages)
    plan = types.SimpleNamespace(
        layout=Layout(pipeline_size=stages, data_size=REPLICAS, micro_batch_size=shape.micro_batch_size),
        num_microbatches=MICROBATCHES,
        global_batch_size=shape.num_samples,
    )
    arrangement = {"in order": "none", "ordered": "replica"}.get(kind, "batch")
    if not IS_LONG:
        monkeypatch.setattr(drawn_failures, "_STAGES", (64,))
    told = []
    for quantile in QUANTILES:
        limit = int(numpy.quantile(peaks, quantile))
        # Stage 0 of 1F1B: as many microbatches as stages.
        rank = RankBytes(pipeline_rank=0, fixed=FIXED, held=(HELD,), passing=PASSING, window=stages, limit=limit)
        monkeypatch.setattr(memory, "rank_bytes", lambda *_, rank=rank: (rank,))
        fails = float((peaks > limit).mean())
        bound = out_of_memory(
            None, plan, data, factors, 1, arrangement, lambda sizes: [arranged(sizes, kind)]
        ).probability
        assert fails <= bound + 3 * numpy.sqrt(max(fails, 1 / DRAWS) / DRAWS), (quantile, fails, bound)
        if IS_LONG and fails * DRAWS >= 50:
            assert bound <= 5 * fails, (quantile, fails, bound)
        told.append(f"{fails:.2g}: {bound:.2g}")
    print(f"\n{kind}, {name}, PP {stages}: " + ", ".join(told), end="")
