"""A profile computed from shapes and the device catalogue: planning with no accelerator at all, marked as such."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterator, Sequence

from mindspeed_autoparallel.cost.analytic.memory import CONTEXT_BYTES
from mindspeed_autoparallel.cost.analytic.reading import read_workload
from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.cost.collectives import Fabric
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.predict.analytic_blocks import module_cost
from mindspeed_autoparallel.predict.model_file import Section
from mindspeed_autoparallel.predict.space import MOST_EXPERT_RANKS
from mindspeed_autoparallel.profiles import (
    Collective,
    DeviceCost,
    LinkTier,
    MeasuredAt,
    Measurement,
    Profile,
    Provenance,
)
from mindspeed_autoparallel.spec.model import RESULT_KEYS, Model, Module

_STACK = "megatron-core"
_MICRO_BATCHES = (1, 2, 4, 8)
_LONG_SEQUENCE = 8192
"""From here on context parallelism is worth its communication, and is among the points."""


def analytic_profile(
    sections: Sequence[Section],
    device: Device,
    devices_per_node: int,
    *,
    network_gbit_per_s: float | None = None,
    command: str = "",
    model_hash: str = "",
    interleaved_sends: str = "freed",
) -> Profile:
    """Return costs of every module in every tensor, context, expert and micro-batch size worth trying.

    The last section is the text decoder: it has the embedding, the head and the loss. Raises ``ConfigError`` where a
    section's shape is impossible whatever the layout.
    """
    efficiency = device.efficiency(_STACK)
    fabric = Fabric.of(device, efficiency, devices_per_node, network_gbit_per_s)
    whole = [_workload(section, device, MeasuredAt(), devices_per_node) for section in sections]
    measurements = []
    for point in _points(whole, devices_per_node):
        works = _works(sections, device, point, devices_per_node)
        if works is not None:
            costs = {
                section.name: module_cost(
                    work, device, fabric, section.frozen, is_last=section is sections[-1], alone=len(sections) == 1
                )
                for section, work in zip(sections, works, strict=True)
            }
            measurements.append(Measurement(at=point, modules=costs))
    return Profile(
        model=_model(sections, whole, measurements[0]),
        device=_device_cost(device, fabric),
        measurements=tuple(measurements),
        provenance=Provenance(
            source="analytic",
            device=device.name,
            created_utc=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            model_hash=model_hash,
            software={"stack": _STACK, "efficiencies": efficiency.provenance},
            command=command,
        ),
        interleaved_sends=interleaved_sends,
    )


def _workload(section: Section, device: Device, point: MeasuredAt, devices_per_node: int) -> Workload:
    ranks = point.tensor_size * point.context_size * point.expert_size
    parallel = {"tp": point.tensor_size, "cp": point.context_size, "sp": point.sequence_parallel, "dist_opt": True}
    if section.shape.get("num_experts"):
        parallel |= {"ep": point.expert_size, "etp": point.expert_tensor_size or point.tensor_size}
    try:
        return read_workload(
            {
                "model": section.shape,
                "hw": {"gpu": device.name, "num_gpus": ranks, "gpus_per_node": devices_per_node},
                "parallel": parallel,
                "train": {"gbs": point.micro_batch_size * ranks, "mbs": point.micro_batch_size, "stack": _STACK},
            }
        )
    except ConfigError as error:
        raise ConfigError(f"{section.name}: {error}") from error


def _works(
    sections: Sequence[Section], device: Device, point: MeasuredAt, devices_per_node: int
) -> list[Workload] | None:
    """Return every section at ``point``, or ``None`` where one of them cannot be laid out so."""
    try:
        return [_workload(section, device, point, devices_per_node) for section in sections]
    except ConfigError:
        return None


def _powers_up_to(limit: int) -> list[int]:
    return [2**power for power in range(limit.bit_length())]


def _points(whole: Sequence[Workload], devices_per_node: int) -> Iterator[MeasuredAt]:
    """Yield ``MeasuredAt()`` first, which any possible shape allows."""
    powers = _powers_up_to(devices_per_node)
    most = max(work.model.num_experts for work in whole)
    # Many small experts are spread over nodes: what a rank holds of them is what memory asks for.
    experts = _powers_up_to(max(devices_per_node, min(most, MOST_EXPERT_RANKS))) if most else [1]
    contexts = powers if whole[-1].model.sequence >= _LONG_SEQUENCE else [1]
    for context in contexts:
        for expert, tensor, micro_batch in itertools.product(experts, powers, _MICRO_BATCHES):
            for expert_tensor in _shared_by(whole, tensor):
                yield MeasuredAt(
                    tensor_size=tensor,
                    context_size=context,
                    expert_size=expert,
                    micro_batch_size=micro_batch,
                    sequence_parallel=tensor > 1,
                    expert_tensor_size=expert_tensor,
                )


def _shared_by(whole: Sequence[Workload], tensor: int) -> tuple[int, ...]:
    """Return how many tensor ranks may share an expert: all of them (0), or 1. Megatron adds biases to whole experts
    alone."""
    if tensor == 1 or not any(work.model.num_experts for work in whole):
        return (0,)
    return (1,) if any(work.model.expert_bias for work in whole) else (0, 1)


def _model(sections: Sequence[Section], whole: Sequence[Workload], plain: Measurement) -> Model:
    modules, total = [], 0
    for section, work in zip(sections, whole, strict=True):
        cost = plain.modules[section.name]
        total += sum(
            number * (block.dense.num_parameters + block.expert.num_parameters)
            for _, block, number in cost.parts(work.model.num_layers)
        )
        modules.append(
            Module(
                name=section.name,
                result_key=RESULT_KEYS.get(section.name, section.name),
                num_layers=work.model.num_layers,
                frozen=section.frozen,
                hidden_size=work.model.hidden,
                tokens_per_sample=work.model.sequence,
                num_heads=work.model.heads,
                num_kv_heads=work.model.kv_heads,
                num_experts=work.model.num_experts,
                predecessors=tuple(other.name for other in sections[:-1]) if section is sections[-1] else (),
                deepstack_layers=section.deepstack_layers,
            )
        )
    text = whole[-1].model
    return Model(
        name=sections[-1].name if len(sections) == 1 else "+".join(section.name for section in sections),
        modules=tuple(modules),
        sequence_length=text.sequence,
        vocab_size=text.vocabulary,
        tied_embeddings=text.tied,
        num_parameters=total,
    )


def _device_cost(device: Device, fabric: Fabric) -> DeviceCost:
    efficiency = device.efficiency(_STACK)

    def tier(latency_us: float, bytes_per_us: float) -> LinkTier:
        send = Collective(latency_us=efficiency.point_to_point_us, bytes_per_s=bytes_per_us * 1e6)
        return LinkTier(
            default=Collective(latency_us=latency_us, bytes_per_s=bytes_per_us * 1e6), operations={"p2p": send}
        )

    # Adam reads and writes moments, master weights, gradient and parameter: 36 bytes per parameter of 2 bytes.
    optimizer = 36 / 2 / (device.memory_bandwidth_gb_per_s * 1e3 * efficiency.optimizer_fraction)
    return DeviceCost(
        memory_capacity_bytes=int(device.memory_gib * 2**30) - CONTEXT_BYTES,
        runtime_overhead_bytes=device.workspace_bytes,
        intra=tier(fabric.link_latency_us, fabric.link_bytes_per_us),
        inter=tier(fabric.inter_latency_us, fabric.inter_bytes_per_us / fabric.devices_per_node),
        optimizer_step_us_per_byte=optimizer,
        optimizer_step_fixed_us=efficiency.step_us,
    )
