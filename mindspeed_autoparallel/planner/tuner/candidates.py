"""Every combination of the searched dimensions: legal ones as candidates, the others counted by the rule they break."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.layouts.bounds import pipeline_bound_ns, sharding_bound_us, tail_bound_us
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions, enumerate_layouts
from mindspeed_autoparallel.planner.stage_times import NS_PER_US
from mindspeed_autoparallel.profiles import MeasuredAt, Measurement, Profile
from mindspeed_autoparallel.spec import Cluster, Layout, Sharding
from mindspeed_autoparallel.spec.recompute import RECOMPUTE_KINDS


@dataclass(frozen=True, kw_only=True)
class ProfileVariant:
    """Configurations that run the same layers: one MoE dispatcher, one split of experts, and so on."""

    name: str
    """Name; empty for the script's own configuration."""
    settings: dict[str, object]
    """Megatron's argument destinations and values, in addition to the layout's."""
    profile: Profile
    modelled: tuple[str, ...] = ()
    """Switches whose effect was computed and never traced or measured."""
    interval: tuple[Profile, Profile] | None = None
    """Profiles if these switches hide all the time that the model assumes, and if they hide nothing."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables that the switches need; an empty value must be unset."""
    paired: bool = False
    shards_parameters: bool | None = None
    """ZeRO-3 (true), ZeRO-2 (false) or neither."""
    communication_unit: int | None = None
    """Communication unit of ZeRO-2 and ZeRO-3, in elements; ``None``: two layers."""


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """Search dimensions in addition to the sizes that the traces cover."""

    virtual_sizes: tuple[int, ...] = (1, 2, 3, 4)
    distributed_optimizer: tuple[bool, ...] = (True, False)
    overlap_gradient_reduce: tuple[bool, ...] = (True, False)
    overlap_parameter_gather: tuple[bool, ...] = (True, False)
    """Values for layouts with bucketed reduction and a distributed optimizer, which Megatron requires."""
    bucket_elements: int = 0
    """Elements per bucket; 0: Megatron's default."""
    recompute: tuple[str, ...] = RECOMPUTE_KINDS
    layer_groups: bool = True
    """Whether to try full recompute of groups of layers."""
    uneven_stages: bool = True
    ramp: range = range(0)
    """As in ``SpaceOptions``."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A legal layout of a variant, with lower bounds of its placements."""

    variant: ProfileVariant
    candidate: Candidate
    bound_us: float

    @property
    def layout(self) -> Layout:
        """Return its sizes."""
        return self.candidate.layout

    def under(self, layout: Layout) -> Configuration:
        """Return the same configuration with other overlaps."""
        return replace(self, candidate=replace(self.candidate, layout=layout))

    @property
    def key(self) -> tuple[object, ...]:
        """Return the identity of a recommendation: sizes, not switches."""
        layout = self.layout
        return (
            layout.tensor_size,
            layout.pipeline_size,
            layout.context_size,
            layout.expert_size,
            layout.virtual_size,
            layout.micro_batch_size,
        )


@dataclass
class Space:
    """The legal configurations, and the number of others by broken rule."""

    num_devices: int
    configurations: list[Configuration] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def enumerate_space(variants: Sequence[ProfileVariant], cluster: Cluster, batch: int, dimensions: Dimensions) -> Space:
    """Return all combinations, bounds included; the same order for the same input."""
    space = Space(cluster.num_devices)
    for variant in variants:
        layouts = list(_layouts(variant, cluster, dimensions))
        found, verdicts = enumerate_layouts(
            variant.profile, cluster, batch, SpaceOptions(ramp=dimensions.ramp), layouts
        )
        for verdict in verdicts:
            # One line per rule, not per number in it.
            space.left_out[re.sub(r"\d+", "N", verdict.reason)] += 1
        bounds: dict[str, float] = {}
        for candidate in found:
            # Switches of optimizer and communication change the tail only.
            plain = replace(candidate.layout, distributed_optimizer=True).label()
            if plain not in bounds:
                bounds[plain] = max(pipeline_bound_ns(candidate) / NS_PER_US, sharding_bound_us(candidate))
            bound = bounds[plain] + tail_bound_us(candidate)
            space.configurations.append(Configuration(variant=variant, candidate=candidate, bound_us=bound))
    return space


def _layouts(variant: ProfileVariant, cluster: Cluster, dimensions: Dimensions) -> Iterator[Layout]:
    for measurement in sorted(variant.profile.measurements, key=lambda item: item.at):
        for layout in _plain_layouts(measurement.at, cluster, dimensions):
            if variant.shards_parameters is not None:
                # Its state is split over data-parallel ranks by definition, and pipelines are not modelled.
                if layout.pipeline_size == 1 and layout.distributed_optimizer and layout.data_size > 1:
                    yield replace(layout, sharding=_sharding(variant, measurement))
            elif not variant.paired:
                yield layout
            elif layout.pipeline_size == 1 or layout.virtual_size > 1:
                yield replace(layout, paired=True)


def _sharding(variant: ProfileVariant, measurement: Measurement) -> Sharding:
    layers = [module.layer for module in measurement.modules.values()]
    elements = max(layer.dense.num_parameters + layer.expert.num_parameters for layer in layers)
    unit = variant.communication_unit or max(1, 2 * elements)
    return Sharding(parameters=bool(variant.shards_parameters), communication_unit=unit)


def _plain_layouts(point: MeasuredAt, cluster: Cluster, dimensions: Dimensions) -> Iterator[Layout]:
    devices = cluster.num_devices
    shards = point.tensor_size * point.context_size
    if devices % shards:
        return
    for pipeline in (size for size in range(1, devices // shards + 1) if devices // shards % size == 0):
        for chunks in dimensions.virtual_sizes if pipeline > 1 else (1,):
            for whole in dimensions.distributed_optimizer:
                yield Layout(
                    pipeline_size=pipeline,
                    **vars(point),
                    data_size=devices // shards // pipeline,
                    virtual_size=chunks,
                    distributed_optimizer=whole,
                    # With all possible overlaps: a lower bound of any other choice (``overlaps``).
                    overlap_gradient_reduce=True in dimensions.overlap_gradient_reduce,
                    bucket_elements=dimensions.bucket_elements,
                    schedule="interleaved" if chunks > 1 else "1f1b",
                )


def overlaps(layout: Layout, dimensions: Dimensions) -> list[Layout]:
    """Return ``layout`` with every legal overlap of gradient reduction and parameter gathering.

    Only ``layout`` itself if no ranks share parameters, or if sharded gradients are reduced throughout the step.
    """
    if layout.sharding is not None:
        return [layout]
    shared = layout.data_size * layout.context_size > 1
    return [
        replace(layout, overlap_gradient_reduce=reduce, overlap_parameter_gather=gather)
        for reduce in (dimensions.overlap_gradient_reduce if shared else (False,))
        for gather in dimensions.overlap_parameter_gather
        if not gather or (reduce and layout.distributed_optimizer)
    ]
