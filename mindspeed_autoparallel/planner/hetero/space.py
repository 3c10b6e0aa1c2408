"""Encoder layouts worth trying with one layout of the backbone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import TypeVar

import numpy

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.hetero.encoder_costs import EncoderCosts
from mindspeed_autoparallel.planner.hetero.encoders import encoder_phase
from mindspeed_autoparallel.planner.hetero.generator import generator_phase
from mindspeed_autoparallel.profiles import MeasuredAt, Profile
from mindspeed_autoparallel.profiles.interpolation import interpolate
from mindspeed_autoparallel.spec import Cluster, Module, ModuleLayout
from mindspeed_autoparallel.spec.hetero import MEMORY_MODES, EncoderPhase, HeteroRecord
from mindspeed_autoparallel.spec.model import GENERATOR

BACKBONE = "text_decoder"
T = TypeVar("T")


def split_modules(profile: Profile) -> tuple[tuple[Module, ...], tuple[Module, ...]]:
    """Return encoders, and the modules of the pipeline: the backbone and its successors. Raises ``ConfigError``."""
    modules = profile.model.modules
    names = [module.name for module in modules]
    at = names.index(BACKBONE) if BACKBONE in names else len(modules) - 1
    if at == 0:
        raise ConfigError(
            f"hetero parallel needs an encoder before the backbone; the profile of {profile.model.name} has only "
            f"{', '.join(names)}. Plan it without --hetero-parallel, or profile the whole model."
        )
    return modules[:at], modules[at:]


def generator_of(profile: Profile) -> Module | None:
    """Return the generator that can have a separate layout: the single module after the backbone, if a generator."""
    _, (_, *behind) = split_modules(profile)
    return behind[0] if len(behind) == 1 and behind[0].name.endswith(GENERATOR) else None


def phase_of(
    costs: EncoderCosts, sizes: ModuleLayout, candidate: Candidate, *, memory: str, balance: str
) -> EncoderPhase:
    """Return an encoder's or a generator's part of a step; ``memory`` is the encoder's."""
    if costs.generates:
        return generator_phase(costs, sizes, candidate, balance=balance)
    return encoder_phase(costs, sizes, candidate, memory=memory, balance=balance)


def costs_of(
    profile: Profile,
    module: Module,
    cluster: Cluster,
    only: Sequence[int] | None = None,
    pipeline_sizes: Sequence[int] = (1,),
) -> tuple[list[EncoderCosts], list[str]]:
    """Return the encoder's costs at every (TP, CP) that divides cluster and heads, and a reason for each other size. A
    generator has no context parallelism.

    ``only``: TP sizes to try; ``pipeline_sizes``: stage counts to try. Raises ``ConfigError`` if no size remains.
    """
    measured = {(m.at.tensor_size, m.at.context_size) for m in profile.measurements}
    tensors = {tensor for tensor, _ in measured}
    if profile.memory_semantics != "mindspeed":
        tensors |= {2**power for power in range(cluster.devices_per_node.bit_length())}
    found, reasons = list[EncoderCosts](), list[str]()
    generates = generator_of(profile) == module
    contexts = {1} if generates else {context for _, context in measured}
    for tensor, context in sorted(product(only or tensors, contexts)):
        label = f"{module.name} TP{tensor} CP{context}"
        if cluster.num_devices % (tensor * context):
            reasons.append(f"{label}: {cluster.num_devices} devices are not a multiple of it.")
        elif module.num_heads and (module.num_heads % tensor or module.num_heads % context):
            reasons.append(f"{label}: the {module.num_heads} heads cannot be divided by it.")
        elif (point := _point(profile, tensor, context)) is None:
            reasons.append(f"{label}: the profile has no costs for it.")
        else:
            found.append(EncoderCosts(profile, module, point, tuple(pipeline_sizes), generates=generates))
    if not found:
        raise ConfigError(f"{module.name} has no possible separate layout: {' '.join(reasons)} Measure more sizes.")
    return found, reasons


def _point(profile: Profile, tensor: int, context: int) -> MeasuredAt | None:
    """Return a point with these sizes; encoders run without sequence parallelism, so one without it comes first."""
    points = sorted(m.at for m in profile.measurements)
    for at in sorted(points, key=lambda at: (at.sequence_parallel, at.micro_batch_size, at.expert_size)):
        moved = replace(at, tensor_size=tensor, context_size=context)
        if moved in points or interpolate(profile.measurements, moved) is not None:
            return moved
    return None


def records(
    costs: Sequence[Sequence[EncoderCosts]], candidate: Candidate, memory_modes: Iterable[str], balance: str
) -> list[HeteroRecord]:
    """Return the Pareto-optimal choices, in time and memory, of (TP, CP, PP, scale) per encoder and of memory mode."""
    found: list[HeteroRecord] = []
    for memory in memory_modes:
        rows = [_undominated_phases(own, candidate, memory, balance) for own in costs]
        found += [HeteroRecord(memory=memory, balance=balance, encoders=phases) for phases in product(*rows)]
    return _undominated(found)


def _undominated_phases(
    costs: Sequence[EncoderCosts], candidate: Candidate, memory: str, balance: str
) -> list[EncoderPhase]:
    phases = [
        phase_of(own, sizes, candidate, memory=memory, balance=balance)
        for own in costs
        for sizes in layouts_of(own, candidate)
    ]
    phases.sort(key=lambda p: (p.total_us, p.state_bytes + p.kept_bytes, p.transient_bytes, _sizes(p.layout)))
    return _unbeaten(phases, _weights)


def layouts_of(costs: EncoderCosts, candidate: Candidate) -> list[ModuleLayout]:
    """Return one (TP, CP) with every pipeline size and scale; with a pipeline, only the smallest scale for each number
    of macro-batches. A generator processes one microbatch at a time."""
    count = candidate.num_microbatches
    found: list[ModuleLayout] = []
    for stages in costs.pipeline_sizes:
        scales = (1,) if costs.generates else range(1, count + 1) if stages == 1 else distinct_scales(count)
        found += layouts_at(costs, candidate, stages, scales)
    return found


def layouts_at(costs: EncoderCosts, candidate: Candidate, stages: int, scales: Iterable[int]) -> list[ModuleLayout]:
    """Return one (TP, CP) with one pipeline size and every scale; none if the devices or layers do not allow it."""
    tensor, context, devices = costs.point.tensor_size, costs.point.context_size, candidate.cluster.num_devices
    width = tensor * context * stages
    if devices % width or not 1 <= stages <= costs.module.num_layers:
        return []
    return [
        ModuleLayout(
            tensor_size=tensor,
            pipeline_size=stages,
            context_size=context,
            data_size=devices // width,
            micro_batch_scale=scale,
        )
        for scale in scales
    ]


def distinct_scales(num_microbatches: int) -> Sequence[int]:
    """Return the smallest scale for each number of macro-batches: the others are less even."""
    return sorted({-(-num_microbatches // number) for number in range(1, num_microbatches + 1)})


def _weights(phase: EncoderPhase) -> tuple[float, ...]:
    return (phase.total_us, phase.state_bytes + phase.kept_bytes, phase.transient_bytes, phase.first_stage_bytes)


def _undominated(found: list[HeteroRecord]) -> list[HeteroRecord]:
    def weights(record: HeteroRecord) -> tuple[float, ...]:
        return (record.total_us, record.reserved_bytes, record.transient_bytes, record.first_stage_bytes)

    found.sort(key=lambda r: (*weights(r), MEMORY_MODES.index(r.memory), tuple(_sizes(p.layout) for p in r.encoders)))
    return _unbeaten(found, weights)


def _unbeaten(found: Sequence[T], weights: Callable[[T], tuple[float, ...]]) -> list[T]:
    """Return the items of ``found``, in order, except those that an earlier one matches or beats in every weight."""
    rows = numpy.array([weights(one) for one in found], dtype=numpy.float64)
    kept, left = list[T](), numpy.arange(len(found))
    while len(left):
        first, left = left[0], left[1:]
        kept.append(found[int(first)])
        left = left[(rows[left] < rows[first]).any(axis=1)]
    return kept


def _sizes(layout: ModuleLayout) -> tuple[int, ...]:
    return (layout.tensor_size, layout.pipeline_size, layout.context_size, layout.micro_batch_scale)
