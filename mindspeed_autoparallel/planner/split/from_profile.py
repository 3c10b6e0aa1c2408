"""The split problem of a profile's first measured point, in whole nanoseconds and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.placement import prediction_may_be_apart, too_few_layers
from mindspeed_autoparallel.planner.split.model.blocks import Blocks, Costs, blocks_of
from mindspeed_autoparallel.planner.split.model.problem import LayerKind, SplitProblem, fullest_moments
from mindspeed_autoparallel.profiles import BlockCost, Profile
from mindspeed_autoparallel.schedule import in_flight, make_program
from mindspeed_autoparallel.spec import Layout, Module
from mindspeed_autoparallel.spec.plan import MOST_OPERATIONS
from mindspeed_autoparallel.units import MIB
from mindspeed_autoparallel.whole_numbers import MOST_MEMORY_MIB

NS_PER_US = 1000
_WAYS = ("none", "full", "selective")


def _check(profile: Profile, layout: Layout, num_microbatches: int, memory_limit_mib: float) -> None:
    if not 0 < memory_limit_mib <= MOST_MEMORY_MIB:
        raise ConfigError(
            f"--memory-limit-mib must be above 0 and at most {MOST_MEMORY_MIB}, got {memory_limit_mib:g}."
        )
    if reason := too_few_layers(profile, layout):
        # Embedding, prediction and output layer may be alone on a stage each.
        sizes = range(profile.model.num_layers + 3, 0, -1)
        most = next((size for size in sizes if not too_few_layers(profile, replace(layout, pipeline_size=size))), 0)
        lower = f"Lower --pipeline-size to {most} or below"
        ways = [lower] * bool(most) + ["take fewer chunks" if most else "Take fewer chunks"] * (layout.virtual_size > 1)
        raise ConfigError(f"{reason} {', or '.join(ways)}.")
    operations = 2 * layout.num_virtual_stages * num_microbatches
    if operations > MOST_OPERATIONS:
        raise ConfigError(
            f"{num_microbatches} microbatches on {layout.pipeline_size} stages are {operations} operations a step, "
            f"more than {MOST_OPERATIONS}. Lower --num-microbatches."
        )


def _sends(profile: Profile, schedule: str) -> str:
    # In MindSpeed's formulas messages overlap with computation; in this tool's profiles the host waits for them.
    if profile.memory_semantics == "mindspeed":
        return "eager"
    return profile.interleaved_sends if schedule == "interleaved" else "blocking"


def problem_from_profile(
    profile: Profile,
    *,
    num_stages: int,
    num_microbatches: int,
    memory_limit_mib: float,
    schedule: str = "1f1b",
    num_chunks: int = 1,
    microbatch_group_size: int = 0,
    standalone_ends: bool = False,
) -> SplitProblem:
    """Return the problem, in nanoseconds and bytes.

    Pre and post blocks are on the stage of their module's first and last layer. With ``standalone_ends``, those of a
    single module may be on a stage of their own (not for MindSpeed's file).

    Memory follows MindSpeed's rule for MindSpeed's file; otherwise it is saved bytes times in-flight microbatches, plus
    state, plus the largest transient. Message and host times are those of ``plan``. Raises ``ConfigError`` for a memory
    limit out of range, too many operations, and too few layers for the stages.
    """
    mindspeed = profile.memory_semantics == "mindspeed"
    alone = standalone_ends and not mindspeed
    layout = Layout(pipeline_size=num_stages, virtual_size=num_chunks, standalone_ends=alone)
    _check(profile, layout, num_microbatches, memory_limit_mib)
    program = make_program(schedule, num_stages, num_microbatches, num_chunks, microbatch_group_size)
    # The chunks of a stage share its memory at every moment of the schedule.
    moments = fullest_moments(program) if num_chunks > 1 else ()
    held = [0] * num_stages * num_chunks if moments else list(in_flight(program))
    blocks = _blocks(profile, held, mindspeed, alone)
    link = max(_link_ns(profile, block) for block in blocks.costs)
    limit = int(memory_limit_mib * MIB) - (0 if mindspeed else profile.device.runtime_overhead_bytes)
    return SplitProblem(
        segments=tuple(blocks.segments),
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        schedule=schedule,
        num_chunks=num_chunks,
        memory_limit=(limit,) * num_stages,
        link=(link,) * (num_stages * num_chunks - 1),
        sends=_sends(profile, schedule),
        per_operation=round(profile.device.operation_overhead_us * NS_PER_US),
        in_flight=moments,
        joints=blocks.joints(prediction_apart=prediction_may_be_apart(profile.model, layout)),
        microbatch_group_size=microbatch_group_size,
    )


def _blocks(profile: Profile, held: list[int], mindspeed: bool, standalone_ends: bool) -> Blocks:
    modules = profile.measurements[0].modules

    def price(module: Module, part: str, block: BlockCost, _: Sequence[BlockCost]) -> Costs:
        ways = [way for way in _WAYS if way in modules[module.name].layer.recompute] if part == "layer" else ["none"]
        times = round(block.forward_us * NS_PER_US), round(block.backward_us * NS_PER_US)
        return *times, _kinds(block, held, mindspeed, ways)

    return blocks_of(profile.model, modules, price, standalone_ends=standalone_ends)


def _link_ns(profile: Profile, block: BlockCost) -> int:
    p2p = profile.device.intra.of("p2p")
    return round((p2p.latency_us + block.output_bytes / p2p.bytes_per_s * 1e6) * NS_PER_US)


def _kinds(block: BlockCost, held: list[int], mindspeed: bool, ways: list[str]) -> tuple[LayerKind, ...]:
    states = (block.dense, block.expert)
    static = sum(
        s.parameter_bytes + s.gradient_bytes + s.optimizer_bytes + s.optimizer_unshardable_bytes for s in states
    )
    whole = block.recompute["none"].saved_bytes
    kinds: list[LayerKind] = []
    for name in ways:
        cost = block.recompute[name]
        # MindSpeed's rule: one microbatch in flight keeps all activations, the others as under the policy.
        one_whole = whole - cost.saved_bytes if mindspeed else 0
        kinds.append(
            LayerKind(
                name=name,
                extra_backward=round(cost.extra_backward_us * NS_PER_US),
                memory=tuple(cost.saved_bytes * n + one_whole + static for n in held),
                saved=0 if any(held) else cost.saved_bytes,
                transient=0 if mindspeed else max(cost.forward_peak_bytes, cost.backward_peak_bytes),
            )
        )
    return tuple(kinds)
