"""Hetero plans of small models by trying everything, memory added up by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise, product

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.evaluate import Evaluation, evaluate
from mindspeed_autoparallel.planner.hetero.backbone import backbone_profile
from mindspeed_autoparallel.planner.hetero.encoders import SUMMED_MODES
from mindspeed_autoparallel.planner.hetero.space import costs_of, generator_of, layouts_of, phase_of, split_modules
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions, enumerate_layouts
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Cluster


def enumerated(profile: Profile, cluster: Cluster, batch: int) -> float:
    """The best step of all layouts, scales, modes and placements; a generator ends the pipeline, or has its own."""
    best = _enumerated(profile, cluster, batch, own_generator=False)
    if generator_of(profile) is not None:
        best = min(best, _enumerated(profile, cluster, batch, own_generator=True))
    return best


def _enumerated(profile: Profile, cluster: Cluster, batch: int, *, own_generator: bool) -> float:
    others, _ = split_modules(profile)
    if own_generator:
        others = (*others, generator_of(profile))
    backbone = backbone_profile(profile, with_generator=not own_generator)
    best = float("inf")
    for candidate in enumerate_layouts(backbone, cluster, batch, SpaceOptions())[0]:
        layout = candidate.layout
        if own_generator and (layout.virtual_size > 1 or candidate.num_microbatches < layout.pipeline_size):
            continue
        candidate = replace(candidate, layout=replace(layout, meets=own_generator))
        pipelines = list(_pipelines(backbone, cluster, candidate, batch))
        for memory in SUMMED_MODES:
            of_modules = [
                [
                    phase_of(costs, sizes, candidate, memory=memory, balance="local")
                    for costs in costs_of(profile, module, cluster, pipeline_sizes=(1, 2, 4))[0]
                    for sizes in layouts_of(costs, candidate)
                ]
                for module in others
            ]
            for phases in product(*of_modules):
                held = sum(phase.state_bytes + phase.kept_bytes for phase in phases)
                at_first = sum(phase.first_stage_bytes for phase in phases)
                transient = max(phase.transient_bytes for phase in phases)
                for found in pipelines:
                    step = found.step.total_us + sum(phase.total_us for phase in phases)
                    if step < best and all(
                        max(
                            rank.peak_bytes,
                            transient
                            + sum(rank.terms[n] for n in ("parameters", "gradients", "optimizer", "runtime_overhead")),
                        )
                        + held
                        + (0 if rank.pipeline_rank else at_first)
                        <= rank.limit_bytes
                        for rank in found.memory
                    ):
                        best = step
    return best


def _pipelines(backbone: Profile, cluster: Cluster, candidate: Candidate, batch: int) -> Iterator[Evaluation]:
    """Every placement of the layers of all modules, one module after the other, and every recomputation."""
    modules = backbone.model.modules
    ends = list(accumulate((module.num_layers for module in modules), initial=0))
    for row in product(range(1, ends[-1] + 1), repeat=candidate.layout.num_virtual_stages):
        if sum(row) != ends[-1]:
            continue
        cuts = list(accumulate(row, initial=0))
        layers = {
            module.name: tuple(max(0, min(stop, last) - max(start, first)) for start, stop in pairwise(cuts))
            for module, (first, last) in zip(modules, pairwise(ends), strict=True)
        }
        ways = [product(*(range(count + 1) for count in counts)) for counts in layers.values()]
        for again in product(*ways):
            placement = ModulePlacement(
                layers=layers, recompute={name: {"full": counts} for name, counts in zip(layers, again, strict=True)}
            )
            try:
                yield evaluate(backbone, cluster, candidate.layout, placement, batch, with_timeline=False)
            except ConfigError:
                continue
