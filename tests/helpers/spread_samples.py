"""Samples of unequal size, a profile that states the sizes it was measured with, and searches of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy
from small_profile import small_profile

from mindspeed_autoparallel.data.distribution import DataSource, Distribution, make_distribution
from mindspeed_autoparallel.data.work import SampleSize
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Cluster, Layout, Plan

LENGTH = 1024


def data_of(samples: list[SampleSize], num_records: int = 0) -> Distribution:
    source = DataSource(
        kind="records",
        files=("x",),
        sha256="abc",
        tokens_by="given",
        num_records=max(num_records, len(samples)),
        num_read=len(samples),
    )
    return make_distribution(source, samples)


def sample(tokens: int, patches: int = 0) -> SampleSize:
    return SampleSize(tokens=tokens, images=min(patches, 1), patches=patches, squared_patches=patches**2)


def profile_of(capacity_mib: int = 2000) -> Profile:
    """An encoder measured with 64 patches, a decoder measured with 1,024 tokens."""
    profile = small_profile(capacity_mib=capacity_mib)
    encoder, decoder = profile.model.modules
    modules = (
        replace(encoder, tokens_per_sample=64, hidden_size=512),
        replace(decoder, tokens_per_sample=LENGTH, hidden_size=512),
    )
    return replace(profile, model=replace(profile.model, modules=modules, sequence_length=LENGTH))


def long_tail(number: int = 400, seed: int = 3) -> list[SampleSize]:
    draw = numpy.random.default_rng(seed)
    tokens = numpy.clip(draw.lognormal(5, 1, number), 8, LENGTH).astype(int)
    return [sample(int(size), int(size) // 16 * 4) for size in tokens]


def searched(cluster: Cluster, batch: int, **options: Any):
    def run(profile: Profile, layouts: list[Layout] | None) -> Plan:
        return search(
            profile, cluster, batch, SearchOptions(layouts=layouts, with_relaxations=False, num_workers=1, **options)
        )

    return run


def one_plan(profile: Profile, pipeline: int = 2, data: int = 2, batch: int = 16) -> Plan:
    cluster = Cluster(num_nodes=1, devices_per_node=pipeline * data)
    return search(
        profile,
        cluster,
        batch,
        SearchOptions(layouts=[Layout(pipeline_size=pipeline, data_size=data)], with_relaxations=False, num_workers=1),
    )
