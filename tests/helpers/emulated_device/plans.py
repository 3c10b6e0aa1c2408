"""Plans that the planner finds, as cases: the device adds up the blocks that a plan puts on a stage, by itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

from emulated_device.cases import Case
from mindspeed_autoparallel.planner.evaluate import Evaluation, evaluate
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.placement import ModulePlacement, placed_blocks
from mindspeed_autoparallel.planner.replay import replay
from mindspeed_autoparallel.planner.variable_data import sampled_times
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
    VariableData,
)
from mindspeed_autoparallel.spec import Cluster, Layout, Model, Module, Plan
from mindspeed_autoparallel.units import MIB

EXCHANGE_US = 300
"""Of a layer whose microbatches are paired, each way."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to plan for."""

    pipeline_size: int
    num_microbatches: int
    limit_mib: int
    """Per device; the tight ones force recomputation."""
    virtual_size: int = 1
    data_size: int = 1
    num_nodes: int = 1
    frozen: bool = False
    """The encoder has no backward, gradients or optimizer."""
    variable: bool = False
    """Microbatches differ."""
    paired: bool = False
    """Combined 1F1B, over two ranks that share experts."""

    @property
    def label(self) -> str:
        parts = [f"PP{self.pipeline_size}"]
        parts += [f"VPP{self.virtual_size}"] if self.virtual_size > 1 else []
        parts += [f"DP{self.data_size}"] if self.data_size > 1 else []
        parts += [f"{self.num_nodes} nodes"] if self.num_nodes > 1 else []
        parts += ["frozen encoder"] if self.frozen else []
        parts += ["variable data"] if self.variable else []
        parts += ["pairs"] if self.paired else []
        return " ".join(parts)


WANTED = tuple(
    [
        Wanted(pipeline_size=size, num_microbatches=count, limit_mib=limit)
        for size, tight in ((1, 2600), (2, 1600), (3, 1400), (4, 1200))
        for count, limit in ((16, 9000), (4, tight))
    ]
    + [
        Wanted(pipeline_size=4, num_microbatches=2, limit_mib=9000),
        Wanted(pipeline_size=4, num_microbatches=8, limit_mib=9000, frozen=True),
        Wanted(pipeline_size=4, num_microbatches=8, limit_mib=1200, num_nodes=2),
        Wanted(pipeline_size=2, num_microbatches=8, limit_mib=9000, data_size=2),
        Wanted(pipeline_size=4, num_microbatches=8, limit_mib=9000, data_size=2, frozen=True),
        Wanted(pipeline_size=4, num_microbatches=8, limit_mib=9000, variable=True),
    ]
    + [
        Wanted(pipeline_size=size, virtual_size=chunks, num_microbatches=count, limit_mib=limit)
        for size, chunks, count, limit in (
            (2, 3, 8, 9000),
            (2, 2, 8, 1500),
            (3, 2, 6, 9000),
            (4, 2, 8, 1500),
            (4, 3, 8, 9000),
            (4, 2, 4, 9000),
        )
    ]
)
MORE = tuple(
    [
        Wanted(pipeline_size=size, num_microbatches=count, limit_mib=limit)
        for size, tight in ((1, 2600), (2, 1600), (3, 1400), (4, 1200))
        for count, limit in ((4, 9000), (16, tight))
    ]
    + [
        Wanted(pipeline_size=size, virtual_size=2, num_microbatches=count, limit_mib=9000)
        for size, count in ((2, 4), (4, 8), (4, 16))
    ]
)
"""Both together are the plans of docs/validation/emulated.md; the tests run ``MORE`` with LONG=1."""
PAIRED = tuple(
    Wanted(pipeline_size=size, virtual_size=chunks, num_microbatches=8, limit_mib=limit, data_size=2, paired=True)
    for size, chunks, limit in ((1, 1, 9000), (2, 2, 9000), (2, 2, 2300), (4, 2, 9000))
)
"""Plans of combined 1F1B, which not every release runs."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan, what it predicts, and the steps that the device runs for it."""

    wanted: Wanted
    plan: Plan
    evaluation: Evaluation
    cases: tuple[Case, ...]
    """One, or one per drawn step of variable data."""


def planned(wanted: Wanted, interleaved_sends: str = "freed") -> Planned:
    """The planner's best placement for this pipeline, on a host that sends so."""
    profile = replace(profile_for(wanted), interleaved_sends=interleaved_sends)
    layout = Layout(
        pipeline_size=wanted.pipeline_size,
        virtual_size=wanted.virtual_size,
        data_size=wanted.data_size,
        expert_size=2 if wanted.paired else 1,
        paired=wanted.paired,
        schedule="interleaved" if wanted.virtual_size > 1 else "1f1b",
    )
    cluster = Cluster(
        num_nodes=wanted.num_nodes,
        devices_per_node=layout.num_devices // wanted.num_nodes,
        memory_limit_bytes=wanted.limit_mib * MIB,
    )
    plan = search(
        profile,
        cluster,
        wanted.num_microbatches * wanted.data_size,
        # What pairs save is not in the bounds: none closes.
        SearchOptions(layouts=[layout], with_relaxations=False, time_limit_s=0.3 if wanted.paired else 20.0),
    )
    _, evaluation = replay(plan)
    return Planned(wanted=wanted, plan=plan, evaluation=evaluation, cases=cases_of(profile, plan, evaluation))


def predicted_activation_peaks(item: Planned) -> list[int]:
    """By rank: the predicted peak of what blocks hold, without states, messages and overhead, which the device has not.

    The same rows of the cost model, for blocks whose outputs have no bytes.
    """
    profile = profile_for(item.wanted)

    def bare(block: BlockCost | None) -> BlockCost | None:
        return replace(block, output_bytes=0, dense=StateBytes()) if block else None

    measurement = profile.measurements[0]
    modules = {
        name: replace(cost, pre=bare(cost.pre), layer=bare(cost.layer), post=bare(cost.post))
        for name, cost in measurement.modules.items()
    }
    light = replace(
        profile,
        measurements=(replace(measurement, modules=modules),),
        device=replace(profile.device, runtime_overhead_bytes=0),
    )
    found = evaluate(
        light, item.plan.cluster, item.plan.layout, ModulePlacement.of_plan(item.plan), item.plan.global_batch_size
    )
    return [rank.peak_bytes for rank in found.memory]


def cases_of(profile: Profile, plan: Plan, evaluation: Evaluation) -> tuple[Case, ...]:
    stages = placed_blocks(profile.model, profile.measurements[0], ModulePlacement.of_plan(plan))
    overhead_ns = round(profile.device.operation_overhead_us * 1000)
    forward = [sum(round(block.cost.forward_us * 1000) for block in held) for held in stages]
    backward = [
        sum(round(block.cost.backward_us * 1000) + round(block.recompute.extra_backward_us * 1000) for block in held)
        for held in stages
    ]
    count = plan.num_microbatches
    case = Case(
        pipeline_size=plan.layout.pipeline_size,
        virtual_size=plan.layout.virtual_size,
        num_microbatches=count,
        forward_ns=[[value + overhead_ns] * count for value in forward],
        backward_ns=[[value + overhead_ns] * count for value in backward],
        link_ns=[round((us + profile.device.message_overhead_us) * 1000) for us in evaluation.link_us],
        blocks=[
            [(b.recompute.saved_bytes, b.recompute.forward_peak_bytes, b.recompute.backward_peak_bytes) for b in held]
            for held in stages
        ],
        before_sync_ns=[round(tail.reduce_us * 1000) for tail in evaluation.tails],
        after_sync_ns=[round((tail.gather_us + tail.optimizer_us) * 1000) for tail in evaluation.tails],
        paired=plan.layout.paired,
        has_ends=plan.layout.paired,
        saving_ns=_savings_ns(plan) if plan.layout.paired else [],
    )
    if profile.variable_data is None:
        return (case,)
    by_module = []
    for held in stages:
        total: dict[str, tuple[int, int]] = {}
        for block in held:
            before = total.get(block.module, (0, 0))
            extra = round(block.recompute.extra_backward_us * 1000)
            total[block.module] = (
                before[0] + round(block.cost.forward_us * 1000),
                before[1] + round(block.cost.backward_us * 1000) + extra,
            )
        by_module.append(total)
    return tuple(
        replace(
            case,
            forward_ns=[[round(value) + overhead_ns for value in row] for row in f],
            backward_ns=[[round(value) + overhead_ns for value in row] for row in b],
        )
        for f, b in sampled_times(profile.variable_data, by_module, count)
    )


def _savings_ns(plan: Plan) -> list[list[int]]:
    """Half of both exchanges, which are shorter than what they hide behind, as often as layers run side by side."""
    counts = plan.layers_of("text_decoder")
    return [[min(a, b) * EXCHANGE_US * 1000 for b in counts] for a in counts]


def profile_for(wanted: Wanted) -> Profile:
    """Encoder and decoder (only the decoder for interleaved pipelines, which the planner splits for one module)."""
    link = Collective(latency_us=15.0, bytes_per_s=25e9)
    decoder = ModuleCost(
        pre=_block(40, saved_mib=4),
        layer=replace(
            _block(1900, saved_mib=60, recomputable=True),
            forward_exchange_us=EXCHANGE_US if wanted.paired else 0,
            backward_exchange_us=EXCHANGE_US if wanted.paired else 0,
        ),
        post=_block(1300, saved_mib=35, parameters_mib=10),
    )
    encoder = ModuleCost(
        pre=_block(150, saved_mib=6, frozen=wanted.frozen),
        layer=_block(700, saved_mib=25, recomputable=True, parameters_mib=2, frozen=wanted.frozen),
        post=_block(250, saved_mib=8, frozen=wanted.frozen),
    )
    modules = (
        Module(name="image_encoder", result_key="vit", num_layers=9),
        Module(name="text_decoder", result_key="llm", num_layers=16, predecessors=("image_encoder",)),
    )
    costs = {"image_encoder": encoder, "text_decoder": decoder}
    if wanted.virtual_size > 1 or wanted.paired:
        modules = (Module(name="text_decoder", result_key="llm", num_layers=17),)
        costs = {"text_decoder": decoder}
    factors = [(0.3,), (0.6,), (1.0,), (1.5,), (2.4,)]
    return Profile(
        model=Model(name="emulated", modules=modules, sequence_length=1024),
        device=DeviceCost(
            memory_capacity_bytes=16000 * MIB,
            runtime_overhead_bytes=200 * MIB,
            intra=LinkTier(default=link),
            inter=LinkTier(default=Collective(latency_us=30.0, bytes_per_s=6e9)),
            operation_overhead_us=40.0,
            message_overhead_us=15.0,
            optimizer_step_us_per_byte=2e-6,
            optimizer_step_fixed_us=100.0,
        ),
        measurements=(Measurement(at=MeasuredAt(expert_size=2 if wanted.paired else 1), modules=costs),),
        provenance=Provenance(source="analytic", device="emulated", created_utc=""),
        variable_data=VariableData(modules=("image_encoder",), samples=tuple(factors)) if wanted.variable else None,
    )


def _block(
    forward_us: float, *, saved_mib: int, recomputable: bool = False, parameters_mib: int = 4, frozen: bool = False
) -> BlockCost:
    """Backward takes 1.9 times the forward; a frozen block has none and saves nothing."""
    saved = 0 if frozen else saved_mib * MIB
    recompute = {"none": RecomputeCost(saved_bytes=saved, backward_peak_bytes=3 * MIB, forward_peak_bytes=2 * MIB)}
    if recomputable and not frozen:
        recompute["full"] = RecomputeCost(
            saved_bytes=2 * MIB,
            extra_backward_us=forward_us,
            forward_peak_bytes=saved,
            backward_peak_bytes=saved + 3 * MIB,
        )
    size = parameters_mib * MIB
    states = (
        StateBytes(num_parameters=size, parameter_bytes=2 * size)
        if frozen
        else StateBytes(
            num_parameters=size, parameter_bytes=2 * size, gradient_bytes=4 * size, optimizer_bytes=12 * size
        )
    )
    return BlockCost(
        forward_us=forward_us,
        backward_us=0.0 if frozen else 1.9 * forward_us,
        recompute=recompute,
        output_bytes=4 * MIB,
        dense=states,
    )
