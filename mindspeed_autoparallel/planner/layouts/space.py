"""All layouts: legal ones to search, the others with the reason why they are illegal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.paired_costs import have_exchanges, searched_costs
from mindspeed_autoparallel.planner.placement import too_few_layers
from mindspeed_autoparallel.planner.rank_memory import measured_at, point_of
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.schedule import group_sizes
from mindspeed_autoparallel.spec import Cluster, Layout
from mindspeed_autoparallel.spec.layout import unmet_expert_size
from mindspeed_autoparallel.spec.legality import (
    broken_batch,
    broken_groups,
    broken_shares,
    offloaded_beside_stages,
    uneven_devices,
    uneven_sequence,
)
from mindspeed_autoparallel.spec.plan import MOST_OPERATIONS
from mindspeed_autoparallel.spec.plan_records import Verdict

AUTOMATIC_VIRTUAL_SIZES = (1, 2, 4)
MAX_DEVICES = 2**20


@dataclass(frozen=True, kw_only=True)
class SpaceOptions:
    """Options of the outer search in addition to the sizes that follow from profile, cluster and batch."""

    virtual_sizes: tuple[int, ...] | None = None
    """Chunks per rank to try. ``None``: 1, 2 and 4, and 3 in the best pipelines; layouts with 2 and 4 that are not
    proved in a moment get a few seconds together. Where they are requested, they get all of the time limit."""
    schedules: tuple[str, ...] = ("1f1b",)
    """Schedules of layouts with one chunk per rank: ``1f1b``, and ``gpipe`` for a host that has it
    (Megatron lacks it)."""
    group_sizes: bool = True
    """Whether the host runs other groups of microbatches than the pipeline size (interleaved)."""
    standalone_ends: bool = False
    """Whether the host runs stages with only an embedding or an output layer."""
    distributed_optimizer: bool = True
    overlap_gradient_reduce: bool = False
    overlap_parameter_gather: bool = False
    """Beside the overlapped reduction of a distributed optimizer; a computed profile has both or neither."""
    bucket_elements: int = 0
    """Elements per bucket, as in ``Layout``."""
    overlap_tensor_parallel: bool = False
    """Whether layouts overlap tensor-parallel collectives with matrix products although the profile does
    not name it."""
    held: Mapping[str, int] = field(default_factory=dict)
    """Fixed values of fields of ``Layout``; layouts with other values are not listed."""
    least_expert_sizes: Mapping[str, int] = field(default_factory=dict)
    """Fewest expert ranks that the host runs, by what requires them."""
    paired: bool = False
    """Whether to try combined 1F1B as well, for layouts that can run it."""
    ramp: range = range(0)
    """Smaller global batches that the training runs in front of its own."""


def enumerate_layouts(
    profile: Profile,
    cluster: Cluster,
    global_batch_size: int,
    options: SpaceOptions,
    layouts: Sequence[Layout] | None = None,
) -> tuple[list[Candidate], list[Verdict]]:
    """Return legal layouts, and a verdict for every other one; the same order for the same input. Raises
    ``ConfigError``."""
    if cluster.num_devices > MAX_DEVICES:
        raise ConfigError(
            f"{cluster.num_devices} devices are more than {MAX_DEVICES}: check nodes and devices per node."
        )
    chosen = layouts if layouts is not None else _all_layouts(profile, cluster, options)
    candidates, verdicts = [], []
    for layout in chosen:
        if layouts is None and options.group_sizes:
            layout = with_smallest_groups(layout, global_batch_size)
        reason, outcome = _illegal(profile, cluster, layout, global_batch_size), "illegal"
        reason = reason or _too_few_experts(layout, options) or unmet_ramp(layout, options.ramp)
        measurement = None
        if not reason:
            measurement = point_of(profile, layout)
            if measurement is None:
                outcome, reason = "unmeasured", f"the profile has no costs for {measured_at(layout).label()}."
        if reason or measurement is None:
            verdicts.append(Verdict(layout=layout, outcome=outcome, reason=reason))
        else:
            candidates.append(
                Candidate(
                    profile=profile,
                    cluster=cluster,
                    layout=layout,
                    measurement=searched_costs(profile, measurement, layout),
                    num_microbatches=layout.num_microbatches(global_batch_size),
                )
            )
    return candidates, verdicts


def _too_few_experts(layout: Layout, options: SpaceOptions) -> str:
    unmet = unmet_expert_size(options.least_expert_sizes, layout.expert_size)
    return "" if unmet is None else f"EP {layout.expert_size} is below {unmet[1]}, the least for {unmet[0]}."


def _check_pairs(profile: Profile, options: SpaceOptions) -> None:
    if options.paired and all(measurement.at.expert_size == 1 for measurement in profile.measurements):
        raise ConfigError(
            "combined 1F1B hides exchanges of experts, and none of the profile's layouts has EP above 1: leave "
            "--overlap-moe-expert-parallel-comm out."
        )
    if options.paired and not have_exchanges(profile.measurements):
        raise ConfigError(
            "the profile lacks the time of experts' exchanges (forward_exchange_us of a layer), so that "
            "combined 1F1B cannot be priced: use --profile-source analytic, or leave "
            "--overlap-moe-expert-parallel-comm out."
        )


def _all_layouts(profile: Profile, cluster: Cluster, options: SpaceOptions) -> list[Layout]:
    points = [measurement.at for measurement in profile.measurements]
    devices = cluster.num_devices
    virtual = AUTOMATIC_VIRTUAL_SIZES if options.virtual_sizes is None else options.virtual_sizes
    if "virtual_size" in options.held:
        virtual = (options.held["virtual_size"],)
    tensors = {point.tensor_size for point in points}
    batches = {point.micro_batch_size for point in points}
    if profile.memory_semantics != "mindspeed":
        # Between measured sizes costs can be interpolated; beyond them they are reported as unmeasured.
        tensors |= {size for size in _powers_of_two(devices) if size <= cluster.devices_per_node}
        batches |= set(_powers_of_two(max(batches)))
    else:
        virtual = (1,)
    alone = options.standalone_ends and len(profile.model.modules) == 1 and profile.memory_semantics != "mindspeed"
    overlapped = options.overlap_tensor_parallel or profile.overlaps_tensor_parallel
    _check_pairs(profile, options)
    found = []
    # Attention ways and sharded norms are taken as measured: any (CP, EP, SP, ETP) of some point.
    as_measured = {(p.context_size, p.expert_size, p.sequence_parallel, p.expert_tensor_size) for p in points}
    for context, expert, sequence, expert_tensor in sorted(as_measured):
        for tensor in sorted(tensors):
            # Whole experts are listed only where they differ: with 1 tensor rank there is one way to share them.
            if devices % (tensor * context) or (expert_tensor and expert_tensor >= tensor):
                continue
            rest = devices // (tensor * context)
            for pipeline in (size for size in range(1, rest + 1) if rest % size == 0):
                for batch in sorted(batches):
                    for chunks in virtual:
                        if chunks > 1 and pipeline == 1:
                            continue
                        found += [
                            Layout(
                                pipeline_size=pipeline,
                                tensor_size=tensor,
                                data_size=rest // pipeline,
                                context_size=context,
                                expert_size=expert,
                                expert_tensor_size=expert_tensor,
                                virtual_size=chunks,
                                micro_batch_size=batch,
                                sequence_parallel=sequence,
                                distributed_optimizer=options.distributed_optimizer,
                                overlap_gradient_reduce=options.overlap_gradient_reduce,
                                overlap_parameter_gather=options.overlap_gradient_reduce
                                and options.distributed_optimizer
                                and (options.overlap_parameter_gather or profile.device.exchange is not None),
                                bucket_elements=options.bucket_elements,
                                overlap_tensor_parallel=overlapped and tensor > 1,
                                schedule=schedule,
                                standalone_ends=alone,
                            )
                            for schedule in (options.schedules if chunks == 1 else ("interleaved",))
                        ]
    if options.paired:
        # Beside experts that stay on their rank there is nothing to hide.
        found += [
            replace(layout, paired=True) for layout in found if layout.expert_size > 1 and layout.schedule != "gpipe"
        ]
    return [layout for layout in found if all(getattr(layout, name) == size for name, size in options.held.items())]


def _illegal_pairs(profile: Profile, layout: Layout) -> str:
    """Return why Megatron cannot run combined 1F1B in a layout, or an empty string."""
    if layout.expert_size == 1:
        return "combined 1F1B needs EP above 1."
    if layout.pipeline_size > 1 and layout.virtual_size == 1:
        return f"combined 1F1B needs virtual stages where PP is above 1, here {layout.pipeline_size}."
    if len(profile.model.modules) > 1:
        return f"combined 1F1B runs only a language model, not {len(profile.model.modules)} modules."
    return ""


def _illegal(profile: Profile, cluster: Cluster, layout: Layout, global_batch_size: int) -> str:
    """Return why a layout cannot run, or an empty string."""
    sizes = layout.tensor_size, layout.pipeline_size, layout.context_size, layout.data_size
    reason = uneven_devices(cluster.num_devices, *sizes) or too_few_layers(profile, layout)
    reason = reason or (_illegal_pairs(profile, layout) if layout.paired else "")
    modules = profile.model.modules
    # A profile of another tool may measure experts without their number.
    has_experts = any(module.num_experts for module in modules) or any(
        measurement.at.expert_size > 1 for measurement in profile.measurements
    )
    reason = reason or broken_shares(layout, modules, has_experts)
    # No costs are computed for what cannot run; samples of measured ones may be padded.
    if not reason and profile.provenance.source == "analytic" and point_of(profile, layout) is None:
        reason = uneven_sequence(layout, profile.model.sequence_length)
    reason = reason or broken_groups(layout, has_experts)
    if not reason and layout.modules:
        return "separate sizes per module require --hetero-parallel."
    offloaded = profile.provenance.train.get("cpu_offloading_num_layers")
    reason = reason or _illegal_batch(layout, global_batch_size)
    return reason or offloaded_beside_stages(layout, offloaded if isinstance(offloaded, int) else 0)


def _illegal_batch(layout: Layout, global_batch_size: int) -> str:
    """Return why a layout cannot run a global batch, or why it is not planned, or an empty string."""
    reason = broken_batch(layout, global_batch_size)
    if not reason:
        count = layout.num_microbatches(global_batch_size)
        operations = 2 * layout.num_virtual_stages * count
        if operations > MOST_OPERATIONS:
            return f"{count} microbatches: {operations} operations a step are more than {MOST_OPERATIONS}."
    return reason


def unmet_ramp(layout: Layout, ramp: range) -> str:
    """Return why a layout cannot run one of the global batches of ``ramp``, or an empty string."""
    # Remainders of equal steps by a group recur after as many steps.
    first = ramp[: max(2, layout.microbatch_group_size, layout.pipeline_size)]
    reasons = ((batch, _illegal_batch(layout, batch)) for batch in first)
    unmet = next(((batch, reason) for batch, reason in reasons if reason), None)
    return "" if unmet is None else f"--rampup-batch-size trains batches of {unmet[0]} first: {unmet[1]}"


def with_smallest_groups(layout: Layout, global_batch_size: int) -> Layout:
    """Return an interleaved layout with the smallest group of microbatches that its host runs: it holds least."""
    if layout.schedule != "interleaved" or global_batch_size % (layout.data_size * layout.micro_batch_size):
        return layout
    count = layout.num_microbatches(global_batch_size)
    if count % layout.pipeline_size == 0 or count < layout.pipeline_size:
        return layout
    return replace(layout, microbatch_group_size=group_sizes(layout.pipeline_size, count)[0])


def _powers_of_two(highest: int) -> list[int]:
    return [2**power for power in range(highest.bit_length()) if 2**power <= highest]
