"""Hetero plans of small models by trying everything, memory added up by hand."""

from __future__ import annotations

from itertools import product

from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.hetero.backbone import backbone_profile
from mindspeed_autoparallel.planner.hetero.encoders import MEMORY_MODES, encoder_phase
from mindspeed_autoparallel.planner.hetero.space import costs_of, layouts_of, split_modules
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions, enumerate_layouts
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Cluster


def enumerated(profile: Profile, cluster: Cluster, batch: int) -> float:
    """The best step of all layouts, scales, modes and placements."""
    encoders, _ = split_modules(profile)
    backbone = backbone_profile(profile)
    num_layers = backbone.model.num_layers
    best = float("inf")
    for candidate in enumerate_layouts(backbone, cluster, batch, SpaceOptions())[0]:
        pipelines = []
        for row in product(range(1, num_layers + 1), repeat=candidate.layout.num_virtual_stages):
            if sum(row) == num_layers:
                for again in product(*(range(count + 1) for count in row)):
                    placement = ModulePlacement(
                        layers={"text_decoder": row}, recompute={"text_decoder": {"full": again}}
                    )
                    pipelines.append(
                        evaluate(backbone, cluster, candidate.layout, placement, batch, with_timeline=False)
                    )
        for memory in MEMORY_MODES:
            per_encoder = [
                [
                    encoder_phase(costs, sizes, candidate, cluster, memory=memory, balance="local")
                    for costs in costs_of(profile, encoder, cluster, pipeline_sizes=(1, 2, 4))[0]
                    for sizes in layouts_of(costs, candidate, cluster)
                ]
                for encoder in encoders
            ]
            for phases in product(*per_encoder):
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
