"""Choices of encoder layout, scale and memory mode that no search would make, beside planned backbones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from emulated_device.hetero_cases import HeteroCase
from emulated_device.hetero_plans import FOUR, PP4, TP2_PP2, Load, hetero_case, hetero_plan, profile_of, stage_layers
from mindspeed_autoparallel.cost.redistribution import exchange_link, exchange_of
from mindspeed_autoparallel.planner.hetero.backbone import backbone_profile
from mindspeed_autoparallel.planner.hetero.encoders import encoder_phase, macro_batches, metadata_us
from mindspeed_autoparallel.planner.hetero.generator import generator_phase
from mindspeed_autoparallel.planner.hetero.space import costs_of
from mindspeed_autoparallel.planner.layouts.space import Candidate
from mindspeed_autoparallel.planner.replay import replay
from mindspeed_autoparallel.profiles import MeasuredAt, Profile
from mindspeed_autoparallel.schedule.window import BackboneTimes, window_step_us
from mindspeed_autoparallel.spec import Layout, ModuleLayout, Plan

GENERATOR_LAYERS = 4


@dataclass(frozen=True, kw_only=True)
class Forced:
    """A choice of encoder layout, scale and memory mode that no search would make, beside the plan of a way."""

    load: Load
    plan: Plan
    tensor_size: int
    scale: int
    memory: str
    slower_link: int = 1
    """Transfers and messages take so many times as long."""
    pipeline_size: int = 1
    """Of the encoder."""
    sequential: bool = False
    """Every transfer is waited for where it is started; not predicted."""

    def predicted_us(self) -> float:
        """As ``Variant.predicted_us``, for this choice."""
        profile = profile_of(self.load, slower_link=self.slower_link)
        encoder = profile.model.modules[0]
        (costs,), _ = costs_of(profile, encoder, FOUR, [self.tensor_size])
        candidate = self.candidate(profile)
        if self.memory == "window":
            backbone = BackboneTimes(
                forward_us=[stage.forward_us for stage in self.plan.stages],
                backward_us=[stage.backward_us for stage in self.plan.stages],
                link_us=self.plan.extra.link_us,
                num_microbatches=self.plan.num_microbatches,
                num_chunks=self.plan.layout.virtual_size,
                sends=profile.interleaved_sends if self.plan.layout.virtual_size > 1 else "blocking",
            )
            batches = macro_batches(costs, self.sizes, candidate, balance="local")
            return window_step_us(backbone, [batches])
        phase = encoder_phase(costs, self.sizes, candidate, memory=self.memory, balance="local")
        return self.plan.step.pipeline_us + phase.forward_us + phase.backward_us + phase.exchange_us

    def candidate(self, profile: Profile) -> Candidate:
        """Return the backbone's layout with its costs."""
        measurement = profile.at(
            MeasuredAt(tensor_size=self.plan.layout.tensor_size, micro_batch_size=self.plan.layout.micro_batch_size)
        )
        assert measurement is not None
        return Candidate(
            profile=profile,
            cluster=FOUR,
            layout=replace(self.plan.layout, modules={}),
            measurement=measurement,
            num_microbatches=self.plan.num_microbatches,
        )

    @property
    def inputs_travel(self) -> bool:
        """An encoder replica spans replicas of the backbone."""
        return not exchange_of(replace(self.plan.layout, modules={}), self.sizes, "local").nested

    @property
    def sizes(self) -> ModuleLayout:
        return ModuleLayout(
            tensor_size=self.tensor_size,
            pipeline_size=self.pipeline_size,
            data_size=4 // self.tensor_size // self.pipeline_size,
            micro_batch_scale=self.scale,
        )

    def case(self) -> HeteroCase:
        """For the device."""
        plan = replace(self.plan, layout=replace(self.plan.layout, modules={"image_encoder": self.sizes}))
        case = hetero_case(self.load, plan, sleeping=False, scale=1)
        return replace(
            case,
            memory=self.memory,
            sequential=self.sequential,
            transfer_ns_per_sample=self.slower_link * case.transfer_ns_per_sample,
            input_ns_per_sample=self.slower_link * case.input_ns_per_sample,
            encoder_ns_per_sample=self.slower_link * case.encoder_ns_per_sample,
        )


@dataclass(frozen=True, kw_only=True)
class ForcedGenerator(Forced):
    """The same with a generator behind the backbone's last stage, under a layout of its own."""

    generator_tensor_size: int
    generator_pipeline_size: int = 1

    @property
    def generator_sizes(self) -> ModuleLayout:
        width = self.generator_tensor_size * self.generator_pipeline_size
        return ModuleLayout(
            tensor_size=self.generator_tensor_size, pipeline_size=self.generator_pipeline_size, data_size=4 // width
        )

    def predicted_us(self) -> float:
        """As before, with the exchanges inside the pipeline."""
        profile = profile_of(self.load, slower_link=self.slower_link, generator_layers=GENERATOR_LAYERS)
        (costs,), _ = costs_of(profile, profile.model.modules[-1], FOUR, [self.generator_tensor_size])
        candidate = self.candidate(profile)
        sizes = self.generator_sizes
        phase = generator_phase(costs, sizes, candidate, balance="local")
        # The device does not emulate the exchange of sizes.
        exchange = exchange_of(candidate.layout, sizes, "local")
        sizes_us = metadata_us(exchange, "local", candidate, exchange_link(exchange, FOUR, profile.device))
        added_us = phase.forward_us + phase.backward_us + phase.exchange_us - sizes_us
        met = replace(self.plan, hetero=None, layout=replace(candidate.layout, meets=True))
        step_us = replay(replace(met, model=backbone_profile(profile, with_generator=False).model))[1].step.pipeline_us
        return super().predicted_us() + step_us + added_us - self.plan.step.pipeline_us

    def case(self) -> HeteroCase:
        forward_ns = [
            [
                count * round(self.load.image_layer_us(samples, self.generator_tensor_size) * 1000) * bool(samples)
                for samples in range(self.load.global_batch_size + 1)
            ]
            for count in stage_layers(self.generator_sizes, GENERATOR_LAYERS)
        ]
        return replace(
            super().case(),
            generator_tensor_size=self.generator_tensor_size,
            generator_forward_ns=forward_ns,
            generator_backward_ns=[[2 * time_ns for time_ns in row] for row in forward_ns],
        )


def forced_generators(load: Load) -> list[ForcedGenerator]:
    """Generators with and without stages beside every backbone, microbatches of one and two samples, slow links."""
    pairs = [replace(layout, micro_batch_size=2) for layout in (TP2_PP2, PP4)]
    plans = [*_of_every_backbone(load), *(hetero_plan(load, 2, layouts=[layout]) for layout in pairs)]
    return [
        ForcedGenerator(
            load=load,
            plan=plan,
            tensor_size=tensor,
            scale=1,
            memory=memory,
            slower_link=slower,
            generator_tensor_size=own,
            generator_pipeline_size=stages,
        )
        for plan in plans
        for tensor, memory, own, stages, slower in (
            (1, "upfront", 1, 1, 1),
            (2, "recompute", 2, 1, 30),
            (1, "recompute", 1, 2, 1),
            (2, "upfront", 2, 2, 100),
            (1, "upfront", 1, 4, 30),
        )
    ]


def forced(load: Load, plans: Sequence[Plan]) -> list[Forced]:
    """Odd scales, both modes, both encoder sizes, transfers that hide behind computation and that do not."""
    return [
        Forced(load=load, plan=plan, tensor_size=tensor, scale=scale, memory=memory, slower_link=slower)
        for plan in plans
        for tensor, scale, memory, slower in (
            (1, 1, "upfront", 1),
            (1, 3, "recompute", 100),
            (2, 5, "upfront", 100),
            (2, 2, "recompute", 1),
            (1, 7, "upfront", 400),
            (2, 1, "upfront", 30),
        )
    ]


def forced_data_parallel(load: Load) -> list[Forced]:
    """Backbones with replicas: inside one an encoder's replica has its inputs, over two of them inputs travel."""
    found = []
    for layout in (Layout(data_size=4), Layout(tensor_size=2, data_size=2), Layout(pipeline_size=2, data_size=2)):
        plan = hetero_plan(load, 2, layouts=[layout])
        for tensor, scale, memory in ((2, 1, "upfront"), (2, 3, "recompute"), (1, 2, "upfront")):
            found.append(Forced(load=load, plan=plan, tensor_size=tensor, scale=scale, memory=memory))
    return found


def _of_every_backbone(load: Load) -> list[Plan]:
    layouts = (TP2_PP2, PP4, Layout(pipeline_size=2, data_size=2), Layout(tensor_size=2, data_size=2))
    return [hetero_plan(load, 1, layouts=[layout]) for layout in layouts]


def forced_stages(load: Load) -> list[Forced]:
    """Encoders in stages of their own: beside every kind of backbone, both modes, slow links, uneven stages."""
    return [
        Forced(
            load=load,
            plan=plan,
            tensor_size=tensor,
            pipeline_size=stages,
            scale=min(scale, plan.num_microbatches),
            memory=memory,
            slower_link=slower,
        )
        for plan in _of_every_backbone(load)
        for tensor, stages, scale, memory, slower in (
            (1, 2, 1, "upfront", 1),
            (1, 4, 1, "recompute", 1),
            (2, 2, 3, "upfront", 30),
            (1, 4, 3, "upfront", 100),
            (1, 2, 2, "recompute", 100),
        )
    ]


def forced_window(load: Load) -> list[Forced]:
    """Memory mode window: scales that divide and do not, both encoder sizes, slow links, with and without replicas and
    virtual stages."""
    virtual = [replace(layout, virtual_size=2, schedule="interleaved") for layout in (TP2_PP2, PP4)]
    return [
        Forced(
            load=load,
            plan=plan,
            tensor_size=tensor,
            scale=min(scale, plan.num_microbatches),
            memory="window",
            slower_link=slower,
        )
        for plan in (*_of_every_backbone(load), *(hetero_plan(load, 1, layouts=[layout]) for layout in virtual))
        for tensor, scale, slower in ((1, 1, 1), (1, 3, 30), (2, 2, 1), (2, 5, 100))
    ]
