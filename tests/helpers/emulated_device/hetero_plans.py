"""An encoder-bound and an LLM-bound model on four devices, planned in several ways, and what the device says.

Both sides are given the same times of blocks, links and transfers; the device adds them up by itself, from what the
phases, Megatron's schedule and the redistribution really do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from emulated_device.cases import Case
from emulated_device.hetero_cases import HeteroCase
from emulated_device.launching import run_hetero, run_on_emulated_device
from emulated_device.plans import cases_of
from mindspeed_autoparallel.planner.hetero.search import EncoderSpace, search_hetero
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.replay import replay
from mindspeed_autoparallel.profiles import (
    BlockCost,
    Collective,
    DeviceCost,
    LinkTier,
    MeasuredAt,
    Measurement,
    ModuleCost,
    Profile,
    Provenance,
    RecomputeCost,
    StateBytes,
)
from mindspeed_autoparallel.spec import Cluster, Layout, Model, Module, ModuleLayout, Plan
from mindspeed_autoparallel.units import MIB

FOUR = Cluster(num_nodes=1, devices_per_node=4)
LATENCY_US, BYTES_PER_S = 20.0, 25e9
OUTPUT_BYTES = 4 * MIB
"""Of one sample, from encoder or stage."""
INPUT_BYTES = 1 * MIB
"""Of one sample's pixels, where an encoder's replica does not have them."""
IMAGE_TP2, TEXT_TP2 = 0.65, 0.55
"""Time under TP2, relative to TP1: small layers gain less."""
VIT_LAYERS, TEXT_LAYERS = 8, 16
TP2_PP2 = Layout(tensor_size=2, pipeline_size=2)
PP4 = Layout(pipeline_size=4)


@dataclass(frozen=True, kw_only=True)
class Load:
    """How long the encoder is beside the backbone. Microseconds of one layer's forward: fixed, and per sample."""

    name: str
    image_us: tuple[float, float]
    text_us: tuple[float, float] = (100.0, 1900.0)
    global_batch_size: int = 16

    def image_layer_us(self, samples: int, tensor_size: int) -> float:
        factor = IMAGE_TP2 if tensor_size == 2 else 1.0
        return (self.image_us[0] + self.image_us[1] * samples) * factor

    def text_layer_us(self, samples: int, tensor_size: int) -> float:
        factor = TEXT_TP2 if tensor_size == 2 else 1.0
        return (self.text_us[0] + self.text_us[1] * samples) * factor


LOADS = (Load(name="encoder-bound", image_us=(300.0, 4700.0)), Load(name="LLM-bound", image_us=(60.0, 540.0)))

MORE_LOADS = (
    Load(name="audio", image_us=(40.0, 160.0)),
    Load(name="video", image_us=(500.0, 12000.0), global_batch_size=8),
)
"""An encoder far shorter and one far longer than the backbone."""


def profile_of(load: Load, scale: int = 1, slower_link: int = 1, generator_layers: int = 0) -> Profile:
    """Both modules under TP1 and TP2, at 1, 2 and 4 samples. ``scale``: of all times. ``generator_layers``: of a
    generator behind them, each as long as the encoder's."""
    behind = ("image_generator",) * bool(generator_layers)
    link = LinkTier(default=Collective(latency_us=LATENCY_US, bytes_per_s=BYTES_PER_S / slower_link))
    return Profile(
        model=Model(
            name=load.name,
            sequence_length=1024,
            modules=(
                Module(name="image_encoder", result_key="vit", num_layers=VIT_LAYERS),
                Module(name="text_decoder", result_key="llm", num_layers=TEXT_LAYERS, predecessors=("image_encoder",)),
                *(
                    Module(name=name, result_key="gen", num_layers=generator_layers, predecessors=("text_decoder",))
                    for name in behind
                ),
            ),
        ),
        device=DeviceCost(memory_capacity_bytes=64_000 * MIB, intra=link, inter=link),
        measurements=tuple(
            Measurement(
                at=MeasuredAt(tensor_size=tensor, micro_batch_size=samples),
                modules={
                    "image_encoder": ModuleCost(
                        layer=_block(scale * load.image_layer_us(samples, tensor), samples),
                        input_bytes=INPUT_BYTES * samples,
                    ),
                    "text_decoder": ModuleCost(layer=_block(scale * load.text_layer_us(samples, tensor), samples)),
                    **dict.fromkeys(
                        behind,
                        ModuleCost(
                            layer=_block(scale * load.image_layer_us(samples, tensor), samples),
                            input_bytes=INPUT_BYTES * samples,
                            rows_bytes=OUTPUT_BYTES * samples,
                        ),
                    ),
                },
            )
            for tensor in (1, 2)
            for samples in (1, 2, 4)
        ),
        provenance=Provenance(source="analytic", device="emulated", created_utc=""),
    )


def _block(forward_us: float, samples: int) -> BlockCost:
    return BlockCost(
        forward_us=forward_us,
        backward_us=2 * forward_us,
        output_bytes=OUTPUT_BYTES * samples,
        recompute={"none": RecomputeCost(saved_bytes=20 * MIB * samples)},
        dense=StateBytes(num_parameters=MIB, parameter_bytes=2 * MIB, gradient_bytes=4 * MIB, optimizer_bytes=12 * MIB),
    )


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to train the load on four devices, each the planner's best of its kind."""

    name: str
    plan: Plan
    predicted_us: float
    """Encoder phases and pipeline; without gradient reduction and optimizer, which are not emulated here."""


def hetero_plan(
    load: Load,
    tensor_size: int,
    memory: str = "upfront",
    *,
    scale: int = 1,
    layouts: Sequence[Layout] = (TP2_PP2, PP4),
    pipeline_sizes: Sequence[int] = (1,),
) -> Plan:
    """The best with this TP of the encoder and one of these layouts of the backbone."""
    return search_hetero(
        profile_of(load, scale),
        FOUR,
        load.global_batch_size,
        SearchOptions(layouts=list(layouts), time_limit_s=20.0),
        memory_modes=[memory],
        encoder_space=EncoderSpace(tensor_sizes={"image_encoder": [tensor_size]}, pipeline_sizes=pipeline_sizes),
    )


def homogeneous_plan(load: Load, layout: Layout, *, scale: int = 1) -> Plan:
    """The best split under one layout."""
    return search(
        profile_of(load, scale),
        FOUR,
        load.global_batch_size,
        SearchOptions(layouts=[layout], with_relaxations=False, time_limit_s=20.0),
    )


def ways(load: Load, scale: int = 1) -> list[Variant]:
    """Hetero with the encoder at TP1 and at TP2; homogeneous TP2-PP2; homogeneous PP4, the encoder on its stages."""
    plans = {
        "ViT DP4, hetero": hetero_plan(load, 1, scale=scale),
        "ViT TP2-DP2, hetero": hetero_plan(load, 2, scale=scale),
        "ViT DP4, hetero, recompute": hetero_plan(load, 1, "recompute", scale=scale),
        "ViT TP2, LLM TP2-PP2": homogeneous_plan(load, TP2_PP2, scale=scale),
        "ViT as stages of PP4": homogeneous_plan(load, PP4, scale=scale),
    }
    return [Variant(name=name, plan=plan, predicted_us=_without_tail(plan)) for name, plan in plans.items()]


def best_of_both(load: Load) -> tuple[Variant, Variant]:
    """The best plan with layouts of the encoder's own, and the best with one layout for all, of a backbone that needs
    four devices for one replica."""
    profile, size, layouts = profile_of(load), load.global_batch_size, [TP2_PP2, PP4]
    hetero = search_hetero(profile, FOUR, size, SearchOptions(layouts=layouts, time_limit_s=60.0))
    other = search(profile, FOUR, size, SearchOptions(layouts=layouts, with_relaxations=False, time_limit_s=60.0))
    return (
        Variant(name="hetero", plan=hetero, predicted_us=_without_tail(hetero)),
        Variant(name="homogeneous", plan=other, predicted_us=_without_tail(other)),
    )


def _without_tail(plan: Plan) -> float:
    phases = plan.hetero.encoders if plan.hetero is not None else ()
    encoders = sum(phase.forward_us + phase.backward_us + phase.exchange_us for phase in phases)
    encoders += plan.hetero.interleaving_us if plan.hetero is not None else 0.0
    return plan.step.pipeline_us + encoders


def measured_us(chosen: Sequence[tuple[Load, Variant]], *, sleeping: bool = False, scale: int = 1) -> list[float]:
    """Step times on the device, in the order of ``chosen``."""
    hetero = [hetero_case(load, way.plan, sleeping, scale) for load, way in chosen if way.plan.hetero]
    others = [_case(load, way.plan, sleeping, scale) for load, way in chosen if not way.plan.hetero]
    hetero_ns = iter(run_hetero(hetero, timeout_s=580))
    others_ns = iter(outcome.pipeline_ns for outcome in run_on_emulated_device(others, timeout_s=580))
    return [next(hetero_ns if way.plan.hetero else others_ns) / 1000 for _, way in chosen]


def _case(load: Load, plan: Plan, sleeping: bool, scale: int) -> Case:
    profile = profile_of(load, scale)
    at = MeasuredAt(tensor_size=plan.layout.tensor_size, micro_batch_size=plan.layout.micro_batch_size)
    one = replace(profile, measurements=tuple(m for m in profile.measurements if m.at == at))
    (case,) = cases_of(one, plan, replay(plan)[1])
    if sleeping:
        case = replace(case, sleeping=True, link_ns=[0] * len(case.link_ns), before_sync_ns=[], after_sync_ns=[])
    return case


def stage_layers(own: ModuleLayout, num_layers: int = VIT_LAYERS) -> list[int]:
    """Layers of the encoder, or of a generator, by stage of its own pipeline."""
    size = own.pipeline_size
    return [num_layers // size + (stage < num_layers % size) for stage in range(size)]


def hetero_case(load: Load, plan: Plan, sleeping: bool, scale: int) -> HeteroCase:
    layout, record = plan.layout, plan.hetero
    assert record is not None
    own = layout.modules["image_encoder"]
    text_ns = round(scale * load.text_layer_us(layout.micro_batch_size, layout.tensor_size) * 1000)

    def image_ns(count: int, samples: int) -> int:
        return count * round(scale * load.image_layer_us(samples, own.tensor_size) * 1000) if samples else 0

    stages = stage_layers(own)
    most = load.global_batch_size + 1
    layers = plan.layers_of("text_decoder")
    return HeteroCase(
        world=4,
        tensor_size=layout.tensor_size,
        pipeline_size=layout.pipeline_size,
        encoder_tensor_size=own.tensor_size,
        scale=own.micro_batch_scale,
        memory=record.memory,
        num_microbatches=plan.num_microbatches,
        micro_batch_size=layout.micro_batch_size,
        forward_ns=[count * text_ns for count in layers],
        backward_ns=[2 * count * text_ns for count in layers],
        link_ns=[0 if sleeping else round(us * 1000) for us in plan.extra.link_us],
        encoder_forward_ns=[[image_ns(count, samples) for samples in range(most)] for count in stages],
        encoder_backward_ns=[[2 * image_ns(count, samples) for samples in range(most)] for count in stages],
        encoder_latency_ns=round(LATENCY_US * 1000),
        encoder_ns_per_sample=OUTPUT_BYTES / BYTES_PER_S * 1e9,
        transfer_ns=round(LATENCY_US * 1000),
        transfer_ns_per_sample=OUTPUT_BYTES / BYTES_PER_S * 1e9,
        input_ns_per_sample=INPUT_BYTES / BYTES_PER_S * 1e9,
        sleeping=sleeping,
    )
