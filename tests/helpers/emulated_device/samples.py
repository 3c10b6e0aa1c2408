"""Steps of drawn samples as cases: the device multiplies the blocks of a stage by what each sample costs, by itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy

from emulated_device.cases import Case
from emulated_device.plans import Wanted, cases_of, profile_for
from mindspeed_autoparallel.data.distribution import DataSource, Distribution, make_distribution
from mindspeed_autoparallel.data.work import COLUMNS, SampleSize
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.placement import ModulePlacement, placed_blocks
from mindspeed_autoparallel.planner.replay import replay
from mindspeed_autoparallel.planner.spread.drawn_steps import PlanUnderData
from mindspeed_autoparallel.planner.spread.factors import sample_factors
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Cluster, Layout, Plan

LENGTH, PATCHES, WIDTH = 4096, 1024, 512
"""Of the sample that the profile was measured with."""
_TEXT, _PICTURES, _SQUARES = (COLUMNS.index(name) for name in ("tokens", "patches", "squared_patches"))


@dataclass(frozen=True, kw_only=True)
class DrawnStep:
    """One global batch: what is predicted, and a case for every replica."""

    predicted_us: float
    cases: tuple[Case, ...]


def distribution_of(sizes: Any) -> Distribution:
    """A distribution of ``sizes [sample, column]``, texts cut at ``LENGTH``."""
    cut = sizes.copy()
    cut[:, _TEXT] = numpy.minimum(cut[:, _TEXT], LENGTH)
    source = DataSource(
        kind="records", files=("x",), sha256="", tokens_by="given", num_records=len(cut), num_read=len(cut)
    )
    return make_distribution(source, [SampleSize(*map(int, row)) for row in cut])


def drawn_steps(data: Distribution, number: int, *, pipeline: int = 4, replicas: int = 2) -> list[DrawnStep]:
    """``number`` drawn steps of a plan with ``pipeline`` stages and 8 microbatches on each of ``replicas``."""
    wanted = Wanted(pipeline_size=pipeline, num_microbatches=8, limit_mib=9000, data_size=replicas)
    profile = profile_for(wanted)
    encoder, decoder = profile.model.modules
    modules = (
        replace(encoder, tokens_per_sample=PATCHES, hidden_size=WIDTH),
        replace(decoder, tokens_per_sample=LENGTH, hidden_size=WIDTH),
    )
    profile = replace(profile, model=replace(profile.model, modules=modules, sequence_length=LENGTH))
    layout = Layout(pipeline_size=pipeline, data_size=replicas)
    cluster = Cluster(num_nodes=1, devices_per_node=layout.num_devices)
    batch = 8 * replicas
    plan = search(profile, cluster, batch, SearchOptions(layouts=[layout], with_relaxations=False, num_workers=1))
    under = PlanUnderData(profile, plan, sample_factors(profile, data))
    generator = numpy.random.default_rng(11)
    steps = []
    for _ in range(number):
        rows = generator.choice(len(data.rows), (replicas, 8, 1), p=data.shares())
        sizes = data.sizes()[rows]
        cases = tuple(_case(profile, plan, replica[:, 0], _picture(data)) for replica in sizes)
        steps.append(DrawnStep(predicted_us=under.step_us(sizes), cases=cases))
    return steps


def _picture(data: Distribution) -> float:
    """Patches of the picture that the average patch lies in: that of the measurement, too."""
    shares, sizes = data.shares(), data.sizes()
    patches = float((shares * sizes[:, _PICTURES]).sum())
    return float((shares * sizes[:, _SQUARES]).sum()) / patches if patches else 0.0


def _case(profile: Profile, plan: Plan, samples: Any, picture: float) -> Case:
    """A replica's step over ``samples [microbatch, column]``; what a sample costs follows docs/data.md, written here
    once more: 2 operations a parameter and row, 4 x width a pair of rows, half of them in causal attention."""
    _, evaluation = replay(plan)
    (case,) = cases_of(profile, plan, evaluation)
    overhead_ns = round(profile.device.operation_overhead_us * 1000)
    measured = profile.measurements[0]

    def factor(module: str, sample: Any) -> float:
        parameters = measured.modules[module].layer.dense.num_parameters
        if module == "text_decoder":
            rows, pairs, one_pair = (sample[_TEXT], LENGTH), (sample[_TEXT] ** 2, LENGTH**2), 2.0 * WIDTH
        else:
            rows, pairs, one_pair = (sample[_PICTURES], PATCHES), (sample[_SQUARES], PATCHES * picture), 4.0 * WIDTH
        own, reference = (2.0 * parameters * a + one_pair * b for a, b in zip(rows, pairs, strict=True))
        return float(own / reference)

    stages = placed_blocks(profile.model, measured, ModulePlacement.of_plan(plan))
    forward = [[sum(1000 * b.cost.forward_us * factor(b.module, s) for b in held) for s in samples] for held in stages]
    backward = [
        [
            sum(1000 * (b.cost.backward_us + b.recompute.extra_backward_us) * factor(b.module, s) for b in held)
            for s in samples
        ]
        for held in stages
    ]
    return replace(
        case,
        forward_ns=[[round(value) + overhead_ns for value in row] for row in forward],
        backward_ns=[[round(value) + overhead_ns for value in row] for row in backward],
    )
